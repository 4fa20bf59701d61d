"""Streams of text to an HTTP answer: as events, or collected.

Owns: submitting all choices of a request or none, their end on the wire. Runs in: gateway. Must not know: field names.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.gateway.deltas import GenerationSpec, TextDelta
from headrace.gateway.http import sse
from headrace.gateway.http.errors import error_body, internal_error
from headrace.gateway.http.exchange import ClientGoneError, Exchange
from headrace.gateway.http.schemas import PromptTokensDetails, UsageBlock
from headrace.gateway.ports import GenerationService, GenerationStream
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import Usage
from headrace.telemetry.logs import get_logger

log = get_logger("http")

STREAM_TYPE = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class ChoiceFrames(Protocol):
    """Frames of one choice (sse.py has one class for each endpoint)."""

    def text_event(self, text: str) -> bytes:
        """A frame with text."""
        ...

    def last_event(self, text: str, finish_reason: str, stop_string: str | None) -> bytes:
        """The frame that ends the choice."""
        ...


@dataclass(slots=True)
class Ending:
    """How a choice ended, and its whole text where it was collected."""

    text: str
    finish_reason: str
    stop_string: str | None
    usage: Usage


class EndedStream:
    """A stream that ends at once without a token: what max_tokens 0 asks for."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._usage = Usage(num_prompt_tokens=num_prompt_tokens, num_output_tokens=0)

    async def next_delta(self) -> TextDelta:
        """The end."""
        return TextDelta(finish_reason="length", usage=self._usage)

    def cancel(self) -> None:
        """Nothing runs."""


@contextmanager
def submitted(service: GenerationService, specs: Sequence[GenerationSpec]) -> Iterator[list[GenerationStream]]:
    """All specs as streams, cancelled on the way out (which does nothing to those that ended).

    Raises the RequestError of the first that is refused; the ones before it are then cancelled.
    """
    streams: list[GenerationStream] = []
    try:
        for spec in specs:
            nothing_to_do = spec.stopping.max_tokens == 0
            streams.append(EndedStream(len(spec.prompt_token_ids)) if nothing_to_do else service.submit(spec))
        yield streams
    finally:
        for stream in streams:
            stream.cancel()


async def collect(exchange: Exchange, streams: list[GenerationStream]) -> list[Ending]:
    """Wait for every stream's end. Raises the RequestError of the first that failed; ClientGoneError."""
    endings: list[Ending | None] = [None] * len(streams)

    async def one(number: int) -> None:
        parts: list[str] = []
        while True:
            delta = await streams[number].next_delta()
            parts.append(delta.text)
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason is not None:
                endings[number] = Ending("".join(parts), delta.finish_reason, delta.stop_string, _usage(delta))
                return

    await exchange.run_while_connected(_all_of(one, len(streams)))
    return [ending for ending in endings if ending is not None]


class EventWriter:
    """Sends one answer as events: one `send` for each wake-up of a choice."""

    def __init__(self, exchange: Exchange, envelope: sse.Envelope, keep_alive_seconds: float) -> None:
        self._exchange = exchange
        self._envelope = envelope
        self._tick_seconds = keep_alive_seconds / 2
        self._lock = asyncio.Lock()
        self._quiet = True
        self._comment: asyncio.Task[None] | None = None
        self._usages: dict[int, Usage] = {}

    async def run(
        self, streams: list[GenerationStream], frames: Sequence[ChoiceFrames], num_choices: int, include_usage: bool
    ) -> None:
        """Headers, then every choice to its end, the usage if asked for, and [DONE], whatever happens in between.

        A fault after the start becomes one error frame. Raises ClientGoneError when the client went.
        """
        await self._exchange.start_stream(STREAM_TYPE, STREAM_HEADERS)
        timer = _Ticker(self._tick_seconds, self._on_tick)
        try:
            await self._exchange.run_while_connected(self._events(streams, frames, num_choices if include_usage else 0))
        finally:
            timer.stop()
            if self._comment is not None:
                self._comment.cancel()

    async def _events(self, streams: list[GenerationStream], frames: Sequence[ChoiceFrames], usage_choices: int) -> None:
        """`usage_choices`: 0 when no usage is wanted, else the answers to each prompt."""
        tail = sse.DONE
        try:
            await self._choices(streams, frames)
            if usage_choices:
                usage = usage_block([self._usages[number] for number in range(len(streams))], usage_choices)
                tail = self._envelope.usage_event(usage) + sse.DONE
        except ClientGoneError:
            raise
        except RequestError as error:
            tail = sse.error_event(error_body(error)) + sse.DONE
            log.warning(
                "a stream ended with an error", request_id=self._exchange.request_id.decode(), code=error.code.value.code
            )
        except Exception:
            tail = sse.error_event(error_body(internal_error())) + sse.DONE
            log.exception("a stream failed inside the server", request_id=self._exchange.request_id.decode())
        await self._send(tail, more=False)

    async def _choices(self, streams: list[GenerationStream], frames: Sequence[ChoiceFrames]) -> None:
        async def one(number: int) -> None:
            next_delta = streams[number].next_delta
            frame = frames[number]
            while True:
                delta = await next_delta()
                if delta.error is None and delta.finish_reason is None:
                    if delta.text:
                        await self._send(frame.text_event(delta.text))
                    continue
                if delta.error is not None:
                    if delta.text:
                        await self._send(frame.text_event(delta.text))
                    raise delta.error
                self._usages[number] = _usage(delta)
                await self._send(frame.last_event(delta.text, delta.finish_reason or "", delta.stop_string))
                return

        await _all_of(one, len(streams))

    async def _send(self, frame: bytes, more: bool = True) -> None:
        """The lock keeps frames of several choices and comments in order while one waits for the socket."""
        self._quiet = False
        async with self._lock:
            try:
                await self._exchange.send({"type": "http.response.body", "body": frame, "more_body": more})
            except Exception as error:
                raise ClientGoneError from error

    def _on_tick(self) -> None:
        """A comment when nothing was sent since the last tick: silence never lasts longer than two ticks."""
        if self._quiet and not self._lock.locked():
            self._comment = asyncio.ensure_future(self._send_comment())
        self._quiet = True

    async def _send_comment(self) -> None:
        try:
            await self._send(sse.KEEP_ALIVE)
        except ClientGoneError:
            return  # who reads from the connection learns it as well, and acts


class _Ticker:
    """Calls back at an interval, with neither a task nor a wake-up in between."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds = seconds
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        self._handle = self._loop.call_later(self._seconds, self._fire)
        self._callback()

    def stop(self) -> None:
        """No call afterwards."""
        self._handle.cancel()


def usage_block(usages: Sequence[Usage], num_choices: int) -> UsageBlock:
    """Usage over all choices: each prompt once (as its first answer met it), all output. `num_choices`: answers to a prompt."""
    prompts = usages[::num_choices]
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in prompts)
    num_output_tokens = sum(usage.num_output_tokens for usage in usages)
    return UsageBlock(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.num_cached_tokens for usage in prompts)),
    )


def _usage(delta: TextDelta) -> Usage:
    if delta.usage is None:
        raise RuntimeError("a stream ended without its usage")
    return delta.usage


async def _all_of(one: Callable[[int], Coroutine[Any, Any, None]], count: int) -> None:
    """one(0) .. one(count - 1) side by side; the first exception ends the others and is raised itself."""
    if count == 1:
        await one(0)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None

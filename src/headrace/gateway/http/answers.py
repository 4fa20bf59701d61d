"""Streams of text to an HTTP answer: as events, or collected.

Owns: submitting all choices of a request or none, their end on the wire. Runs in: gateway. Must not know: field names.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headrace.gateway.deltas import CallOutline, GenerationSpec, RequestOrigin, TextDelta
from headrace.gateway.http import sse
from headrace.gateway.http.errors import error_body, internal_error
from headrace.gateway.http.exchange import ClientGoneError, Exchange, Headers
from headrace.gateway.http.parameters import StreamWish
from headrace.gateway.http.schemas import ChatCompletion, PromptTokensDetails, TextCompletion, UsageBlock
from headrace.gateway.http.timelines import early_server_timing, reports_of, server_timing, unrun_report
from headrace.gateway.http.traffic import Routing
from headrace.gateway.ports import GenerationService, GenerationStream
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import Usage
from headrace.telemetry.logs import get_logger
from headrace.telemetry.reports import RequestReport

log = get_logger("http")

STREAM_TYPE = b"text/event-stream; charset=utf-8"
STARTED = "headrace.started"  # key in an exchange's scope: its requests were let in, so what fails now was no refusal
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

    def __init__(self, spec: GenerationSpec, model: str) -> None:
        self._usage = Usage(num_prompt_tokens=len(spec.prompt_token_ids), num_output_tokens=0)
        self._report = unrun_report(spec, model)

    async def next_delta(self) -> TextDelta:
        """The end."""
        return TextDelta(finish_reason="length", usage=self._usage)

    def cancel(self) -> None:
        """Nothing runs."""

    def timeline_report(self) -> RequestReport:
        """It ended when it began."""
        return self._report

    def note_slow_reader(self, began_ns: int, duration_ns: int) -> None:
        """Nothing is measured of it."""


@contextmanager
def submitted(
    service: GenerationService, specs: Sequence[GenerationSpec], call: CallOutline
) -> Iterator[list[GenerationStream]]:
    """All specs as streams, cancelled on the way out (which does nothing to those that ended). Raises RequestError.

    `call`: as check_admission has let it pass. Specs without a token to generate need no worker.
    """
    streams: list[GenerationStream] = []
    try:
        if all(spec.stopping.max_tokens == 0 for spec in specs):
            streams += [EndedStream(spec, service.card.id) for spec in specs]
        else:
            streams += service.submit_call(specs, call)
        yield streams
    finally:
        for stream in streams:
            stream.cancel()


async def collect(exchange: Exchange, streams: list[GenerationStream], wish: StreamWish) -> list[Ending]:
    """Wait for every stream's end. Raises the RequestError of the first that failed; ClientGoneError.

    A timeline that is wished for is in the exchange afterwards, also when it failed.
    """
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

    exchange.scope[STARTED] = True
    try:
        await exchange.run_while_connected(_all_of(one, len(streams)))
    finally:
        if wish.include_timeline:
            _cancel_all(streams)
            exchange.timeline = reports_of(streams)
    return [ending for ending in endings if ending is not None]


class EventWriter:
    """Sends one answer as events: one `send` for each wake-up of a choice.

    Status and headers wait for the first frame, so that a fault before it is an answer with a status of its own. They never
    wait longer than half of `keep_alive_seconds`: the first comment takes them along.

    A `send` that takes `stall_threshold_ns` waits for a client that does not read: the choice's timeline is told.
    """

    def __init__(self, exchange: Exchange, envelope: sse.Envelope, keep_alive_seconds: float, stall_threshold_ns: int) -> None:
        self._exchange = exchange
        self._stall_threshold_ns = stall_threshold_ns
        self._envelope = envelope
        self._tick_seconds = keep_alive_seconds / 2
        self._lock = asyncio.Lock()
        self._quiet = True
        self._headers: Headers | None = STREAM_HEADERS  # None: sent
        self._comment: asyncio.Task[None] | None = None
        self._usages: dict[int, Usage] = {}

    async def run(
        self,
        streams: list[GenerationStream],
        frames: Sequence[ChoiceFrames],
        num_choices: int,
        wish: StreamWish,
        origin: RequestOrigin,
    ) -> None:
        """Headers, then every choice to its end, usage and timeline if wished for, and [DONE], whatever happens in between.

        A fault after the headers becomes one error frame. One before them is raised, with the timeline in the exchange if
        that was wished for. Raises ClientGoneError when the client went.
        """
        self._exchange.scope[STARTED] = True
        if wish.include_timeline:
            self._headers = STREAM_HEADERS + early_server_timing(origin)
        timer = _Ticker(self._tick_seconds, self._on_tick)
        try:
            await self._exchange.run_while_connected(self._events(streams, frames, num_choices, wish))
        finally:
            timer.stop()
            if self._comment is not None:
                self._comment.cancel()

    async def _events(
        self, streams: list[GenerationStream], frames: Sequence[ChoiceFrames], num_choices: int, wish: StreamWish
    ) -> None:
        tail = b""
        try:
            await self._choices(streams, frames)
            if wish.include_usage:
                usage = usage_block([self._usages[number] for number in range(len(streams))], num_choices)
                tail = self._envelope.usage_event(usage)
        except ClientGoneError:
            raise
        except Exception as error:
            if self._headers is not None:
                if wish.include_timeline:
                    _cancel_all(streams)
                    self._exchange.timeline = reports_of(streams)
                raise
            tail = self._error_event(error)
        if wish.include_timeline:
            _cancel_all(streams)
            tail += self._envelope.timeline_event(reports_of(streams))
        await self._send(tail + sse.DONE, streams, more=False)

    def _error_event(self, error: Exception) -> bytes:
        request_id = self._exchange.request_id.decode()
        if isinstance(error, RequestError):
            log.warning("a stream ended with an error", request_id=request_id, code=error.code.value.code)
            return sse.error_event(error_body(error))
        log.error("a stream failed inside the server", request_id=request_id, exc_info=error)
        return sse.error_event(error_body(internal_error()))

    async def _choices(self, streams: list[GenerationStream], frames: Sequence[ChoiceFrames]) -> None:
        async def one(number: int) -> None:
            next_delta = streams[number].next_delta
            frame = frames[number]
            mine = (streams[number],)
            while True:
                delta = await next_delta()
                if delta.error is None and delta.finish_reason is None:
                    if delta.text:
                        await self._send(frame.text_event(delta.text), mine)
                    continue
                if delta.error is not None:
                    if delta.text:
                        await self._send(frame.text_event(delta.text), mine)
                    raise delta.error
                self._usages[number] = _usage(delta)
                await self._send(frame.last_event(delta.text, delta.finish_reason or "", delta.stop_string), mine)
                return

        await _all_of(one, len(streams))

    async def _send(self, frame: bytes, streams: Sequence[GenerationStream], more: bool = True) -> None:
        """The lock keeps frames of several choices and comments in order while one waits for the socket.

        `streams`: those that do not get on meanwhile. Waiting for the lock is waiting for the same client.
        """
        self._quiet = False
        began_ns = time.monotonic_ns()
        try:
            async with self._lock:
                try:
                    if self._headers is not None:
                        headers, self._headers = self._headers, None
                        await self._exchange.start_stream(STREAM_TYPE, headers)
                    await self._exchange.send({"type": "http.response.body", "body": frame, "more_body": more})
                except Exception as error:
                    raise ClientGoneError from error
        finally:
            duration_ns = time.monotonic_ns() - began_ns
            if duration_ns >= self._stall_threshold_ns:
                for stream in streams:
                    stream.note_slow_reader(began_ns, duration_ns)

    def _on_tick(self) -> None:
        """A comment when nothing was sent since the last tick: silence never lasts longer than two ticks.

        The first one comes after one tick, with the headers if they still wait.
        """
        if self._quiet and not self._lock.locked():
            self._comment = asyncio.ensure_future(self._send_comment())
        self._quiet = True

    async def _send_comment(self) -> None:
        try:
            await self._send(sse.KEEP_ALIVE, ())
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


async def respond_whole(exchange: Exchange, body: ChatCompletion | TextCompletion, routing: Routing) -> None:
    """Send a collected answer, with the tier and the timeline if they were asked for."""
    if routing.tier is not None:
        body.service_tier = routing.tier
    headers: Headers = []
    if exchange.timeline is not None:
        body.timeline = exchange.timeline
        headers = server_timing(exchange.timeline)
    await exchange.respond(200, msgspec.json.encode(body), headers=headers)


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


def _cancel_all(streams: Sequence[GenerationStream]) -> None:
    """End those that still run, so that their timelines are complete; which does nothing to those that ended."""
    for stream in streams:
        stream.cancel()


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

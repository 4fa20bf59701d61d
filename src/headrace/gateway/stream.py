"""One request's way from token ids to text, and the mailbox that its consumer reads.

Owns: TokenText, RequestStream. Runs in: gateway, on the event loop. Must not know: rings, HTTP, who else is served.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.gateway.admission import Permit
from headrace.gateway.deltas import GenerationSpec, TextDelta
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import Usage
from headrace.protocol.stalls import Stall, StallCause
from headrace.telemetry.reports import RequestReport
from headrace.telemetry.timeline import RequestTimeline
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop_strings import StopStringMatcher
from headrace.text.tokenizer import TextTokenizer


class TokenText:
    """Turns output ids into the text that the client may see: detokenized, and cut at a stop string.

    `num_tokens` counts the output tokens taken; once `stop_string` is set it stands at the token that completed it, and
    nothing more is taken. Stop strings, as stop tokens, do not count within the first `min_tokens` tokens.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "num_tokens", "stop_string")

    def __init__(self, tokenizer: TextTokenizer, spec: GenerationSpec) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, spec.skip_special_tokens, continues_text=spec.continues_text)
        self._matcher = StopStringMatcher(spec.stop_strings, spec.include_stop_string) if spec.stop_strings else None
        self._min_tokens = spec.stopping.min_tokens
        self.num_tokens = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens set free."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        return self._push_matched(token_ids, self._matcher)

    def finish(self) -> str:
        """The text that was held back, when no more tokens come. It may still complete a stop string."""
        text = self._detokenizer.finish()
        if self._matcher is None or self.stop_string is not None:
            return text if self.stop_string is None else ""
        update = self._matcher.push(text) if text else None
        if update is not None and update.stop is not None:
            self.stop_string = update.stop
            return update.text
        return (update.text if update is not None else "") + self._matcher.finish()

    def _push_matched(self, token_ids: Sequence[int], matcher: StopStringMatcher) -> str:
        """Token by token, so that the count stands at the token that completed the stop string."""
        freed = ""
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self.num_tokens <= self._min_tokens:
                freed += text
            elif text:
                update = matcher.push(text)
                freed += update.text
                if update.stop is not None:
                    self.stop_string = update.stop
                    break
        return freed


class StreamOwner(Protocol):
    """What a stream asks of the service that made it."""

    def cancel_stream(self, stream: "RequestStream") -> None:
        """Its consumer gives it up."""
        ...

    def report_on(self, stream: "RequestStream") -> RequestReport:
        """Its timeline as known now."""
        ...


class RequestStream:
    """The merging mailbox of one request: what was not yet read is one delta. Exactly one delta is the last.

    One producer (the demultiplexer) and one consumer, both on the event loop. A consumer that lags costs no memory but for
    its text; one that waits costs one future for each wait.
    """

    __slots__ = (
        "_is_over",
        "_last",
        "_num_unread_tokens",
        "_owner",
        "_unread",
        "_unread_since_ns",
        "_waiter",
        "epoch",
        "include_stop_token",
        "num_prompt_tokens",
        "num_tokens",
        "permit",
        "prompt_text",
        "request_id",
        "text",
        "timeline",
        "usage",
    )

    def __init__(
        self,
        request_id: int,
        epoch: int,
        spec: GenerationSpec,
        text: TokenText,
        permit: Permit,
        timeline: RequestTimeline,
        owner: StreamOwner,
        prompt_text: str = "",
    ) -> None:
        """`prompt_text`: for the log at its end; "" where prompts do not belong there."""
        self.request_id = request_id
        self.epoch = epoch  # of the worker that has it
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.include_stop_token = spec.include_stop_string
        self.num_tokens = 0  # received from the worker, contiguous
        self.text = text
        self.permit = permit
        self.timeline = timeline
        self.usage: Usage | None = None  # as far as the worker told it
        self.prompt_text = prompt_text
        self._owner = owner
        self._unread: list[str] = []
        self._unread_since_ns = 0  # since when the oldest text lies there
        self._num_unread_tokens = 0
        self._last: TextDelta | None = None
        self._is_over = False  # the last delta was read
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """True when the last delta lies in the mailbox or was read."""
        return self._last is not None

    async def next_delta(self) -> TextDelta:
        """Text since the last call, as one delta; waits when there is none. RuntimeError after the last delta."""
        if not self._unread and self._last is None:
            await self._wait()
        return self._take()

    def cancel(self) -> None:
        """Give the request up. Whoever waits for a delta gets a last one with an error."""
        if self._last is None:
            self._owner.cancel_stream(self)

    def timeline_report(self) -> RequestReport:
        """The timeline as known now; complete after the last delta."""
        return self._owner.report_on(self)

    def note_slow_reader(self, began_ns: int, duration_ns: int) -> None:
        """The client did not take what was ready for so long (longer than the stall threshold)."""
        self.timeline.note_stalls((Stall(StallCause.SLOW_READER, began_ns, duration_ns),))

    def unread_ns(self, now_ns: int) -> int:
        """For how long text has been waiting for the consumer; 0 when there is none."""
        return max(now_ns - self._unread_since_ns, 0) if self._unread else 0

    def put(self, text: str, num_tokens: int, now_ns: int) -> None:
        """Add text and the number of tokens behind it; wakes the consumer when there is something to read."""
        self._num_unread_tokens += num_tokens
        if text:
            if not self._unread:
                self._unread_since_ns = now_ns
            self._unread.append(text)
            self._wake()

    def end(self, finish_reason: str, usage: Usage) -> None:
        """The last delta, merged with the text before it. RuntimeError when there was one."""
        self._set_last(TextDelta(finish_reason=finish_reason, stop_string=self.text.stop_string, usage=usage))

    def fail(self, error: RequestError) -> None:
        """The last delta is an error; text before it is read first, on its own."""
        self._set_last(TextDelta(error=error))

    def drop(self, error: RequestError) -> None:
        """As fail, for a consumer that has gone: text before it is forgotten."""
        self._unread.clear()
        self._num_unread_tokens = 0
        self.fail(error)

    def _set_last(self, delta: TextDelta) -> None:
        if self._last is not None:
            raise RuntimeError(f"request {self.request_id} ended twice")
        self._last = delta
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a stream has one consumer")
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None

    def _take(self) -> TextDelta:
        if self._is_over:
            raise RuntimeError(f"request {self.request_id}: a delta was asked for after the last one")
        last = self._last
        unread = self._unread
        if last is None or (unread and last.error is not None):
            delta = TextDelta(unread[0] if len(unread) == 1 else "".join(unread), self._num_unread_tokens)
        else:
            delta = last
            delta.text = "".join(unread)
            delta.num_tokens = self._num_unread_tokens
            self._is_over = True
        unread.clear()
        self._num_unread_tokens = 0
        return delta

"""Event batches to mailboxes: finds each event's stream, turns its tokens into text, and ends it exactly once.

Owns: Demultiplexer, the live streams by request id. Runs in: gateway, on the event loop. Must not know: rings, HTTP.
"""

from collections.abc import Callable, Iterable

from headrace.gateway.stream import RequestStream
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, TokenEvent, Usage
from headrace.protocol.stalls import StallCause
from headrace.telemetry.logs import get_logger

log = get_logger("gateway")

_COMPLETED = frozenset({"stop", "length"})


class Demultiplexer:
    """The live streams. Every way in which a stream can end leads through _close: entry, permit and counts go with it.

    `cancel_sequence` tells the worker that a request's further tokens are not wanted; `on_closed` is called for each stream
    that has ended, `on_idle` after the last one. `waiting_cause`: what keeps requests from their first step now.
    `retry_after_seconds`: when to come again, for a request whose time ran out (it may be sent again).
    """

    def __init__(
        self,
        cancel_sequence: Callable[[int], None],
        on_idle: Callable[[], None],
        on_closed: Callable[[RequestStream], None],
        waiting_cause: Callable[[], StallCause],
        retry_after_seconds: Callable[[int], int],
    ) -> None:
        self._cancel_sequence = cancel_sequence
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._waiting_cause = waiting_cause
        self._retry_after_seconds = retry_after_seconds
        self._streams: dict[int, RequestStream] = {}
        self.num_unknown_events = 0  # of streams that have ended here: the worker is told, but not at once
        self.num_broken_sequences = 0  # streams ended because an event was lost or came twice

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    def open(self, stream: RequestStream) -> None:
        """From now on events of this request are the stream's."""
        self._streams[stream.request_id] = stream

    def take(self, batch: EventBatch, received_ns: int) -> None:
        """Deliver all events of a batch. One bad request never disturbs the others."""
        streams = self._streams
        for event in batch.events:
            stream = streams.get(event.request_id)
            if stream is None:
                self.num_unknown_events += 1
                continue
            try:
                self._deliver(stream, event, received_ns)
            except Exception:  # a fault in one request's text must not end the others
                log.exception("a request's tokens could not be turned into text", request_id=event.request_id)
                self._fail_internally(stream, event, received_ns)

    def cancel(self, stream: RequestStream, now_ns: int) -> None:
        """The consumer gave the request up: the entry is free at once, the worker is told."""
        if stream.has_ended:
            return
        self._note_cut_off(stream, None, now_ns)
        stream.drop(RequestError("The request was cancelled.", code=ErrorCode.INTERNAL))
        self._close(stream, "abort", stream.num_tokens, now_ns)
        self._cancel_sequence(stream.request_id)

    def fail_streams(
        self, streams: Iterable[RequestStream], make_error: Callable[[], RequestError], now_ns: int, *, cancel: bool = False
    ) -> None:
        """End these streams, each with an error of its own. `cancel`: a worker still has them and is to be told."""
        for stream in streams:
            error = make_error()
            self._note_cut_off(stream, error, now_ns)
            self._fail(stream, error, now_ns)
            if cancel:
                self._cancel_sequence(stream.request_id)

    def live_streams(self, max_epoch: int | None = None) -> list[RequestStream]:
        """Streams that have not ended, of workers up to this epoch."""
        return [stream for stream in self._streams.values() if max_epoch is None or stream.epoch <= max_epoch]

    def _deliver(self, stream: RequestStream, event: TokenEvent, received_ns: int) -> None:
        token_ids = event.token_ids
        if event.first_index != stream.num_tokens:
            self._break(stream, event, received_ns)
            return
        reason = event.finish_reason
        if event.usage is not None:
            stream.usage = event.usage
            stream.timeline.note_usage(event.usage.num_cached_tokens, event.usage.num_preemptions)
        if event.stalls:
            stream.timeline.note_stalls(event.stalls)
        text = ""
        if token_ids:
            if not stream.num_tokens:
                stream.permit.leave_queue(received_ns)
                stream.timeline.start(event.first_scheduled_ns)
            stream.num_tokens += len(token_ids)
            if reason is FinishReason.STOP and not stream.include_stop_token:
                token_ids = token_ids[:-1]  # what ended it is not part of the answer
            text = stream.text.push(token_ids)
            if stream.text.stop_string is None:
                stream.timeline.count_tokens(len(event.token_ids), received_ns)
            else:
                self._end_at_stop_string(stream, event, text, received_ns)
                return
        elif event.is_preempted:
            stream.timeline.note_preempted(received_ns)
        if reason is None:
            stream.put(text, len(event.token_ids), received_ns)
        else:
            self._finish(stream, event, text, received_ns)

    def _finish(self, stream: RequestStream, event: TokenEvent, text: str, now_ns: int) -> None:
        """The worker's last event of this request."""
        reason = event.finish_reason
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            text += stream.text.finish()
            if stream.text.stop_string is not None:
                self._end_at_stop_string(stream, event, text, now_ns)
                return
            stream.put(text, len(event.token_ids), now_ns)
            stream.end(reason.value, stream.usage or Usage(stream.num_prompt_tokens, stream.num_tokens))
            self._close(stream, reason.value, stream.num_tokens, now_ns)
            return
        stream.put(text, len(event.token_ids), now_ns)
        self._fail(stream, self._error_of(event, now_ns), now_ns)

    def _end_at_stop_string(self, stream: RequestStream, event: TokenEvent, text: str, now_ns: int) -> None:
        """A stop string is complete: the request has ended for the client, whatever the worker still computes.

        The tokens counted are those up to the one that completed the string.
        """
        num_tokens = stream.text.num_tokens
        known = stream.usage or Usage(stream.num_prompt_tokens, 0)
        stream.timeline.count_tokens(num_tokens - event.first_index, now_ns)
        stream.put(text, num_tokens - event.first_index, now_ns)
        stream.end("stop", Usage(stream.num_prompt_tokens, num_tokens, known.num_cached_tokens, known.num_preemptions))
        self._close(stream, "stop", num_tokens, now_ns)
        if event.finish_reason is None:
            self._cancel_sequence(stream.request_id)

    def _break(self, stream: RequestStream, event: TokenEvent, now_ns: int) -> None:
        """Events were lost or came twice: the text would be wrong, so the request ends here."""
        self.num_broken_sequences += 1
        log.error(
            "token events are not contiguous",
            request_id=stream.request_id,
            expected_index=stream.num_tokens,
            first_index=event.first_index,
        )
        self._fail_internally(stream, event, now_ns)

    def _fail_internally(self, stream: RequestStream, event: TokenEvent, now_ns: int) -> None:
        if stream.has_ended:
            return
        error = incomplete_answer()
        self._note_cut_off(stream, error, now_ns)
        self._fail(stream, error, now_ns)
        if event.finish_reason is None:
            self._cancel_sequence(stream.request_id)

    def _fail(self, stream: RequestStream, error: RequestError, now_ns: int) -> None:
        stream.fail(error)
        reason = "deadline" if error.code is ErrorCode.DEADLINE_EXCEEDED else "error"
        self._close(stream, reason, stream.num_tokens, now_ns, error.code.value.code)

    def _note_cut_off(self, stream: RequestStream, error: RequestError | None, now_ns: int) -> None:
        """It is about to end without the worker's word: what it has waited for until now is a stall if it was long."""
        is_lost = error is not None and error.code is ErrorCode.WORKER_LOST
        stream.timeline.note_cut_off(now_ns, StallCause.WORKER_LOST if is_lost else None, self._waiting_cause)

    def _error_of(self, event: TokenEvent, now_ns: int) -> RequestError:
        """What the client is told when the worker ended a request without an answer."""
        if event.finish_reason is FinishReason.DEADLINE:
            message = event.error_message or "The request's time is over."
            retry_after_seconds = self._retry_after_seconds(now_ns)
            return RequestError(message, code=ErrorCode.DEADLINE_EXCEEDED, retry_after_seconds=retry_after_seconds)
        if event.finish_reason is FinishReason.CANCELLED:
            return RequestError("The server gave up this request.", code=ErrorCode.INTERNAL)
        message = event.error_message or "The request failed."
        return RequestError(message, code=ErrorCode.from_wire(event.error_code))

    def _close(
        self, stream: RequestStream, finished_reason: str, num_output_tokens: int, now_ns: int, error_code: str = ""
    ) -> None:
        """The one place where a stream leaves, its last delta in the mailbox: entry and permit are free, it is counted once."""
        del self._streams[stream.request_id]
        stream.permit.release(now_ns, completed=finished_reason in _COMPLETED)
        stream.timeline.end(finished_reason, now_ns, num_output_tokens, error_code)
        self._on_closed(stream)
        if not self._streams:
            self._on_idle()


def incomplete_answer() -> RequestError:
    """The error of a stream whose tokens were lost on their way from the worker."""
    return RequestError("The server lost a part of this answer.", code=ErrorCode.INTERNAL)

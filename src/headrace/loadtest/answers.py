"""What the events of one answer make of its record: texts with their times, usage, how it ended.

Owns: the outcome of a request from what was received. Runs in: load tool (client process); pure, times are arguments.
Must not know: HTTP libraries, the event loop, figures.
"""

from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.sse_events import BadStreamError, Said, SseEvent, bounded, read_answer, read_event

REFUSING_STATUSES = frozenset({429, 503, 529})


def fail(record: RequestRecord, kind: str, detail: str, at: float) -> None:
    """End a record as failed; an earlier end stays (the first fault is the one that counts)."""
    if record.ended is None:
        record.outcome, record.error_kind, record.error_detail, record.ended = Outcome.FAILED, kind, bounded(detail), at


def end_with_status(record: RequestRecord, status: int, detail: str, at: float) -> None:
    """End a record by a status other than 200: refused for 429, 503 and 529, failed for the rest."""
    fail(record, f"http_{status}", detail, at)
    if status in REFUSING_STATUSES:
        record.outcome = Outcome.REFUSED


class StreamAnswer:
    """A streamed answer as it comes. Call `take` for each event, then `close` (whole) or `fail` (cut)."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self._spoken: set[int] = set()
        self._finished: set[int] = set()

    @property
    def is_done(self) -> bool:
        """Whether the end mark, an error frame or a broken event came: nothing more is needed."""
        return self.record.num_done_marks > 0 or self.record.ended is not None

    def take(self, event: SseEvent, at: float) -> bool:
        """Note one event that came at `at`; whether it held text. Events after the end mark count as marks only."""
        record = self.record
        if record.first_event_at is None:
            record.first_event_at = at
        try:
            said = read_event(event)
        except BadStreamError as error:
            fail(record, "bad_json", str(error), at)
            return False
        if said.is_done:
            record.num_done_marks += 1
            if record.num_done_marks == 1 and record.ended is None:
                self._end(at)
            return False
        if said.error is not None:
            fail(record, "error_frame", said.error, at)
            return False
        if record.num_done_marks:
            return False
        return self._take_said(said, at)

    def close(self, at: float) -> None:
        """The stream ended in good order at `at`."""
        record = self.record
        if record.ended is None:
            if self._lacks_finish():
                fail(record, "no_finish", "the stream ended without a finish_reason and without [DONE]", at)
            else:
                fail(record, "no_done", "the stream ended without [DONE]", at)

    def _take_said(self, said: Said, at: float) -> bool:
        record = self.record
        self._spoken.update(said.spoken_choices)
        for choice, reason in said.finishes:
            self._finished.add(choice)
            record.finish_reasons.append(reason)
        note_usage(record, said)
        if said.num_chars == 0:
            return False
        record.chunk_times.append(at)
        record.chunk_chars.append(said.num_chars)
        record.counted_chunks += 1
        return True

    def _end(self, at: float) -> None:
        if self._lacks_finish():
            fail(self.record, "no_finish", "[DONE] came without a finish_reason for each choice", at)
        else:
            self.record.outcome, self.record.ended = Outcome.COMPLETED, at

    def _lacks_finish(self) -> bool:
        return not self._finished or not self._spoken <= self._finished


def take_whole_answer(record: RequestRecord, data: bytes, at: float) -> None:
    """Note an answer that came as one JSON body, complete at `at`: all its text has that one time."""
    record.first_event_at = at
    try:
        said = read_answer(data)
    except BadStreamError as error:
        fail(record, "bad_json", str(error), at)
        return
    if said.error is not None:
        fail(record, "error_frame", said.error, at)
        return
    record.finish_reasons.extend(reason for _, reason in said.finishes)
    note_usage(record, said)
    if said.num_chars:
        record.chunk_times.append(at)
        record.chunk_chars.append(said.num_chars)
        record.counted_chunks += 1
    if said.finishes:
        record.outcome, record.ended = Outcome.COMPLETED, at
    else:
        fail(record, "no_finish", "the answer has no finish_reason", at)


def note_usage(record: RequestRecord, said: Said) -> None:
    """Take token counts over; a later statement replaces an earlier one (some servers state usage in every chunk)."""
    usage = said.usage
    if usage is None:
        return
    if usage.prompt_tokens is not None:
        record.prompt_tokens = usage.prompt_tokens
    if usage.output_tokens is not None:
        record.output_tokens = usage.output_tokens
    if usage.cached_tokens is not None:
        record.cached_tokens = usage.cached_tokens

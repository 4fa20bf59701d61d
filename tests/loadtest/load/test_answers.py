"""The outcome of an answer from its events."""

import json

import pytest

from headrace.loadtest.answers import StreamAnswer, end_with_status, take_whole_answer
from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.sse_events import SseEvent


def record(**more: object) -> RequestRecord:
    return RequestRecord(index=0, process=0, scheduled=0.0, sent=1.0, **more)  # type: ignore[arg-type]


def text(words: str, index: int = 0) -> dict[str, object]:
    return {"choices": [{"index": index, "text": words}]}


def finish(index: int = 0) -> dict[str, object]:
    return {"choices": [{"index": index, "text": "", "finish_reason": "stop"}]}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
DONE = b"[DONE]"


def play(*events: dict[str, object] | bytes, closes: bool = True) -> RequestRecord:
    """Event k comes at k + 2 seconds."""
    answer = StreamAnswer(record())
    for place, event in enumerate(events):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        answer.take(SseEvent(data), place + 2.0)
    if closes:
        answer.close(len(events) + 2.0)
    return answer.record


def test_a_whole_stream_is_completed_at_its_end_mark() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    got = play(ROLE, text("ab"), text("c"), finish(), usage, DONE)
    assert (got.outcome, got.error_kind, got.ended, got.finish_reasons) == (Outcome.COMPLETED, "", 7.0, ["stop"])
    assert (got.first_event_at, got.chunk_times, got.chunk_chars, got.counted_chunks) == (2.0, [3.0, 4.0], [2, 1], 2)
    assert (got.prompt_tokens, got.output_tokens, got.num_done_marks) == (5, 2, 1)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([text("a")], "no_finish"),
        ([text("a"), finish()], "no_done"),
        ([text("a"), DONE], "no_finish"),
        ([DONE], "no_finish"),
        ([text("a"), text("b", 1), finish(0), DONE], "no_finish"),
        ([text("a"), {"error": {"message": "gone"}}, finish(), DONE], "error_frame"),
        ([text("a"), b"{broken", finish(), DONE], "bad_json"),
        ([], "no_finish"),
    ],
)
def test_a_stream_that_lacks_a_part_failed(events: list[dict[str, object] | bytes], kind: str) -> None:
    got = play(*events)
    assert (got.outcome, got.error_kind) == (Outcome.FAILED, kind)
    assert got.ended is not None


def test_the_first_fault_counts_and_a_fault_after_the_end_mark_does_not_undo_it() -> None:
    assert play(text("a"), {"error": "x"}, b"{").error_kind == "error_frame"
    got = play(text("a"), finish(), DONE, {"error": "x"}, DONE, text("late"))
    assert (got.outcome, got.num_done_marks, got.counted_chunks, got.ended) == (Outcome.COMPLETED, 2, 1, 4.0)


def test_all_choices_finished_is_completed() -> None:
    assert play(text("a"), text("b", 1), finish(1), finish(0), DONE).outcome is Outcome.COMPLETED


def test_without_an_end_the_record_stays_unfinished_with_what_came() -> None:
    got = play(text("a"), closes=False)
    assert (got.outcome, got.ended, got.chunk_times) == (Outcome.UNFINISHED, None, [2.0])


@pytest.mark.parametrize(
    ("status", "outcome"), [(429, "refused"), (503, "refused"), (529, "refused"), (500, "failed"), (400, "failed")]
)
def test_statuses(status: int, outcome: str) -> None:
    got = record()
    end_with_status(got, status, "why", 3.0)
    assert (got.outcome.value, got.error_kind, got.ended) == (outcome, f"http_{status}", 3.0)


def test_whole_answers() -> None:
    got = record()
    body = {
        "choices": [{"index": 0, "message": {"content": "abc"}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 9},
    }
    take_whole_answer(got, json.dumps(body).encode(), 4.0)
    assert (got.outcome, got.chunk_times, got.chunk_chars, got.output_tokens) == (Outcome.COMPLETED, [4.0], [3], 9)
    for data, kind in ((b"{", "bad_json"), (b'{"choices": []}', "no_finish"), (b'{"error": "x"}', "error_frame")):
        got = record()
        take_whole_answer(got, data, 4.0)
        assert (got.outcome, got.error_kind) == (Outcome.FAILED, kind)

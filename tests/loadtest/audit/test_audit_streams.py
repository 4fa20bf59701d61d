"""Reading streams and answers: any cut of the bytes gives the same view; each break of the protocol is said."""

import contextlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.audit.answers import is_refusal, judge_refusal, read_answer, read_error
from headrace.loadtest.audit.findings import Outcome, WrongAnswer
from headrace.loadtest.audit.streams import StreamView, read_stream
from headrace.loadtest.audit.wire import Reply


def reply(*pieces: bytes, status: int = 200, media_type: str = "text/event-stream", fault: str = "") -> Reply:
    timed = [(1.0 + 0.1 * number, piece) for number, piece in enumerate(pieces)]
    return Reply("POST /x", 1.0, status, "HTTP/1.1", [("content-type", media_type)], 1.0, timed, fault=fault)


def chunk(text: str, reason: str | None = None, **more: object) -> str:
    return json.dumps({"id": "1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]} | more)


def stream(*data: str, end: str = "\n") -> bytes:
    return "".join(f"data: {item}{end}{end}" for item in data).encode()


WHOLE = stream(chunk("Hé"), chunk(" 🎉"), chunk("", "stop"), "[DONE]")


def shape(view: StreamView) -> tuple[object, ...]:
    return view.text, view.num_events, view.num_done, view.is_done_last, view.faults, view.choices[0].finish_reasons


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_split_reads_the_same(cuts: list[int], end: str) -> None:
    """UTF-01, SSE-07: characters, lines and events may be cut anywhere."""
    whole = stream(chunk("Hé"), chunk(" 🎉"), chunk("", "stop"), "[DONE]", end=end)
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert shape(read_stream(reply(*pieces))) == ("Hé 🎉", 4, 1, True, [], ["stop"])


def test_texts_are_timed_by_the_piece_that_completed_them() -> None:
    first, second = stream(chunk("a")), stream(chunk("b"))
    view = read_stream(reply(first + second[:10], second[10:]))
    assert view.text_times == pytest.approx([1.0, 1.1])


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fall(noise: bytes) -> None:
    view = read_stream(reply(noise))
    assert view.num_events >= 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"data: {}\n", "not ended by a blank line"),
        (b"oops\n\n", "no event field"),
        (b"data: {x}\n\n", "no chunk"),
        (b"data: \xff\n\n", "not UTF-8"),
        (b'data: {"choices": [{"index": "a"}]}\n\n', "no chunk"),
    ],
)
def test_breaks_are_said(body: bytes, words: str) -> None:
    assert words in "; ".join(read_stream(reply(body)).faults)


def test_comments_and_other_fields_are_no_faults() -> None:
    view = read_stream(reply(b": ping\n\nevent: x\nid: 3\nretry: 5\n" + WHOLE))
    assert (view.faults, view.num_comments) == ([], 1)


def test_a_cut_connection_is_a_fault() -> None:
    assert "cut" in read_stream(reply(WHOLE[:40], fault="cut: the connection closed inside the body")).faults[-1]


def test_done_must_be_last() -> None:
    view = read_stream(reply(stream("[DONE]", chunk("late"))))
    assert (view.num_done, view.is_done_last) == (1, False)


def test_text_after_a_finish_reason_is_counted() -> None:
    view = read_stream(reply(stream(chunk("a", "stop"), chunk("b"), "[DONE]")))
    assert view.choices[0].num_after_finish == 1


def test_error_events_are_kept() -> None:
    view = read_stream(reply(stream(chunk("a"), '{"error": {"message": "broken"}}', "[DONE]")))
    assert "broken" in view.errors[0]


@pytest.mark.parametrize(
    "other", [reply(b"{}", media_type="application/json"), reply(b"", status=500), reply(b"", status=200, media_type="")]
)
def test_what_is_no_stream_is_said(other: Reply) -> None:
    with pytest.raises(WrongAnswer, match="no event stream"):
        read_stream(other)


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"index": "x"}]}', b"\xff"])
def test_an_odd_200_is_a_wrong_answer(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        read_answer(reply(body, media_type="application/json"))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "error", "message", "object", "index", "text", "usage"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_makes_the_readers_fall(value: object) -> None:
    answer = reply(json.dumps(value).encode(), media_type="application/json")
    read_error(answer)
    judge_refusal(answer, "n")
    with contextlib.suppress(WrongAnswer):
        read_answer(answer)


def test_reasoning_is_text_too() -> None:
    body = {
        "choices": [{"message": {"role": "assistant", "content": None, "reasoning_content": "hm"}, "finish_reason": "length"}]
    }
    assert read_answer(reply(json.dumps(body).encode())).text == "hm"


@pytest.mark.parametrize(
    ("status", "body", "outcome", "verdict"),
    [
        (400, b'{"error": {"message": "n is not supported"}}', Outcome.PASS, "refused"),
        (501, b'{"error": {"message": "n"}}', Outcome.PASS, "refused"),
        (422, b'{"object": "error", "message": "n must be 1"}', Outcome.PASS, "refused"),
        (400, b'{"detail": "n"}', Outcome.FAIL, ""),
        (500, b'{"error": {"message": "n"}}', Outcome.FAIL, ""),
        (400, b"<html>", Outcome.FAIL, ""),
    ],
)
def test_a_refusal_needs_a_status_and_words(status: int, body: bytes, outcome: Outcome, verdict: str) -> None:
    answer = reply(body, status=status, media_type="application/json")
    finding = judge_refusal(answer, "n")
    assert (finding.outcome, finding.verdict) == (outcome, verdict)
    assert is_refusal(answer) == (status != 500)

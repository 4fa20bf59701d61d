"""Bytes of a stream -> events -> what they say; any split of the bytes gives the same."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.sse_events import (
    BadStreamError,
    SseEvent,
    SseParser,
    Usage,
    bounded,
    error_text,
    read_answer,
    read_event,
)


def parse(data: bytes, cuts: list[int] | None = None) -> list[SseEvent]:
    parser = SseParser()
    places = [0, *sorted(cuts or []), len(data)]
    events: list[SseEvent] = []
    for begin, end in itertools.pairwise(places):
        events += parser.feed(data[begin:end])
    return events


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_each_line_end_of_the_standard_is_understood(newline: bytes) -> None:
    data = newline.join(
        [b": hello", b"", b"event: error", b"data: a", b"data:b", b"data:  c", b"", b"id: 3", b"", b"data", b"", b""]
    )
    assert parse(data) == [SseEvent(b"a\nb\n c", "error"), SseEvent(b"", "")]


lines = st.lists(
    st.sampled_from([b"data: x", b"data:y", b"data: \xe2\x82\xac", b"", b": c", b"event: e", b"odd", b"id: 1", b"data"]),
    max_size=12,
)


@given(
    lines,
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=12, max_size=12),
    st.lists(st.integers(0, 120), max_size=8),
)
def test_any_split_gives_the_same_events(texts: list[bytes], ends: list[bytes], cuts: list[int]) -> None:
    # A line ended by CR and followed by an empty one ended by LF would read as CRLF: give such a line another end.
    data = b""
    for text, end in zip(texts, ends, strict=False):
        data += b"\r\n" if data.endswith(b"\r") and not text and end == b"\n" else text + end
    whole = parse(data)
    assert parse(data, [min(cut, len(data)) for cut in cuts]) == whole
    assert parse(data, list(range(len(data)))) == whole


def test_an_event_is_out_with_its_last_byte_even_when_that_is_a_cr() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == [SseEvent(b"a")]
    assert parser.feed(b"\ndata: b\r\n") == []
    assert parser.is_inside_event
    assert parser.feed(b"\r\n") == [SseEvent(b"b")]
    assert not parser.is_inside_event


def test_a_byte_order_mark_is_skipped_and_an_unended_event_dropped() -> None:
    assert parse(b"\xef\xbb\xbfdata: a\n\ndata: never ended\n") == [SseEvent(b"a")]


@pytest.mark.parametrize("piece", [b"x" * 64, b"data: x\n"])
def test_an_event_without_end_is_bounded(piece: bytes) -> None:
    parser = SseParser(max_event_bytes=1000)
    for _ in range(900 // len(piece)):
        parser.feed(piece)
    with pytest.raises(BadStreamError, match="1000 bytes"):
        parser.feed(piece * 20)


def said(chunk: dict[str, object]) -> tuple[int, tuple[int, ...], tuple[tuple[int, str], ...]]:
    result = read_event(SseEvent(json.dumps(chunk).encode()))
    return result.num_chars, result.spoken_choices, result.finishes


def test_text_is_counted_in_whatever_field_it_comes() -> None:
    assert said({"choices": [{"index": 0, "text": "ab€"}]}) == (3, (0,), ())
    assert said({"choices": [{"index": 2, "delta": {"content": "ab"}, "finish_reason": "stop"}]}) == (2, (2,), ((2, "stop"),))
    assert said({"choices": [{"delta": {"reasoning_content": "abc", "reasoning": "abc"}}]}) == (3, (0,), ())
    assert said({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]}) == (
        3,
        (0,),
        (),
    )
    assert said({"choices": [{"message": {"content": [{"type": "text", "text": "abcd"}]}}]}) == (4, (0,), ())
    assert said({"choices": [{"delta": {"refusal": "no"}}, {"index": 1, "text": "x"}]}) == (3, (0, 1), ())


def test_a_role_chunk_and_an_empty_usage_chunk_hold_no_text() -> None:
    assert said({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}) == (0, (), ())
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    result = read_event(SseEvent(json.dumps({"choices": [], "usage": usage}).encode()))
    assert (result.num_chars, result.usage) == (0, Usage(3, 4, 2))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "m", "type": "t", "code": 500}}, "500: t: m"),
        ({"error": "plain", "error_type": "overloaded"}, "plain"),
        ({"object": "error", "message": "flat", "code": 400}, "flat"),
        ({"error": {"odd": 1}}, '{"odd":1}'),
    ],
)
def test_errors_of_each_dialect(body: dict[str, object], text: str) -> None:
    assert read_answer(json.dumps(body).encode()).error == text


def test_an_event_of_type_error_is_an_error_whatever_it_holds() -> None:
    assert read_event(SseEvent(b'{"detail": "x"}', "error")).error == '{"detail": "x"}'


def test_end_mark_and_broken_events() -> None:
    assert read_event(SseEvent(b"[DONE] ")).is_done
    for data in (b"", b"{", b"[1]", b'{"choices": 3}', b"\xff"):
        with pytest.raises(BadStreamError):
            read_event(SseEvent(data))


def test_details_are_one_bounded_line() -> None:
    assert bounded("a\n b\tc") == "a b c"
    assert len(bounded("x" * 5000)) == 300
    assert error_text({"message": "", "code": None}) == '{"message":"","code":null}'

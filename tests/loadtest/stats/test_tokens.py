"""Tokens of events: what usage says, laid over what was seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.tokens import CountKind, count_tokens, share_out


def record(num_chunks, output_tokens, *, chars=None, finish="length", target=None, is_stream=True):
    return RequestRecord(
        index=0,
        process=0,
        scheduled=0.0,
        sent=0.0,
        is_stream=is_stream,
        chunk_times=[0.1 * (place + 1) for place in range(num_chunks)],
        chunk_chars=chars or [4] * num_chunks,
        output_tokens=output_tokens,
        finish_reasons=[finish] if finish else [],
        target_output_tokens=target,
        outcome=Outcome.COMPLETED,
    )


def test_as_many_events_as_tokens_is_exact():
    counts = count_tokens(record(5, 5))
    assert (counts.per_chunk.tolist(), counts.total, counts.kind, counts.is_mismatch) == ([1] * 5, 5, CountKind.EXACT, False)


def test_an_end_token_without_text_is_counted_and_not_laid_over_events():
    """Some servers count the end token in usage; an answer of the asked length has none."""
    natural = count_tokens(record(5, 6, finish="stop"))
    assert (natural.kind, natural.total, natural.num_text_tokens) == (CountKind.EXACT, 6, 5)
    cut = count_tokens(record(5, 6, finish="length"))
    assert (cut.kind, cut.total, cut.num_text_tokens) == (CountKind.APPORTIONED, 6, 6)


def test_merged_events_share_tokens_by_characters():
    counts = count_tokens(record(3, 9, chars=[4, 20, 12]))
    assert counts.kind is CountKind.APPORTIONED
    assert counts.per_chunk.tolist() == [1, 5, 3]


def test_without_usage_each_event_is_a_token_and_a_whole_answer_none():
    streamed = count_tokens(record(4, None))
    assert (streamed.total, streamed.kind, streamed.is_mismatch) == (4, CountKind.CHUNKS, False)
    assert count_tokens(record(1, None, is_stream=False)).total == 0


def test_fewer_tokens_than_events_cannot_be():
    counts = count_tokens(record(5, 3))
    assert counts.is_mismatch
    assert counts.kind is CountKind.CHUNKS
    assert counts.num_text_tokens == 5


def test_more_tokens_than_were_asked_for_cannot_be():
    assert count_tokens(record(5, 5, target=4)).is_mismatch
    assert not count_tokens(record(4, 4, target=4)).is_mismatch
    assert count_tokens(record(1, 9, target=8, is_stream=False)).is_mismatch


def test_a_whole_answer_holds_all_its_tokens():
    counts = count_tokens(record(1, 40, is_stream=False))
    assert (counts.per_chunk.tolist(), counts.kind) == ([40], CountKind.EXACT)


def test_tokens_without_any_text_are_still_counted():
    counts = count_tokens(record(0, 7))
    assert (counts.total, counts.num_text_tokens, counts.is_mismatch) == (7, 0, False)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=60), st.integers(0, 500))
def test_shares_add_up_and_leave_no_event_without_a_token(chars, spare):
    shares = share_out(len(chars) + spare, chars)
    assert int(shares.sum()) == len(chars) + spare
    assert int(shares.min()) >= 1


@given(st.integers(1, 8), st.integers(1, 40))
def test_even_events_get_even_shares(tokens_each, num_events):
    assert share_out(tokens_each * num_events, [5] * num_events).tolist() == [tokens_each] * num_events


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "content_filter"])
def test_every_natural_end_may_carry_an_end_token(finish):
    assert count_tokens(record(2, 3, finish=finish)).kind is CountKind.EXACT

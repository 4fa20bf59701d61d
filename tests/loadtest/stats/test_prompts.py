"""Prompt texts: as long as asked, the same for the same key, and strange to every prefix cache with a new salt."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.prompts import ASSUMED, WORDS, Calibration, PromptWriter, calibrate, text_of_words


def test_words_are_plain_and_different():
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(re.fullmatch("[a-z]{2,9}", word) for word in WORDS)


@given(st.integers(1, 3000), st.integers(0, 100))
def test_a_prompt_has_as_many_words_as_tokens_were_asked(tokens, shared):
    assert len(PromptWriter("s").prompt(tokens, 1, shared_tokens=shared).split(" ")) == tokens


@given(st.integers(40, 3000), st.floats(0.8, 3.0), st.integers(0, 30), st.integers(0, 100))
def test_calibrated_prompts_come_out_right_by_the_server_s_count(tokens, per_word, overhead, shared):
    writer = PromptWriter("s", Calibration(per_word, overhead, "measured"))
    words = len(writer.prompt(tokens, 1, shared_tokens=shared).split(" "))
    assert words * per_word + overhead == pytest.approx(tokens, abs=per_word + 1e-6)


def test_keys_and_salts_change_a_prompt_from_its_first_words_on():
    one = PromptWriter("run-1").prompt(200, 0)
    assert one == PromptWriter("run-1").prompt(200, 0)
    for other in (PromptWriter("run-1").prompt(200, 1), PromptWriter("run-2").prompt(200, 0)):
        assert one.split(" ")[:16] != other.split(" ")[:16]


def test_a_shared_prefix_is_shared_within_a_salt_only_and_leaves_something_of_one_s_own():
    writer, stranger = PromptWriter("run-1"), PromptWriter("run-2")
    first, second = (writer.prompt(100, number, shared_tokens=60).split(" ") for number in (1, 2))
    assert first[:60] == second[:60]
    assert first[60:] != second[60:]
    assert first[:60] != stranger.prompt(100, 1, shared_tokens=60).split(" ")[:60]
    short = [writer.prompt(40, number, shared_tokens=60).split(" ") for number in range(20)]
    assert {len(words) for words in short} == {40}
    assert len({words[-1] for words in short}) > 1


def test_calibration_tells_tokens_a_word_from_tokens_a_request():
    found = calibrate(lambda text: round(1.25 * len(text.split(" "))) + 30, "measured by usage")
    assert found.tokens_per_word == pytest.approx(1.25)
    assert found.overhead_tokens == pytest.approx(30.0)
    assert found.source == "measured by usage: 1.250 tokens a word, 30 a request"


@pytest.mark.parametrize(
    "count", [lambda _: None, lambda _: 7, lambda text: len(text) * 100, lambda text: 1000 - len(text.split())]
)
def test_counts_that_make_no_sense_leave_the_assumption_and_say_so(count):
    found = calibrate(count, "measured by usage")
    assert (found.tokens_per_word, found.overhead_tokens) == (ASSUMED.tokens_per_word, ASSUMED.overhead_tokens)
    assert found.source.startswith("assumed: a token a word")


def test_probe_texts_are_repeatable():
    assert text_of_words(20, "a") == text_of_words(20, "a") != text_of_words(20, "b")

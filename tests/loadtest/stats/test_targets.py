"""Goodput targets as people write them."""

import pytest

from headrace.loadtest.targets import MLPERF, MLPERF_INTERACTIVE, parse_target


@pytest.mark.parametrize(
    ("text", "name", "ttft", "tbt"),
    [("800:60", "800:60", 0.8, 0.06), ("chat=800:60", "chat", 0.8, 0.06), ("0.5:0.1", "0.5:0.1", 0.0005, 0.0001)],
)
def test_own_targets(text, name, ttft, tbt):
    target = parse_target(text)
    assert (target.name, target.ttft_seconds, target.tbt_seconds) == (name, pytest.approx(ttft), pytest.approx(tbt))


def test_named_targets_are_those_of_mlperf():
    assert parse_target("mlperf") is MLPERF
    assert (MLPERF.ttft_seconds, MLPERF.tbt_seconds) == (2.0, 0.1)
    assert (MLPERF_INTERACTIVE.ttft_seconds, MLPERF_INTERACTIVE.tbt_seconds) == (0.5, 0.03)


@pytest.mark.parametrize("text", ["", "fast", "800", "800:", ":60", "a:b", "0:60", "-1:60", "800:inf", "nan:1", "800:60:1"])
def test_anything_else_is_refused_in_words(text):
    with pytest.raises(ValueError, match="mlperf"):
        parse_target(text)

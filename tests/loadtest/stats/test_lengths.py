"""Lengths keep the shape of recorded traffic, at any scale."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.lengths import (
    AZURE_CODE,
    AZURE_CONVERSATION,
    MOONCAKE_CONVERSATION,
    SHAPES,
    Lengths,
    QuantileTable,
    cut_to_context,
    draw_lengths,
    scaled,
)

# Means and quantiles of the public traces, computed from the whole files.
MEASURED = {
    AZURE_CODE.name: {"mean": (2047.8, 27.9), "p50": (1469, 13), "p90": (5188, 55)},
    AZURE_CONVERSATION.name: {"mean": (1154.7, 211.1), "p50": (1020, 129), "p90": (2734, 424)},
    MOONCAKE_CONVERSATION.name: {"mean": (12035.0, 343.0), "p50": (6909, 350), "p90": (27367, 597)},
}


def drawn(shape, count=40_000, scale=1.0, seed="0"):
    return np.array(list(itertools.islice(draw_lengths(shape, scale, seed), count)), dtype=np.float64)


@pytest.mark.parametrize("name", SHAPES)
def test_drawn_lengths_have_the_trace_s_mean_and_quantiles(name):
    found = drawn(SHAPES[name])
    measured = MEASURED[name]
    assert found.mean(axis=0) == pytest.approx(measured["mean"], rel=0.06)
    assert np.quantile(found, 0.5, axis=0) == pytest.approx(measured["p50"], rel=0.05)
    assert np.quantile(found, 0.9, axis=0) == pytest.approx(measured["p90"], rel=0.05)


def test_the_two_humps_of_conversation_answers_are_kept_at_any_scale():
    for scale in (1.0, 1 / 8):
        outputs = drawn(AZURE_CONVERSATION, scale=scale)[:, 1]
        lower = np.mean((outputs >= 50 * scale) & (outputs < 175 * scale))
        gap = np.mean((outputs >= 245 * scale) & (outputs < 360 * scale))
        upper = np.mean((outputs >= 365 * scale) & (outputs < 475 * scale))
        assert lower > 0.4
        assert upper > 0.25
        assert gap < 0.03


def test_scale_multiplies_and_keeps_the_order_of_the_draw():
    whole, eighth = drawn(AZURE_CODE, 500), drawn(AZURE_CODE, 500, scale=0.125)
    assert np.abs(eighth - np.maximum(1.0, whole / 8)).max() <= 0.5


def test_the_same_seed_draws_the_same_lengths():
    assert (drawn(AZURE_CODE, 50, seed="7") == drawn(AZURE_CODE, 50, seed="7")).all()
    assert (drawn(AZURE_CODE, 50, seed="7") != drawn(AZURE_CODE, 50, seed="8")).any()


@given(st.floats(0.0, 1.0))
def test_a_quantile_lies_within_the_table(share):
    table = QuantileTable((0.0, 0.5, 0.5 + 1e-9, 1.0), (1, 10, 100, 1000))
    assert 1 <= table.at(share) <= 1000


@pytest.mark.parametrize(
    ("shares", "values"),
    [((0.0, 1.0), (1,)), ((0.0,), (1,)), ((0.1, 1.0), (1, 2)), ((0.0, 0.9), (1, 2)), ((0.0, 0.5, 0.5, 1.0), (1, 2, 3, 4)),
     ((0.0, 1.0), (2, 1))],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(shares, values):
    with pytest.raises(ValueError, match="table of quantiles"):
        QuantileTable(shares, values)


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.integers(2, 50_000))
def test_cut_lengths_fit_the_context_and_keep_at_least_a_token(prompt, output, context):
    cut = cut_to_context(Lengths(prompt, output), context)
    assert sum(cut) <= max(context, 2)
    assert min(cut) >= 1
    assert cut.output_tokens == min(output, context - 1)
    if prompt + output <= context:
        assert cut == (prompt, output)


def test_no_scale_makes_a_length_of_nothing():
    assert scaled(Lengths(100, 3), 0.01) == (1, 1)
    assert cut_to_context(Lengths(10, 10), None) == (10, 10)

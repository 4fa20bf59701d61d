"""Percentiles from buckets."""

import bisect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.monitor.percentiles import Distribution

BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0)
VALUES = st.lists(st.floats(0.0001, 9.99), min_size=1, max_size=200)
PERCENT = st.floats(0.5, 100)


def distribution(values: list[float]) -> Distribution:
    counts = [0.0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS, value)] += 1
    return Distribution(BOUNDS, tuple(counts), sum(values))


@given(VALUES, PERCENT)
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values: list[float], percent: float) -> None:
    found = distribution(values).percentile(percent)
    true = sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
    bucket = bisect.bisect_left(BOUNDS, true)
    lower = BOUNDS[bucket - 1] if bucket else 0.0
    assert found is not None
    assert lower <= found <= BOUNDS[bucket]


@given(VALUES, PERCENT, PERCENT)
def test_percentiles_never_go_down(values: list[float], one: float, other: float) -> None:
    found = distribution(values)
    lower, upper = found.percentile(min(one, other)), found.percentile(max(one, other))
    assert lower is not None
    assert upper is not None
    assert lower <= upper


@given(VALUES, VALUES)
def test_what_came_since_an_earlier_look_is_what_was_added(before: list[float], more: list[float]) -> None:
    window = distribution(before + more).since(distribution(before))
    assert window.counts == distribution(more).counts
    assert window.sum == pytest.approx(sum(more), abs=1e-6)


@given(VALUES, VALUES)
def test_a_histogram_that_began_anew_counts_nothing_negative(before: list[float], after: list[float]) -> None:
    window = distribution(after).since(distribution(before))
    assert all(count >= 0 for count in window.counts)
    assert window.count <= len(after)


def test_interpolation_within_the_bucket() -> None:
    # 10 values in (0.01, 0.1]: the median is its middle; a tenth of the way is p10.
    found = Distribution((0.01, 0.1), (0.0, 10.0, 0.0))
    assert found.percentile(50) == pytest.approx(0.055)
    assert found.percentile(10) == pytest.approx(0.019)


def test_of_nothing_nothing_is_known() -> None:
    assert Distribution(BOUNDS, (0.0,) * 6).percentile(50) is None
    assert Distribution((), (3.0,)).percentile(50) is None
    assert Distribution(BOUNDS, (0.0,) * 6).mean is None


def test_above_the_last_bound_the_last_bound_is_known() -> None:
    assert Distribution(BOUNDS, (0.0,) * 5 + (4.0,)).percentile(99) == 10.0


def test_cumulative_counts_become_plain_ones() -> None:
    found = Distribution.of_cumulative({math.inf: 9.0, 0.1: 5.0, 0.01: 2.0}, 3.0)
    assert found == Distribution((0.01, 0.1), (2.0, 3.0, 4.0), 3.0)


def test_without_an_infinite_bucket_nothing_lies_above() -> None:
    assert Distribution.of_cumulative({0.1: 5.0, 0.01: 2.0}, 3.0).counts == (2.0, 3.0, 0.0)

"""Percentiles, intervals, ratios and regressions against values known from elsewhere and by coverage."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loadtest.statistics import (
    bootstrap_intervals,
    distribution,
    paired_ratio,
    percentile,
    regress,
    student_t_quantile,
)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.9, 4.6), (1.0, 5.0), (0.25, 2.0)])
def test_percentile_is_linear_between_ranks(share, expected):
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == pytest.approx(expected)


def test_no_value_has_no_percentile():
    with pytest.raises(ValueError, match="no value"):
        percentile([], 0.5)
    assert distribution([]).count == 0
    assert distribution([]).p99 is None
    assert distribution([]).ci95 == {}


# Tables of Student's t, two-sided 95 % and one-sided 99.5 %.
@pytest.mark.parametrize(
    ("share", "degrees", "expected"),
    [
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 5, 2.571), (0.975, 10, 2.228), (0.975, 30, 2.042),
        (0.975, 120, 1.980), (0.995, 4, 4.604), (0.95, 7, 1.895), (0.975, 100_000, 1.960), (0.025, 10, -2.228), (0.5, 8, 0.0),
    ],
)  # fmt: skip
def test_quantiles_of_student_t_are_those_of_tables(share, degrees, expected):
    assert student_t_quantile(share, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(("share", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_no_quantile_of_t_outside_its_range(share, degrees):
    with pytest.raises(ValueError, match="no quantile"):
        student_t_quantile(share, degrees)


def test_a_distribution_of_one_value_is_that_value_without_interval():
    figure = distribution([0.25])
    assert (figure.count, figure.mean, figure.min, figure.p50, figure.p999, figure.max) == (1, 0.25, 0.25, 0.25, 0.25, 0.25)
    assert figure.ci95 == {}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=10, max_size=300), st.integers(0, 5))
def test_intervals_are_ordered_within_the_values_and_repeatable(values, seed):
    figure = distribution(values, seed=seed)
    for low, high in figure.ci95.values():
        assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert figure == distribution(values, seed=seed)
    assert figure.min <= figure.p50 <= figure.p90 <= figure.p99 <= figure.p999 <= figure.max


def test_the_median_interval_covers_the_truth_as_often_as_it_says():
    truth = math.log(2.0)
    generator = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_intervals(generator.exponential(1.0, 60), seed=trial, num_resamples=300)["p50"]
        hits += low <= truth <= high
    assert 0.88 <= hits / 200 <= 0.995


def test_gaps_of_one_request_are_drawn_together():
    """30 requests of 100 gaps each, all gaps of a request alike: there are 30 independent values, not 3000."""
    means = np.random.default_rng(1).normal(10.0, 1.0, 30)
    values = np.repeat(means, 100)
    owners = np.repeat(np.arange(30), 100)
    low, high = bootstrap_intervals(values, owners)["mean"]
    naive_low, naive_high = bootstrap_intervals(values)["mean"]
    assert (high - low) > 5 * (naive_high - naive_low)
    assert high - low == pytest.approx(2 * 1.96 * means.std() / math.sqrt(30), rel=0.25)


def test_many_requests_are_dealt_into_parties_without_changing_the_interval():
    generator = np.random.default_rng(2)
    values = generator.normal(5.0, 1.0, 5000)
    low, high = bootstrap_intervals(values)["mean"]
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(5000), rel=0.25)
    assert low <= 5.0 + 0.06
    assert high >= 5.0 - 0.06


def test_a_million_gaps_of_ten_thousand_requests_cost_little():
    generator = np.random.default_rng(3)
    values = generator.lognormal(-4.0, 0.5, 1_000_000)
    owners = np.repeat(np.arange(10_000), 100)
    begun = time.process_time()
    figure = distribution(values, owners)
    assert time.process_time() - begun < 3.0  # a fraction of a second on an idle core
    assert figure.ci95["p99"][0] <= figure.p99 <= figure.ci95["p99"][1]


def test_a_ratio_of_equal_arms_holds_one_and_of_unequal_ones_does_not():
    generator = np.random.default_rng(4)
    drift = np.linspace(1.0, 3.0, 12)  # a machine that slows down: three times as slow in the end
    baseline = drift * generator.normal(1.0, 0.02, 12)
    same = drift * generator.normal(1.0, 0.02, 12)
    faster = 0.9 * drift * generator.normal(1.0, 0.02, 12)
    assert not paired_ratio(baseline, same).excludes_one
    found = paired_ratio(baseline, faster)
    assert found.excludes_one
    assert found.low < 0.9 < found.high
    assert found.num_pairs == 12


def test_a_ratio_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        baseline = generator.lognormal(0.0, 0.1, 6)
        found = paired_ratio(baseline, 1.2 * baseline * generator.lognormal(0.0, 0.1, 6))
        hits += found.low <= 1.2 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_first_pairs_can_be_left_out_of_a_ratio():
    found = paired_ratio([100.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 2.0], num_discarded=1)
    assert (found.ratio, found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize(
    ("baseline", "variant"), [([1.0, 2.0], [1.0]), ([1.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, math.nan])]
)
def test_a_ratio_that_cannot_be_told_is_refused(baseline, variant):
    with pytest.raises(ValueError, match=r"pairs|positive"):
        paired_ratio(baseline, variant)


def test_a_line_is_found_with_its_interval():
    generator = np.random.default_rng(6)
    x = np.linspace(0.0, 10.0, 200)
    line = regress(x, 3.0 + 0.5 * x + generator.normal(0.0, 0.1, 200))
    assert line is not None
    assert line.slope_low < 0.5 < line.slope_high
    assert line.slope_high - line.slope_low < 0.02
    assert line.intercept == pytest.approx(3.0, abs=0.1)
    assert line.r_squared > 0.99


def test_a_control_takes_its_own_part_of_a_slope():
    generator = np.random.default_rng(8)
    own = generator.uniform(0.0, 1.0, 300)
    x = own + generator.normal(0.0, 0.2, 300)  # correlated with own, but without effect
    y = 5.0 * own + generator.normal(0.0, 0.1, 300)
    plain, controlled = regress(x, y), regress(x, y, own)
    assert plain is not None
    assert controlled is not None
    assert plain.slope_low > 1.0
    assert controlled.slope_low < 0.0 < controlled.slope_high


@pytest.mark.parametrize("x", [[], [1.0], [1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
def test_no_line_without_points_or_spread(x):
    assert regress(x, [1.0] * len(x)) is None


def test_no_line_when_the_control_explains_x():
    own = np.arange(10.0)
    assert regress(2.0 * own, own * own, own) is None

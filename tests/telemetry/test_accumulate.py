"""Accumulators against the plain definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.telemetry.accumulate import Counter, CounterFamily, Histogram


@given(st.sets(st.integers(0, 100), min_size=1), st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3))))
def test_a_histogram_counts_by_inclusive_upper_bound(bounds, observations):
    bounds = sorted(bounds)
    one, many = Histogram(bounds), Histogram(bounds)
    values = []
    for value, count in observations:
        many.observe_many(value, count)
        for _ in range(count):
            one.observe(value)
            values.append(value)
    assert one.counts == many.counts
    assert one.sum == many.sum == sum(values)
    assert one.count == len(values)
    cumulative = [sum(one.counts[: index + 1]) for index in range(len(bounds))]
    assert cumulative == [sum(value <= bound for value in values) for bound in bounds]


@pytest.mark.parametrize("bounds", [[2, 1], [1, 1]])
def test_bounds_ascend(bounds):
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)


def test_a_counter_does_not_go_back():
    counter = Counter()
    counter.add()
    counter.add(4)
    with pytest.raises(ValueError, match="go back"):
        counter.add(-1)
    assert counter.value == 5


def test_what_is_in_no_set_is_other():
    family = CounterFamily([("a", "b"), ("1",)], ("rest", "other"))
    for labels in (("a", "1"), ("x", "1"), ("y", "2"), ("a", "2"), ("rest", "1")):
        family.add(*labels)
    assert family.values == {("a", "1"): 1, ("rest", "1"): 2, ("rest", "other"): 1, ("a", "other"): 1}
    with pytest.raises(ValueError, match="zip"):
        family.add("a")


def test_one_label_is_shown_from_the_start():
    assert CounterFamily([("b", "a")], ("other",)).values == {("a",): 0, ("b",): 0}

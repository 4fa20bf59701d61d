"""The search must bracket a threshold it cannot see, within its bounds, for any threshold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.studies.rate_search import RateSearch, share_interval


def search_all(truth: float, search: RateSearch, max_steps: int = 60) -> int:
    for step in range(max_steps):
        rate = search.next_rate()
        if rate is None:
            return step
        search.record(rate, held=rate <= truth)
    raise AssertionError("the search did not end")


@given(st.floats(0.02, 900), st.floats(0.05, 500), st.floats(0.02, 0.5))
def test_the_bracket_holds_the_truth_and_is_narrow(truth, start, tolerance):
    search = RateSearch(start, tolerance=tolerance, min_rate=0.01, max_rate=1000)
    search_all(truth, search)
    assert search.low is not None
    assert search.high is not None
    assert search.low <= truth < search.high
    assert search.high / search.low <= 1 + tolerance + 1e-9


@given(st.floats(0.02, 1000))
def test_a_server_that_nothing_holds_or_that_holds_everything_ends_the_search(start):
    nothing = RateSearch(start, tolerance=0.1, min_rate=0.01, max_rate=1000)
    search_all(0.0, nothing)
    assert nothing.bracket == (None, 0.01)
    everything = RateSearch(start, tolerance=0.1, min_rate=0.01, max_rate=1000)
    search_all(1e9, everything)
    assert everything.bracket == (1000, None)


@pytest.mark.parametrize(("start", "tolerance", "low", "high"), [(0, 0.1, 1, 2), (1, 0, 1, 2), (1, 0.1, 0, 2), (1, 0.1, 3, 2)])
def test_rates_that_cannot_be_are_refused(start, tolerance, low, high):
    with pytest.raises(ValueError, match="above 0"):
        RateSearch(start, tolerance=tolerance, min_rate=low, max_rate=high)


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_of_a_share_holds_the_share(hits, total):
    hits = min(hits, total)
    low, high = share_interval(hits, total)
    assert 0 <= low <= hits / total + 1e-12
    assert hits / total - 1e-12 <= high <= 1
    assert low < high


def test_the_interval_of_known_shares():
    """Wilson's interval for 99 of 100 and for 0 of 10, to three digits as in published tables."""
    assert share_interval(99, 100) == pytest.approx((0.9455, 0.9982), abs=5e-4)
    assert share_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-4)
    assert share_interval(0, 0) == (0.0, 1.0)

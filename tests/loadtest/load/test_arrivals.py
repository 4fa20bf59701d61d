"""Arrival processes: right in their means, the same for the same seed, and told when asked for nonsense."""

import itertools
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loadtest import arrivals
from headrace.loadtest.arrivals import due_times
from headrace.loadtest.records import RunSettings


def wanted(arrival: str, **more: object) -> RunSettings:
    return RunSettings(url="http://x", model="m", arrival=arrival, **more)  # type: ignore[arg-type]


def first(times: Iterator[float], num: int) -> list[float]:
    return list(itertools.islice(times, num))


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def cv(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


def test_poisson_has_exponential_gaps_of_the_right_mean() -> None:
    between = gaps(first(arrivals.poisson(20.0, seed=1), 20_000))
    assert statistics.fmean(between) == pytest.approx(0.05, rel=0.03)
    assert cv(between) == pytest.approx(1.0, abs=0.03)


def test_bursty_keeps_the_mean_rate_and_is_bursty() -> None:
    times = first(arrivals.bursty(50.0, 3, on_seconds=1.0, off_seconds=4.0), 60_000)
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.1)
    assert cv(gaps(times)) > 3
    counts = [0] * (int(times[-1]) + 1)
    for time in times:
        counts[int(time)] += 1
    empty = sum(count == 0 for count in counts) / len(counts)
    assert 0.5 < empty < 0.8  # e^(-1/4) * 4/5 of the seconds lie wholly in OFF spells


def test_bursty_with_equal_rates_is_poisson() -> None:
    between = gaps(first(arrivals.bursty(10.0, 5, on_seconds=1.0, off_seconds=1.0, off_share=1.0), 20_000))
    assert (statistics.fmean(between), cv(between)) == pytest.approx((0.1, 1.0), rel=0.04)


@pytest.mark.parametrize(("begin", "end"), [(5.0, 45.0), (45.0, 5.0), (25.0, 25.0), (0.0, 50.0)])
def test_ramp_goes_in_a_straight_line(begin: float, end: float) -> None:
    runs = [list(itertools.takewhile(lambda due: due < 120, arrivals.ramp(begin, end, 100.0, seed))) for seed in range(6)]
    for low, high in ((0.0, 25.0), (50.0, 75.0), (75.0, 100.0), (100.0, 120.0)):
        middle = (low + high) / 2
        rate = end if middle > 100 else begin + (end - begin) * middle / 100
        expected = 6 * rate * (high - low)
        counted = sum(low <= due < high for due in itertools.chain(*runs))
        assert abs(counted - expected) < 4.5 * expected**0.5


def test_constant_and_trace() -> None:
    assert first(arrivals.constant(4.0), 3) == [0.0, 0.25, 0.5]
    assert list(arrivals.trace([10.0, 11.0, 11.0, 14.0])) == [0.0, 1.0, 1.0, 4.0]
    assert list(arrivals.trace([10.0, 11.0, 11.0, 14.0], rate=3.0)) == pytest.approx([0.0, 0.25, 0.25, 1.0])
    assert list(arrivals.trace([])) == []


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["poisson", "bursty", "constant", "ramp"]), st.floats(0.1, 1e4), st.integers(0, 1000), st.floats(0.1, 100.0)
)
def test_times_rise_repeat_and_stay_within_the_limits(arrival: str, rate: float, seed: int, duration: float) -> None:
    plan = wanted(arrival, rate=rate, seed=seed, num_requests=50, duration_seconds=duration, extra={"ramp_to_rate": "5"})
    times = list(due_times(plan) or ())
    assert times == list(due_times(plan) or ())
    assert len(times) <= 50
    assert all(0 <= earlier <= later < duration for earlier, later in itertools.pairwise([*times, *times[-1:]]))


def test_seeds_differ_and_a_closed_loop_has_no_times() -> None:
    assert first(arrivals.poisson(1.0, 1), 5) != first(arrivals.poisson(1.0, 2), 5)
    assert due_times(wanted("closed", num_clients=3)) is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (wanted("poison", rate=1.0), "must be one of"),
        (wanted("poisson", num_requests=3), "needs a rate"),
        (wanted("poisson", rate=0.0, num_requests=3), "positive"),
        (wanted("poisson", rate=1.0), "number of requests or a duration"),
        (wanted("ramp", rate=1.0, num_requests=3, extra={"ramp_seconds": "9"}), "needs ramp_to_rate"),
        (wanted("ramp", rate=1.0, num_requests=3, extra={"ramp_to_rate": "9"}), "needs ramp_seconds"),
        (wanted("bursty", rate=1.0, num_requests=3, extra={"burst_on_seconds": "x"}), "must be a number"),
        (wanted("bursty", rate=1.0, num_requests=3, extra={"burst_off_share": "2"}), "between 0 and 1"),
        (wanted("trace"), "times of a trace"),
    ],
)
def test_nonsense_is_told_in_words(plan: RunSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(due_times(plan) or ())


def test_a_trace_that_goes_back_or_cannot_be_stretched_is_refused() -> None:
    with pytest.raises(ValueError, match="go back"):
        arrivals.trace([2.0, 1.0])
    with pytest.raises(ValueError, match="stretched"):
        arrivals.trace([1.0, 1.0], rate=2.0)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.traffic import Tenant, TrafficPolicy
from headrace.scheduling import Scheduler
from headrace.simulation.engine import Outcome, PrefillChunk
from headrace.simulation.fairness import fairness_of, jain_index, merged
from headrace.simulation.figures import figures_of, tail
from headrace.simulation.requests import REFUSED, FinishedRequest
from headrace.simulation.settings import SimulationSettings
from tests.simulation.simulated_record import MS, machine, request, run

S = 1_000_000_000


def ended(index: int, due_ms: float, token_ms: list[float], **more: object) -> FinishedRequest:
    fields: dict[str, object] = {"service_class": "interactive"} | more
    asked = request(index, due_ms, output=max(1, len(token_ms)), **fields)
    if not token_ms:
        return FinishedRequest(request=asked, reason=REFUSED, arrival_ns=asked.due_ns, end_ns=asked.due_ns)
    times = [round(at * MS) for at in token_ms]
    return FinishedRequest(
        request=asked,
        reason="length",
        arrival_ns=asked.due_ns,
        end_ns=times[-1],
        first_scheduled_ns=asked.due_ns,
        token_ns=times,
    )


def outcome(finished: list[FinishedRequest], chunks: list[PrefillChunk] | None = None) -> Outcome:
    at = machine()
    end_ns = max(item.end_ns for item in finished)
    statistics = Scheduler(at.config, at.spec).statistics()
    return Outcome(finished, chunks or [], 1, 4, end_ns, 0, end_ns, statistics)


def test_figures_of_a_case_that_is_computed_by_hand() -> None:
    finished = [
        ended(0, 0, [100, 110, 120, 200]),  # TTFT 100, gaps 10 10 80, TPOT 100/3, worst tenth: the one of 80
        ended(1, 50, [350]),  # TTFT 300, no gap
        ended(2, 100, []),  # refused
        ended(3, 400, [2500, 2510], service_class="standard"),  # TTFT 2100
    ]
    settings = SimulationSettings(ttft_ms=300, tbt_ms=80)
    found = figures_of("hand", outcome(finished), settings)
    total = found.total
    assert (total.offered, total.completed, total.refused, total.failed, total.good) == (4, 3, 1, 0, 2)
    assert total.goodput == 0.5
    assert (total.ttft_seconds.p50, total.ttft_seconds.max) == (pytest.approx(0.3), pytest.approx(2.1))
    assert total.ttft_seconds.mean == pytest.approx((0.1 + 0.3 + 2.1) / 3)
    assert (total.tbt_seconds.count, total.tbt_seconds.max) == (4, pytest.approx(0.08))
    assert total.tpot_seconds.mean == pytest.approx((0.1 / 3 + 0.01) / 2)
    assert total.worst_tbt_seconds.max == pytest.approx(0.08)
    # The window is 0 .. 400 ms, when the last was due: five tokens of completed requests came in it.
    assert (found.window_seconds, found.makespan_seconds) == (0.4, 2.51)
    assert found.output_tokens_per_second == pytest.approx(5 / 0.4)
    assert found.requests_per_second == pytest.approx(2 / 0.4)
    assert found.offered_per_second == pytest.approx(10)
    assert list(found.by_class) == ["interactive", "standard"]
    assert (found.by_class["interactive"].good, found.by_class["standard"].goodput) == (2, 0.0)


def test_targets_are_those_of_the_class_unless_others_are_given() -> None:
    """The default targets in ms: interactive 2000 and 150, standard 10000 and 250."""
    finished = [
        ended(0, 0, [2001, 2100]),  # TTFT over interactive's
        ended(1, 1, [1500, 1700]),  # a gap of 200
        ended(2, 2, [2001, 2201], service_class="standard"),
        ended(3, 3, [9000, 99_000], service_class="batch"),  # no target of TBT
    ]
    assert figures_of("x", outcome(finished), SimulationSettings()).total.good == 2
    assert figures_of("x", outcome(finished), SimulationSettings(tbt_ms=210)).total.good == 2
    assert figures_of("x", outcome(finished), SimulationSettings(ttft_ms=2500, tbt_ms=210)).total.good == 3


def test_ttft_counts_from_when_it_was_due_refused_tries_included() -> None:
    item = ended(0, 100, [5200])
    item.arrival_ns = item.first_scheduled_ns = 5100 * MS
    assert figures_of("x", outcome([item]), SimulationSettings()).total.ttft_seconds.mean == pytest.approx(5.1)


def test_requests_due_in_the_warm_up_are_not_measured() -> None:
    finished = [ended(0, 0, [1000]), ended(1, 600, [700]), ended(2, 1100, [1200])]
    found = figures_of("x", outcome(finished), SimulationSettings(warm_up_seconds=0.5))
    assert (found.total.offered, found.total.ttft_seconds.max) == (2, pytest.approx(0.1))
    # 0.5 .. 1.1 s: the tokens at 1000 and 700 came within.
    assert found.output_tokens_per_second == pytest.approx(2 / 0.6)


def test_the_queue_is_who_waits_for_a_first_step() -> None:
    """One place: the second waits 40 ms of 50, the third 50 ms less what is beyond the window."""
    requests = [request(0, 0, output=5), request(1, 10, output=5), request(2, 50, output=5)]
    found = figures_of("x", run(requests, machine(max_num_seqs=1)), SimulationSettings())
    assert (found.mean_queue, found.max_queue) == (pytest.approx(40 / 50), 1)


def test_no_value_has_no_percentile() -> None:
    assert tail([]).p99 is None


@pytest.mark.parametrize(
    ("values", "index"), [([1, 1, 1], 1.0), ([3, 0, 0], 1 / 3), ([0, 0], 1.0), ([1, 2], 9 / 10), ([5], 1.0)]
)
def test_jain_index(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9))
def test_jain_index_lies_between_one_nth_and_one(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain_index(values) <= 1 + 1e-9


def test_merged_intervals() -> None:
    assert merged([(5, 7), (0, 2), (2, 3), (6, 6), (9, 9)]) == [(0, 3), (5, 7), (9, 9)]


def test_fairness_looks_only_at_windows_in_which_tenants_compete() -> None:
    """Windows of 10 s; tenant a waits over 0 .. 30 s, b over 5 .. 30: they compete in the second and third window."""

    def waiting(index: int, tenant: str, begin: int, end: int, tokens: list[int]) -> FinishedRequest:
        asked = request(index, begin * 1000, tenant_id=tenant)
        return FinishedRequest(
            request=asked, reason="length", arrival_ns=begin * S, end_ns=99 * S, first_scheduled_ns=end * S,
            token_ns=[at * S for at in tokens],
        )  # fmt: skip

    finished = [waiting(0, "a", 0, 30, [12, 13, 50]), waiting(1, "b", 5, 30, [14])]
    chunks = [PrefillChunk(0, 25 * S, 30), PrefillChunk(1, 26 * S, 60), PrefillChunk(0, 2 * S, 999)]
    found = fairness_of(finished, chunks, {}, 10 * S)
    # Second window: two output tokens against one, each counted twice; third: 30 prompt tokens against 60.
    assert found.num_windows == 2
    assert found.jain_mean == pytest.approx(jain_index([4, 2]))
    weighted = fairness_of(finished, chunks[:2], {"a": 1, "b": 2}, 10 * S)
    assert weighted.jain_least == pytest.approx(jain_index([4, 1]))
    alone = fairness_of(finished[:1], chunks[:1], {}, 10 * S)
    assert (alone.num_windows, alone.jain_mean) == (0, None)


def test_fcfs_gives_a_heavy_tenant_more() -> None:
    """Both are backlogged throughout, one sends three times as much: fcfs serves it three times as much."""
    requests = [request(index, prompt=32, output=8, tenant_id="heavy" if index % 4 else "light") for index in range(400)]
    policy = TrafficPolicy(tenants=(*TrafficPolicy().tenants, Tenant(name="heavy"), Tenant(name="light")))
    found = figures_of("x", run(requests, machine(max_num_seqs=4)), SimulationSettings(policy=policy, window_seconds=1.0))
    assert found.fairness.num_windows >= 5
    assert found.fairness.jain_mean == pytest.approx(jain_index([3, 1]), abs=0.03)
    assert list(found.by_tenant) == ["heavy", "light"]

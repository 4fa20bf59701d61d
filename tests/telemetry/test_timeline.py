"""Latencies and stalls of a request: MET-04, MET-05, MET-07, and that a fault of measuring fails nothing (MET-08)."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.stalls import Stall, StallCause
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry import accumulate
from headrace.telemetry.catalog import FINISHED_REASONS, finished_reason
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.reports import phases_of
from headrace.telemetry.timeline import MAX_STALLS
from tests.telemetry.identities import identity

MS = 1_000_000


@pytest.fixture
def meters():
    return GatewayMeters()


def of(meters, name):
    return meters.accumulators[f"headrace_{name}"]


def ttft(meters):
    return of(meters, "time_to_first_token_seconds")


def itl(meters):
    return of(meters, "inter_token_latency_seconds")


def ended(meters):
    return {labels[0]: value for labels, value in of(meters, "request_success_total").values.items() if value}


EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**10)), max_size=10)
LIVES = st.lists(st.tuples(EVENTS, st.sampled_from([*FINISHED_REASONS, None])), max_size=8)


@given(LIVES)
def test_met_04_and_met_07_counts_agree_for_any_requests(lives):
    """TTFT count = requests that emitted a token; ITL count = tokens - 1 of each; ends over all reasons = ended requests."""
    meters = GatewayMeters()
    now = num_emitting = num_gaps = num_tokens_ended = num_ended = 0
    for events, reason in lives:
        timeline = meters.start_request(identity(7), now)
        total = 0
        for num_tokens, gap in events:
            now += gap
            timeline.count_tokens(num_tokens, now)
            total += num_tokens
        num_emitting += total > 0
        num_gaps += max(total - 1, 0)
        if reason is not None:
            timeline.end(reason, now)
            timeline.count_tokens(3, now + 1)
            timeline.end("error", now + 2)
            num_ended += 1
            num_tokens_ended += total
        assert timeline.snapshot().num_output_tokens == total
    assert ttft(meters).count == num_emitting
    assert itl(meters).count == num_gaps
    assert of(meters, "requests_started_total").value == len(lives)
    assert sum(ended(meters).values()) == num_ended
    generated = of(meters, "request_generation_tokens")
    assert (generated.count, generated.sum) == (num_ended, num_tokens_ended)
    assert of(meters, "request_prompt_tokens").count == num_ended
    completed = sum(value for reason, value in ended(meters).items() if reason in ("stop", "length"))
    assert of(meters, "e2e_request_latency_seconds").count == completed
    assert meters.faults.counter.value == 0


def test_met_04_tokens_that_come_together_are_one_gap_and_zeros(meters):
    timeline = meters.start_request(identity(1), 0)
    timeline.count_tokens(2, 100 * MS)
    timeline.count_tokens(3, 140 * MS)
    assert (ttft(meters).count, ttft(meters).sum) == (1, 100 * MS)
    assert (itl(meters).count, itl(meters).sum) == (4, 40 * MS)
    assert itl(meters).child("standard").counts[0] == 3


def test_met_05_a_preemption_is_a_long_gap_and_nothing_else(meters):
    timeline = meters.start_request(identity(1), 10 * MS)
    timeline.start(15 * MS)
    timeline.count_tokens(1, 20 * MS)
    timeline.start(3000 * MS)
    timeline.count_tokens(1, 3020 * MS)
    timeline.end("stop", 3021 * MS)
    assert (ttft(meters).count, ttft(meters).sum) == (1, 10 * MS)
    queue_time = of(meters, "request_queue_time_seconds")
    assert (queue_time.count, queue_time.sum) == (1, 5 * MS)
    assert (itl(meters).count, itl(meters).sum) == (1, 3000 * MS)
    stamps = timeline.snapshot().stamps
    assert (stamps.first_scheduled_ns, stamps.first_token_ns, stamps.end_ns) == (15 * MS, 20 * MS, 3021 * MS)
    prefill_time, decode_time = of(meters, "request_prefill_time_seconds"), of(meters, "request_decode_time_seconds")
    assert (prefill_time.sum, decode_time.sum) == (5 * MS, 3000 * MS)


def test_met_07_five_aborts(meters):
    for number in range(5):
        timeline = meters.start_request(identity(1), 0)
        timeline.count_tokens(number, 10)
        timeline.end(finished_reason(FinishReason.CANCELLED), 20)
    assert ended(meters) == {"abort": 5}
    assert of(meters, "e2e_request_latency_seconds").count == 0
    assert of(meters, "request_generation_tokens").sum == 10


def test_met_07_every_finish_reason_has_its_label():
    assert {finished_reason(reason) for reason in FinishReason} == set(FINISHED_REASONS)


def test_the_count_that_the_client_is_told_wins(meters):
    timeline = meters.start_request(identity(1), 0)
    timeline.count_tokens(4, 10)
    timeline.end("stop", 10, num_output_tokens=2)
    assert of(meters, "request_generation_tokens").sum == 2


def test_a_request_that_never_began_has_no_latencies(meters):
    snapshot = meters.start_request(identity(1), 5).snapshot()
    assert (snapshot.state, snapshot.num_output_tokens, snapshot.finished_reason) == ("queued", 0, "")
    stamps = snapshot.stamps
    assert (stamps.received_ns, stamps.tokenized_ns, stamps.queued_ns, stamps.first_scheduled_ns) == (5, 0, 0, 0)
    assert (stamps.first_token_ns, stamps.last_token_ns, stamps.end_ns) == (0, 0, 0)


def test_stamps_that_go_back_count_as_no_time(meters):
    timeline = meters.start_request(identity(1), 100)
    timeline.start(50)
    timeline.count_tokens(1, 60)
    timeline.count_tokens(1, 20)
    timeline.end("stop", 10)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert of(meters, name).sum == 0
    stamps = timeline.snapshot().stamps
    assert stamps.received_ns == stamps.first_token_ns == stamps.last_token_ns == stamps.end_ns == 100


STEPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 10**10)), min_size=1, max_size=8)
OFFSETS = st.integers(-(10**6), 10**10)


@given(st.integers(10**7, 10**12), OFFSETS, OFFSETS, OFFSETS, STEPS, OFFSETS)
def test_queue_prefill_and_decode_add_up_to_the_last_token(arrival, tokenized, queued, scheduled, steps, end):
    """Whatever the clocks say: the three durations, the phases and the stamps tell one story."""
    meters = GatewayMeters()
    timeline = meters.start_request(identity(), arrival, arrival + tokenized, arrival + queued)
    now = arrival
    for num_tokens, gap in steps:
        now += gap
        timeline.start(arrival + scheduled)
        timeline.count_tokens(num_tokens, now)
    timeline.end("stop", now + end)
    snapshot = timeline.snapshot()
    stamps = snapshot.stamps
    queue, prefill, decode, e2e = (
        of(meters, f"{name}_seconds").sum
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
    )
    assert queue + prefill + decode == stamps.last_token_ns - stamps.received_ns <= e2e
    assert ttft(meters).sum == queue + prefill
    assert decode == itl(meters).sum
    phases = phases_of(snapshot)
    ends = stamps.last_token_ns if snapshot.num_output_tokens > 1 else stamps.first_token_ns
    assert sum(end_ns - begin_ns for _, begin_ns, end_ns in phases) == ends - stamps.received_ns
    num_gaps = snapshot.num_output_tokens - 1
    per_token = of(meters, "request_time_per_output_token_seconds")
    assert per_token.count == (num_gaps > 0)
    if num_gaps:
        assert per_token.sum == (e2e - ttft(meters).sum) // num_gaps
    in_order = dataclasses.astuple(stamps)
    assert list(in_order) == sorted(in_order)
    assert meters.faults.counter.value == 0


STAMP = st.integers(1, 50)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), STAMP),
        st.tuples(st.just("count_tokens"), st.integers(0, 3), STAMP),
        st.tuples(st.just("note_preempted"), STAMP),
        st.tuples(
            st.just("note_stalls"), st.lists(st.builds(Stall, st.sampled_from(list(StallCause)), STAMP, STAMP), max_size=2)
        ),
        st.tuples(st.just("note_cut_off"), STAMP, st.just(StallCause.WORKER_LOST), st.none()),
        st.tuples(st.just("end"), st.sampled_from(FINISHED_REASONS), STAMP),
    ),
    max_size=8,
)


@given(STAMP, st.one_of(st.just(0), STAMP), st.one_of(st.just(0), STAMP), CALLS)
def test_no_stamp_is_before_one_that_must_precede_it(arrival, tokenized, queued, calls):
    """Whatever is told, in whatever order: what came stands in order, latencies add up, and no wait began before arrival."""
    meters = GatewayMeters()
    timeline = meters.start_request(identity(), arrival, tokenized, queued)
    for name, *arguments in calls:
        getattr(timeline, name)(*arguments)
        in_order = [stamp for stamp in dataclasses.astuple(timeline.snapshot().stamps) if stamp]
        assert in_order == sorted(in_order)
    snapshot = timeline.snapshot()
    stamps = snapshot.stamps
    assert all(stall.began_ns >= arrival and stall.duration_ns >= 0 for stall in snapshot.stalls)
    prefill_time = of(meters, "request_prefill_time_seconds")
    assert prefill_time.count == bool(stamps.first_scheduled_ns and stamps.first_token_ns)
    if prefill_time.count:
        assert of(meters, "request_queue_time_seconds").sum + prefill_time.sum == ttft(meters).sum
    assert meters.faults.counter.value == 0


def test_a_start_that_is_told_late_lies_before_the_token_and_after_the_end_is_none(meters):
    timeline = meters.start_request(identity(), 10)
    timeline.count_tokens(1, 30)
    timeline.start(90)
    timeline.end("stop", 20)
    stamps = timeline.snapshot().stamps
    assert (stamps.first_scheduled_ns, stamps.first_token_ns, stamps.end_ns) == (30, 30, 30)
    unstarted = meters.start_request(identity(), 10)
    unstarted.end("deadline", 40)
    unstarted.start(90)
    assert unstarted.snapshot().stamps.first_scheduled_ns == 0


def test_a_stall_that_began_before_the_arrival_counts_from_there(meters):
    timeline = meters.start_request(identity(), 1000)
    timeline.note_stalls([Stall(StallCause.NO_SLOT, 400, 900), Stall(StallCause.PREFILL, 100, 200)])
    assert timeline.snapshot().stalls == (Stall(StallCause.NO_SLOT, 1000, 300), Stall(StallCause.PREFILL, 1000, 0))
    assert stalls_of(meters) == {"no_slot": (1, 300), "prefill": (1, 0)}


def test_each_class_has_histograms_of_its_own(meters):
    for service_class, num_tokens in (("interactive", 1), ("batch", 2), ("no such class", 4)):
        timeline = meters.start_request(identity(service_class=service_class), 0)
        timeline.start(1)
        timeline.count_tokens(num_tokens, 2)
        timeline.end("length", 3)
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds"):
        counts = {value: child.count for value, child in of(meters, name).children.items()}
        assert counts == {"interactive": 1, "standard": 1, "batch": 1}
    gaps = {value: child.count for value, child in itl(meters).children.items()}
    assert gaps == {"interactive": 0, "standard": 3, "batch": 1}, "an unknown class counts as the default one"


def test_tokens_and_requests_are_counted_by_tenant(meters):
    for tenant, num_tokens in (("default", 2), ("other", 5), ("other", 1)):
        timeline = meters.start_request(identity(10, tenant=tenant), 0)
        timeline.count_tokens(num_tokens, 1)
        timeline.end("abort", 2)
    assert of(meters, "tenant_requests_total").values == {("default",): 1, ("other",): 2}
    assert of(meters, "tenant_prompt_tokens_total").values == {("default",): 10, ("other",): 20}
    assert of(meters, "tenant_generation_tokens_total").values == {("default",): 2, ("other",): 6}


def stalls_of(meters):
    """{cause: (number, ns)}, without zeros."""
    durations = of(meters, "stall_seconds_total").values
    return {key[0]: (count, durations[key]) for key, count in of(meters, "stalls_total").values.items() if count}


CAUSES = st.sampled_from(list(StallCause))


@given(st.lists(st.builds(Stall, CAUSES, st.integers(0, 10**12), st.integers(0, 10**12)), max_size=60))
def test_all_stalls_are_counted_and_the_longest_are_kept(stalls):
    meters = GatewayMeters()
    timeline = meters.start_request(identity(), 0)
    timeline.note_stalls(stalls[:20])
    timeline.end("stop", 1)
    timeline.note_stalls(stalls[20:])
    snapshot = timeline.snapshot()
    assert snapshot.num_stalls == len(stalls)
    kept = sorted((stall.duration_ns for stall in snapshot.stalls), reverse=True)
    assert kept == sorted((stall.duration_ns for stall in stalls), reverse=True)[:MAX_STALLS]
    assert [stall.began_ns for stall in snapshot.stalls] == sorted(stall.began_ns for stall in snapshot.stalls)
    expected = {}
    for stall in stalls:
        count, total = expected.get(stall.cause.value, (0, 0))
        expected[stall.cause.value] = (count + 1, total + stall.duration_ns)
    assert stalls_of(meters) == expected
    assert meters.faults.counter.value == 0


class TestCutOff:
    """A request that ends without the worker's word: what it waited for until then."""

    def cut(self, timeline, now, cause=None):
        timeline.note_cut_off(now, cause, lambda: StallCause.NO_SLOT)
        timeline.end("abort", now)
        return timeline.snapshot().stalls

    def test_in_the_queue(self, meters):
        timeline = meters.start_request(identity(), 100 * MS)
        assert self.cut(timeline, 350 * MS) == (Stall(StallCause.NO_SLOT, 100 * MS, 250 * MS),)
        assert stalls_of(meters) == {"no_slot": (1, 250 * MS)}

    def test_between_tokens(self, meters):
        timeline = meters.start_request(identity(), 0)
        timeline.count_tokens(1, 500 * MS)
        assert self.cut(timeline, 800 * MS) == (Stall(StallCause.SLOW_STEP, 500 * MS, 300 * MS),)

    def test_while_preempted(self, meters):
        timeline = meters.start_request(identity(), 0)
        timeline.count_tokens(1, 500 * MS)
        timeline.note_preempted(600 * MS)
        assert timeline.snapshot().state == "preempted"
        assert self.cut(timeline, 900 * MS) == (Stall(StallCause.PREEMPTED, 600 * MS, 300 * MS),)

    def test_below_the_threshold(self, meters):
        timeline = meters.start_request(identity(), 0)
        timeline.count_tokens(1, 500 * MS)
        assert self.cut(timeline, 750 * MS - 1) == ()
        assert stalls_of(meters) == {}

    def test_a_lost_worker_counts_however_soon_it_is_seen(self, meters):
        timeline = meters.start_request(identity(), 0)
        timeline.count_tokens(1, 500 * MS)
        expected = (Stall(StallCause.WORKER_LOST, 500 * MS, 10 * MS),)
        assert self.cut(timeline, 510 * MS, StallCause.WORKER_LOST) == expected

    def test_the_threshold_is_the_operators(self):
        meters = GatewayMeters(stall_threshold_ms=1000)
        assert self.cut(meters.start_request(identity(), 0), 999 * MS) == ()
        assert len(self.cut(meters.start_request(identity(), 0), 1000 * MS)) == 1

    def test_after_the_end_nothing_is_added(self, meters):
        timeline = meters.start_request(identity(), 0)
        timeline.end("stop", 1)
        assert self.cut(timeline, 10**12) == ()


def test_states(meters):
    timeline = meters.start_request(identity(), 0, 1, 2)
    seen = [timeline.snapshot().state]
    timeline.start(3)
    seen.append(timeline.snapshot().state)
    timeline.count_tokens(1, 4)
    seen.append(timeline.snapshot().state)
    timeline.note_preempted(5)
    seen.append(timeline.snapshot().state)
    timeline.count_tokens(1, 6)
    seen.append(timeline.snapshot().state)
    timeline.note_usage(3, 1)
    timeline.end("error", 7, error_code="worker_lost")
    snapshot = timeline.snapshot()
    assert [*seen, snapshot.state] == ["queued", "prefill", "decode", "preempted", "decode", "finished"]
    assert (snapshot.num_cached_tokens, snapshot.num_preemptions) == (3, 1)
    assert (snapshot.finished_reason, snapshot.error_code) == ("error", "worker_lost")
    assert of(meters, "request_tokenize_time_seconds").sum == 1


def test_another_policy_has_other_classes():
    policy = TrafficPolicy()
    meters = GatewayMeters(traffic=TrafficPolicy(classes=policy.classes[:1], default_class="interactive"))
    meters.start_request(identity(service_class="batch"), 0).count_tokens(1, 5)
    assert {value: child.count for value, child in ttft(meters).children.items()} == {"interactive": 1}


def test_met_08_faults_of_measuring_are_counted_and_go_no_further(meters, monkeypatch):
    timeline = meters.start_request(identity(1), 0)
    timeline.end("no such reason", 5)
    assert ended(meters) == {"error": 1}, "a request that ended must be counted as ended"
    assert meters.faults.counter.value == 1

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(accumulate.Histogram, "observe", broken)
    second = meters.start_request(identity(1), 0)
    second.start(1)
    second.count_tokens(1, 2)
    second.end("stop", 3)
    meters.count_http("/v1/models", "not a status")
    meters.count_http(["unhashable"], 200)
    meters.count_rejection(None)
    assert meters.faults.counter.value == 5


def test_met_08_the_first_fault_of_a_place_is_logged_and_later_ones_are_not(meters, capsys):
    for _ in range(3):
        meters.count_http(["unhashable"], 200)
    assert meters.faults.counter.value == 3
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("metrics_fault") == 1
    assert "GatewayMeters.count_http" in printed.out + printed.err

"""Latencies of a request: MET-04, MET-05, MET-07, and that a fault of measuring fails nothing (MET-08)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.lifecycle import FinishReason
from headrace.telemetry import accumulate
from headrace.telemetry.catalog import FINISHED_REASONS, finished_reason
from headrace.telemetry.meters import GatewayMeters

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
        timeline = meters.start_request(now, 7)
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
        assert timeline.latencies().num_output_tokens == total
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
    timeline = meters.start_request(0, 1)
    timeline.count_tokens(2, 100 * MS)
    timeline.count_tokens(3, 140 * MS)
    assert (ttft(meters).count, ttft(meters).sum) == (1, 100 * MS)
    assert (itl(meters).count, itl(meters).sum) == (4, 40 * MS)
    assert itl(meters).counts[0] == 3


def test_met_05_a_preemption_is_a_long_gap_and_nothing_else(meters):
    timeline = meters.start_request(10 * MS, 1)
    timeline.start(15 * MS)
    timeline.count_tokens(1, 20 * MS)
    timeline.start(3000 * MS)
    timeline.count_tokens(1, 3020 * MS)
    timeline.end("stop", 3021 * MS)
    assert (ttft(meters).count, ttft(meters).sum) == (1, 10 * MS)
    queue_time = of(meters, "request_queue_time_seconds")
    assert (queue_time.count, queue_time.sum) == (1, 5 * MS)
    assert (itl(meters).count, itl(meters).sum) == (1, 3000 * MS)
    latencies = timeline.latencies()
    assert (latencies.queue_ns, latencies.time_to_first_token_ns, latencies.e2e_ns) == (5 * MS, 10 * MS, 3011 * MS)


def test_met_07_five_aborts(meters):
    for number in range(5):
        timeline = meters.start_request(0, 1)
        timeline.count_tokens(number, 10)
        timeline.end(finished_reason(FinishReason.CANCELLED), 20)
    assert ended(meters) == {"abort": 5}
    assert of(meters, "e2e_request_latency_seconds").count == 0
    assert of(meters, "request_generation_tokens").sum == 10


def test_met_07_every_finish_reason_has_its_label():
    assert {finished_reason(reason) for reason in FinishReason} == set(FINISHED_REASONS)


def test_the_count_that_the_client_is_told_wins(meters):
    timeline = meters.start_request(0, 1)
    timeline.count_tokens(4, 10)
    timeline.end("stop", 10, num_output_tokens=2)
    assert of(meters, "request_generation_tokens").sum == 2


def test_a_request_that_never_began_has_no_latencies(meters):
    timeline = meters.start_request(5, 1)
    latencies = timeline.latencies()
    assert (latencies.queue_ns, latencies.time_to_first_token_ns, latencies.e2e_ns) == (None, None, None)


def test_stamps_that_go_back_count_as_no_time(meters):
    timeline = meters.start_request(100, 1)
    timeline.start(50)
    timeline.count_tokens(1, 60)
    timeline.count_tokens(1, 20)
    timeline.end("stop", 10)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert of(meters, name).sum == 0
    assert timeline.latencies().e2e_ns == 0


def test_met_08_faults_of_measuring_are_counted_and_go_no_further(meters, monkeypatch):
    timeline = meters.start_request(0, 1)
    timeline.end("no such reason", 5)
    assert ended(meters) == {"error": 1}, "a request that ended must be counted as ended"
    assert meters.faults.counter.value == 1

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(accumulate.Histogram, "observe", broken)
    second = meters.start_request(0, 1)
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

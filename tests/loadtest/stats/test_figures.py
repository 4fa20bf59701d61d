"""Figures of runs whose truth is known by construction."""

import time

import pytest

from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget, summarize, timings_of
from headrace.loadtest.records import Outcome, RequestRecord
from tests.loadtest.stats.simulated_server import make_run, quiet_client

GAP = 0.02


def streamed(
    index, *, scheduled=0.0, lag=0.0, ttft=0.1, gaps=None, num_tokens=11, usage="right", outcome=Outcome.COMPLETED, **more
):
    gaps = [GAP] * (num_tokens - 1) if gaps is None else gaps
    sent = scheduled + lag
    times = [sent + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    values = {
        "index": index,
        "process": 0,
        "scheduled": scheduled,
        "sent": sent,
        "first_event_at": sent + ttft,
        "chunk_times": times,
        "chunk_chars": [4] * len(times),
        "ended": times[-1] + 0.001,
        "outcome": outcome,
        "status": 200,
        "finish_reasons": ["length"],
        "prompt_tokens": 100,
        "output_tokens": len(times) if usage == "right" else usage,
    }
    return RequestRecord(**(values | more))


def lost(index, outcome, *, scheduled=0.0, kind="", detail=""):
    return RequestRecord(
        index=index,
        process=0,
        scheduled=scheduled,
        sent=scheduled,
        outcome=outcome,
        error_kind=kind,
        error_detail=detail,
        ended=scheduled,
    )


def test_every_figure_of_equal_requests_is_their_own():
    result = summarize(
        make_run([streamed(index, scheduled=0.1 * index) for index in range(20)], arrival="closed", window=(0.0, 4.0))
    )
    assert result.ttft_seconds.p50 == pytest.approx(0.1)
    assert result.ttft_seconds.p999 == pytest.approx(0.1)
    assert result.tbt_seconds.count == 200
    assert result.tbt_seconds.p99 == pytest.approx(GAP)
    assert result.tpot_seconds.mean == pytest.approx(GAP)
    assert result.worst_tbt_seconds.max == pytest.approx(GAP)
    assert result.e2e_seconds.mean == pytest.approx(0.1 + 10 * GAP)
    assert (result.output_tokens, result.prompt_tokens) == (220, 2000)
    assert result.output_tokens_per_second == pytest.approx(55.0)
    assert result.requests_per_second == pytest.approx(5.0)
    assert result.goodput == 1.0
    assert result.token_counts == "exact"
    assert result.ttft_from_due_seconds is None
    assert set(result.ttft_seconds.ci95) == {"mean", "p50", "p90", "p99", "p999"}


def test_merged_events_are_one_gap_and_zeros_per_token_and_one_gap_per_chunk():
    """Events of four tokens each 80 ms: a token each 20 ms, as tools that hide merging say, and a text each 80 ms, as read."""
    record = streamed(0, gaps=[0.08] * 4, usage=20)
    result = summarize(make_run([record]))
    assert result.token_counts == "apportioned"
    assert result.tbt_chunk_seconds.count == 4
    assert result.tbt_chunk_seconds.mean == pytest.approx(0.08)
    assert result.tbt_seconds.count == 19
    assert result.tbt_seconds.p50 == 0.0
    assert result.tbt_seconds.max == pytest.approx(0.08)
    assert result.tpot_seconds.mean == pytest.approx(0.32 / 19)
    assert any("several tokens (mean 4.00)" in sentence for sentence in result.warnings)


def test_worst_tbt_is_the_mean_of_the_largest_tenth():
    timings = timings_of(streamed(0, gaps=[0.01] * 18 + [0.5, 0.3]), is_open_loop=False)
    assert timings is not None
    assert timings.worst_tbt == pytest.approx(0.4)  # two of twenty
    few = timings_of(streamed(0, gaps=[0.01, 0.2, 0.01]), is_open_loop=False)
    assert few is not None
    assert few.worst_tbt == pytest.approx(0.2)  # one at least


def test_one_token_has_no_gap_and_can_be_good():
    result = summarize(make_run([streamed(0, num_tokens=1)]))
    assert (result.tbt_seconds.count, result.tpot_seconds.count, result.worst_tbt_seconds.count) == (0, 0, 0)
    assert result.goodput == 1.0


def test_a_whole_answer_has_no_gaps():
    record = streamed(0, num_tokens=1, is_stream=False, output_tokens=64, ttft=1.2)
    result = summarize(make_run([record]))
    assert (result.tbt_seconds.count, result.tpot_seconds.count) == (0, 0)
    assert result.output_tokens == 64
    assert result.ttft_seconds.p50 == pytest.approx(1.2)
    assert result.e2e_seconds.p50 == pytest.approx(1.2)


def test_refused_failed_and_unfinished_are_in_the_denominator():
    """A server that refuses looks fast: its percentiles are of the others only, so goodput counts them all."""
    records = [streamed(index) for index in range(6)]
    records += [lost(6, Outcome.REFUSED, kind="http_429"), lost(7, Outcome.REFUSED, kind="http_503")]
    records += [lost(8, Outcome.FAILED, kind="cut"), lost(9, Outcome.UNFINISHED)]
    result = summarize(make_run(records, window=(0.0, 2.0)))
    assert (result.requests.offered, result.requests.completed, result.requests.refused, result.requests.failed) == (
        10,
        6,
        2,
        2,
    )
    assert result.goodput == pytest.approx(0.6)
    assert result.goodput_targets[0].per_second == pytest.approx(3.0)
    assert result.errors == {"http_429": 1, "http_503": 1, "cut": 1, "unfinished": 1}
    assert "2 refused and 2 failed, 1 of these unfinished" in result.warnings[0]


def test_what_was_said_of_the_first_error_of_each_kind_is_kept():
    records = [
        lost(0, Outcome.FAILED, scheduled=0.3, kind="cut", detail="later"),
        lost(1, Outcome.FAILED, scheduled=0.2, kind="cut", detail="sooner"),
        lost(2, Outcome.FAILED, scheduled=0.1, kind="cut"),
        lost(3, Outcome.UNFINISHED, scheduled=0.2),
        lost(4, Outcome.REFUSED, scheduled=0.4, kind="http_503", detail="full"),
        lost(5, Outcome.REFUSED, scheduled=9.0, kind="http_429", detail="outside the window"),
    ]
    result = summarize(make_run(records, window=(0.0, 2.0)))
    assert result.errors == {"cut": 3, "unfinished": 1, "http_503": 1}
    assert result.first_errors == {"cut": "sooner", "http_503": "full"}


def test_goodput_needs_both_limits_and_right_usage():
    strict = GoodputTarget(name="own", ttft_seconds=0.15, tbt_seconds=0.03)
    records = [
        streamed(0),
        streamed(1, ttft=0.2),
        streamed(2, gaps=[GAP] * 9 + [0.1]),
        streamed(3, usage=4),  # eleven events
    ]
    result = summarize(make_run(records), [strict, *DEFAULT_TARGETS])
    assert result.goodput == pytest.approx(0.25)
    assert result.usage_mismatches == 1
    assert any("usage cannot be right" in sentence for sentence in result.warnings)
    assert {target.name for target in result.goodput_targets} == {"own", "mlperf", "mlperf-interactive"}


def test_a_late_client_is_told_and_its_lateness_counts_against_goodput():
    """Coordinated omission: from sending all is well; who was due two seconds ago has waited two seconds."""
    records = [streamed(index, scheduled=0.1 * index, lag=2.5) for index in range(20)]
    result = summarize(make_run(records, arrival="poisson"))
    assert result.ttft_seconds.p99 == pytest.approx(0.1)
    assert result.ttft_from_due_seconds is not None
    assert result.ttft_from_due_seconds.p99 == pytest.approx(2.6)
    assert result.goodput == 0.0
    assert any("sent late" in sentence for sentence in result.warnings)
    assert summarize(make_run(records, arrival="closed")).goodput == 1.0


def test_rates_are_of_what_arrives_within_the_window():
    """An overloaded open loop: ten requests a second offered, each answered five seconds later."""
    records = [streamed(index, scheduled=0.1 * index, ttft=5.0, gaps=[0.0] * 9) for index in range(100)]
    result = summarize(make_run(records, window=(2.0, 8.0)))
    assert result.offered_per_second == pytest.approx(10.0)
    assert result.requests_per_second == pytest.approx(5.0, rel=0.05)  # the first answer comes at 5 s: half the window is empty
    assert result.output_tokens_per_second == pytest.approx(50.0, rel=0.05)
    assert result.requests.offered == 60


def test_tokens_still_running_at_the_end_count_as_far_as_they_came():
    whole = streamed(0, gaps=[0.05] * 9, usage=20)  # two tokens an event
    running = streamed(1, gaps=[0.05] * 4, usage=None, outcome=Outcome.UNFINISHED, ended=None, finish_reasons=[])
    result = summarize(make_run([whole, running], window=(0.0, 1.0)))
    assert result.output_tokens_per_second == pytest.approx(20 + 5 * 2)
    assert result.output_tokens == 20


def test_failed_answers_give_no_throughput():
    result = summarize(make_run([streamed(0), streamed(1, outcome=Outcome.FAILED, error_kind="cut")], window=(0.0, 1.0)))
    assert result.output_tokens_per_second == pytest.approx(11.0)
    assert result.ttft_seconds.count == 1


def test_groups_have_figures_of_their_own():
    records = [streamed(index, group="fast", ttft=0.05) for index in range(10)]
    records += [streamed(10 + index, group="slow", ttft=0.5) for index in range(5)]
    result = summarize(make_run(records))
    assert set(result.groups) == {"fast", "slow"}
    assert result.groups["fast"].ttft_seconds.p50 == pytest.approx(0.05)
    assert result.groups["slow"].requests.offered == 5
    assert result.groups["slow"].groups == {}
    rates = [group.output_tokens_per_second for group in result.groups.values()]
    assert sum(rates) == pytest.approx(result.output_tokens_per_second)


def test_warm_up_and_cool_down_are_left_out():
    records = [streamed(index, scheduled=float(index), ttft=9.0 if index in (0, 9) else 0.1) for index in range(10)]
    result = summarize(make_run(records, window=(1.0, 9.0)))
    assert result.ttft_seconds.max == pytest.approx(0.1)
    assert result.requests.offered == 8


def test_no_usage_is_said():
    result = summarize(make_run([streamed(0, usage=None)]))
    assert result.token_counts == "chunks"
    assert result.output_tokens == 11
    assert any("without usage" in sentence for sentence in result.warnings)


def test_role_chunks_do_not_make_a_first_token_and_are_told():
    records = [streamed(index, ttft=0.5, first_event_at=0.01) for index in range(30)]
    result = summarize(make_run(records))
    assert result.ttft_seconds.p50 == pytest.approx(0.5)
    assert result.first_event_seconds.p50 == pytest.approx(0.01)
    assert any("event without text 490.0 ms ahead" in sentence for sentence in result.warnings)


def test_warnings_are_loudest_first_and_absent_from_a_good_run():
    records = [
        streamed(index, scheduled=0.01 * index, target_prompt_tokens=100, target_output_tokens=11) for index in range(2000)
    ]
    assert summarize(make_run(records)).warnings == []
    run = make_run([*records[:3], lost(9, Outcome.FAILED, kind="cut")])
    run.client = quiet_client(was_bottleneck=True, why="process 1 used 97 % of its core")
    warnings = summarize(run).warnings
    assert warnings[0].startswith("The client was the bottleneck")
    assert "97 %" in warnings[0]
    assert warnings[1].startswith("0 refused and 1 failed")
    assert warnings[-1].startswith("3 requests are few")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target_output_tokens": 64}, "Answers are shorter than asked: 11 tokens in the mean, not 64"),
        ({"target_prompt_tokens": 50}, "Prompts had 100 tokens in the mean by the server's count, not the 50 meant"),
        ({"cached_tokens": 80}, "80% of prompt tokens came from the server's prefix cache, although they were salted"),
        ({"chunk_times": [], "chunk_chars": []}, "5 of 5 completed answers held no text at all"),
    ],
)
def test_what_flatters_or_deviates_is_told(changes, told):
    result = summarize(make_run([streamed(index, **changes) for index in range(5)]))
    assert any(sentence.startswith(told) for sentence in result.warnings), result.warnings


def test_nothing_measured_is_said_and_does_not_fail():
    result = summarize(make_run([], window=(0.0, 1.0)))
    assert result.warnings[0] == "No request was scheduled within the measured window."
    assert (result.goodput, result.requests.offered, result.ttft_seconds.p50) == (0.0, 0, None)
    failed = summarize(make_run([lost(0, Outcome.FAILED, kind="connect")], window=(0.0, 1.0)))
    assert failed.warnings[0] == "None of 1 requests completed (connect 1)."


def test_an_empty_window_and_missing_targets_are_refused():
    with pytest.raises(ValueError, match="window is empty"):
        summarize(make_run([], window=(1.0, 1.0)))
    with pytest.raises(ValueError, match="target"):
        summarize(make_run([streamed(0)]), [])


def test_connections_are_reported_apart():
    result = summarize(make_run([streamed(0, connect_seconds=0.03), streamed(1)]))
    assert result.connect_seconds is not None
    assert (result.connect_seconds.count, result.connect_seconds.p50) == (1, pytest.approx(0.03))
    assert result.ttft_seconds.max == pytest.approx(0.1)


def test_a_large_run_is_summed_up_quickly():
    records = [streamed(index, scheduled=0.001 * index, num_tokens=64) for index in range(5000)]
    run = make_run(records)
    begun = time.process_time()
    summarize(run)
    assert time.process_time() - begun < 4.0

"""A queue that grows without end, and queues that only wander."""

import heapq
import random

import pytest

from headrace.loadtest.detection import find_over_saturation
from headrace.loadtest.records import Outcome, RequestRecord
from tests.loadtest.stats.simulated_server import make_run


def queue_run(load_share, *, seconds=60.0, num_servers=8, seed=0, max_queue=None, arrival="poisson"):
    """M/M/k, first come first served, mean service of 1 s. `max_queue`: who finds more waiting is refused."""
    source = random.Random(seed)
    free = [0.0] * num_servers
    now, records = 0.0, []
    while (now := now + source.expovariate(load_share * num_servers)) < seconds:
        if max_queue is not None and free[0] > now + max_queue / num_servers:
            records.append(
                RequestRecord(
                    index=len(records), process=0, scheduled=now, sent=now, ended=now + 0.001, outcome=Outcome.REFUSED
                )
            )
            continue
        begin = max(heapq.heappop(free), now)
        service = source.expovariate(1.0)
        heapq.heappush(free, begin + service)
        records.append(
            RequestRecord(
                index=len(records),
                process=0,
                scheduled=now,
                sent=now,
                chunk_times=[begin + 0.1 * service, begin + service],
                chunk_chars=[4, 4],
                ended=begin + service,
                outcome=Outcome.COMPLETED,
                prompt_tokens=10,
                output_tokens=2,
            )
        )
    return make_run(records, window=(0.0, seconds), arrival=arrival)


@pytest.mark.parametrize("load_share", [1.5, 2.5])
def test_more_than_the_server_can_is_found(load_share):
    findings = [find_over_saturation(queue_run(load_share, seed=seed)) for seed in range(15)]
    assert all(finding.found for finding in findings)
    assert "Over-saturated" in findings[0].sentence
    assert findings[0].evidence["ttft_slope_low"] > 0.0


@pytest.mark.parametrize("load_share", [0.4, 0.8, 0.95])
def test_a_queue_below_full_load_wanders_and_is_not_called_saturated(load_share):
    """At 95 % the queue is long and swings: slopes alone would call a quarter of such runs over-saturated."""
    findings = [find_over_saturation(queue_run(load_share, seed=seed)) for seed in range(40)]
    assert all(finding.is_judged for finding in findings)
    assert sum(finding.found for finding in findings) <= 2
    assert "Not over-saturated" in findings[0].sentence


def test_a_server_that_sheds_does_not_over_saturate():
    findings = [find_over_saturation(queue_run(2.0, seed=seed, max_queue=8)) for seed in range(10)]
    assert not any(finding.found for finding in findings)


def test_a_closed_loop_and_a_short_run_are_not_judged():
    closed = find_over_saturation(queue_run(2.0, arrival="closed"))
    assert not closed.is_judged
    assert "closed loop" in closed.sentence
    short = find_over_saturation(queue_run(2.0, seconds=20.0))
    assert not short.is_judged
    assert "20 s" in short.sentence


def test_requests_without_an_end_or_text_do_not_break_it():
    run = queue_run(2.0)
    for record in run.requests[-50:]:
        record.chunk_times, record.ended, record.outcome = [], None, Outcome.UNFINISHED
    assert find_over_saturation(run).found

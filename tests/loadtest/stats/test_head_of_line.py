"""Head-of-line blocking on servers that are known to block, and on ones that are known not to."""

import random

import numpy as np
import pytest

from headrace.loadtest.detection import (
    find_head_of_line,
    find_prefill_stalls,
    find_short_prompt_tails,
    find_ttft_behind_queue,
)
from headrace.loadtest.head_of_line import tokens_ahead
from headrace.loadtest.records import Outcome, RequestRecord
from tests.loadtest.stats.simulated_server import make_run, mixed_lengths, poisson_arrivals, simulate

WHOLE_PROMPTS = 1_000_000  # tokens a step: nothing is split


@pytest.mark.parametrize("rate", [3.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_computed_whole_are_named_as_blocking_streams(rate, seed):
    verdict = find_head_of_line(
        simulate(poisson_arrivals(rate, 60.0, mixed_lengths, seed), token_budget=WHOLE_PROMPTS, seed=seed)
    )
    assert verdict.found
    assert verdict.stops_streams
    assert verdict.sentence.startswith("Head-of-line blocking")
    stalls = verdict.signs[0]
    assert stalls.evidence["stall_seconds"] == pytest.approx(0.4, rel=0.2)  # 2000 tokens of 0.2 ms
    assert stalls.evidence["single_gap_share_of_prefill"] > 0.9


@pytest.mark.parametrize("rate", [3.0, 6.0])
@pytest.mark.parametrize("seed", range(3))
def test_split_prompts_are_named_as_not_blocking_streams(rate, seed):
    """The same load, prompts in chunks: streams are slower while one is computed, and go on."""
    verdict = find_head_of_line(simulate(poisson_arrivals(rate, 60.0, mixed_lengths, seed), token_budget=256, seed=seed))
    assert not verdict.stops_streams
    stalls = verdict.signs[0]
    assert stalls.is_judged
    assert "split" in stalls.sentence
    assert stalls.evidence["single_gap_share_of_prefill"] < 0.4


def test_split_prompts_with_a_shared_budget_block_nobody():
    run = simulate(poisson_arrivals(3.0, 60.0, mixed_lengths, 1), token_budget=256, shares_budget=True)
    verdict = find_head_of_line(run)
    assert verdict.is_judged
    assert not verdict.found
    assert verdict.sentence.startswith("No head-of-line blocking seen.")


def test_short_prompts_that_wait_for_long_ones_are_named():
    """One row at a time would be worst; here prompts are taken in order, and a long one holds up what came after it."""

    def lengths(source):
        return (4000, 2) if source.random() < 0.12 else (40, 2)

    blocked = find_head_of_line(simulate(poisson_arrivals(2.5, 120.0, lengths, 2), token_budget=256))
    assert blocked.delays_waiting
    assert [sign.found for sign in blocked.signs[1:]] == [True, True]
    free = find_head_of_line(simulate(poisson_arrivals(2.5, 120.0, lengths, 2), token_budget=256, shares_budget=True))
    assert not free.delays_waiting


def completed(index, sent, times, prompt_tokens):
    return RequestRecord(
        index=index,
        process=0,
        scheduled=sent,
        sent=sent,
        chunk_times=times,
        chunk_chars=[4] * len(times),
        ended=times[-1],
        outcome=Outcome.COMPLETED,
        prompt_tokens=prompt_tokens,
        output_tokens=len(times),
    )


def free_run(seed, *, num_streams=8, num_long=40, seconds=60.0):
    """Steady streams with rare hiccups, and long prompts that have nothing to do with them."""
    source = random.Random(seed)
    records = []
    for index in range(num_streams):
        times, now = [], 0.1
        while now < seconds:
            times.append(now)
            now += 0.4 if source.random() < 0.01 else source.uniform(0.009, 0.011)
        records.append(completed(index, 0.0, times, 50))
    for index in range(num_streams, num_streams + num_long):
        sent = source.uniform(1.0, seconds - 2.0)
        first = sent + source.uniform(0.3, 0.5)
        records.append(completed(index, sent, [first, first + 0.01], 2000))
    return make_run(records)


def test_hiccups_that_only_happen_are_not_blamed_on_prompts():
    findings = [find_prefill_stalls(free_run(seed)) for seed in range(30)]
    assert all(finding.is_judged for finding in findings)
    assert not any(finding.found for finding in findings)


def independent_run(seed, count=200):
    """TTFT of prompts of all lengths, drawn apart from everything else."""
    source = np.random.default_rng(seed)
    sent = np.cumsum(source.exponential(0.05, count))
    records = []
    for index in range(count):
        first = float(sent[index] + source.exponential(0.2))
        records.append(completed(index, float(sent[index]), [first], int(source.lognormal(6.0, 1.0)) + 1))
    return make_run(records)


def test_independent_ttft_shows_no_sign():
    """False positives: of a hundred runs without any blocking, hardly one is called blocked by either sign, none by both."""
    behind = tails = both = 0
    for seed in range(100):
        run = independent_run(seed)
        first, second = find_ttft_behind_queue(run), find_short_prompt_tails(run)
        assert first.is_judged
        behind += first.found
        tails += second.found
        both += first.found and second.found
    assert behind <= 3
    assert tails <= 5
    assert both == 0


def test_tokens_ahead_are_of_those_sent_before_and_without_text():
    def request(index, sent, first, tokens):
        return RequestRecord(
            index=index,
            process=0,
            scheduled=sent,
            sent=sent,
            chunk_times=[] if first is None else [first],
            prompt_tokens=tokens,
        )

    records = [request(0, 0.0, 1.0, 100), request(1, 0.5, 3.0, 10), request(2, 0.6, None, 1), request(3, 9.0, 10.0, 1000)]
    assert tokens_ahead(records, [0.0, 0.5, 0.7, 2.0, 5.0], 20.0).tolist() == [0.0, 100.0, 111.0, 11.0, 1.0]


def test_what_cannot_be_told_is_said_so():
    empty = make_run([], window=(0.0, 1.0))
    verdict = find_head_of_line(empty)
    assert not verdict.is_judged
    assert not verdict.found
    assert verdict.sentence.startswith("Head-of-line blocking cannot be told")
    whole = simulate(poisson_arrivals(3.0, 30.0, mixed_lengths, 0), token_budget=WHOLE_PROMPTS)
    for record in whole.requests:
        record.is_stream, record.chunk_times, record.chunk_chars = False, record.chunk_times[-1:], [100]
    assert not find_head_of_line(whole).is_judged
    alike = simulate(poisson_arrivals(3.0, 60.0, lambda _: (300, 20), 0), token_budget=WHOLE_PROMPTS)
    tails = find_short_prompt_tails(alike)
    assert not tails.is_judged
    assert "too alike" in tails.sentence


def test_lengths_that_were_meant_stand_in_for_missing_usage():
    run = simulate(poisson_arrivals(6.0, 60.0, mixed_lengths, 0), token_budget=WHOLE_PROMPTS)
    with_usage = find_prefill_stalls(run)
    for record in run.requests:
        record.target_prompt_tokens, record.prompt_tokens = record.prompt_tokens, None
    assert find_prefill_stalls(run) == with_usage

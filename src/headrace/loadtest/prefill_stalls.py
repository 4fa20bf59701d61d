"""Do running streams stand still while another request's long prompt is computed? Told from gaps and first tokens alone.

Owns: find_prefill_stalls. Runs in: load tool. Must not know: how verdicts are shown.
A server that computes a prompt in one step ends one long silence of all its streams with that prompt's first token. One that
splits prompts shows several shorter gaps in that time, each a part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.loadtest.records import RequestRecord, Run
from headrace.loadtest.verdicts import Finding, long_prompt_tokens, milliseconds, num_prompt_tokens

Floats = npt.NDArray[np.float64]

MIN_STREAM_GAPS = 10  # a stream with fewer has no usual gap
MIN_PREFILLS = 3
MAX_PREFILLS = 300  # evenly chosen from more
MIN_STALL_FACTOR = 5.0  # times the usual gap
MIN_SINGLE_SHARE = 0.6  # of the time a prompt was computed, that one silence took: two equal chunks make 0.5
MAX_CHANCE = 0.05
_NUM_SHIFTS = 100


@dataclass(frozen=True, slots=True)
class _Stream:
    """A running stream: the arrival of each text."""

    index: int
    times: Floats


@dataclass(frozen=True, slots=True)
class _Prefill:
    """When a long prompt was computed, as seen from outside: from its sending, or the first token of the long prompt before."""

    index: int
    begin: float
    end: float


def find_prefill_stalls(run: Run) -> Finding:
    """Found when three things hold together, else a sentence on what prefills do to running streams.

    1. While long prompts were computed, the longest gap of running streams was in the median at least 5 usual gaps;
    2. that one gap took at least 60 % of the time the prompt was computed: it was not split;
    3. large gaps lie on such times more often than when these times are moved around (circular shifts, p < 0.05).
    """
    name = "prefill-stalls"
    streams = _steady_streams(run)
    if not streams:
        return Finding.not_judged(name, f"No stream had {MIN_STREAM_GAPS} gaps: stalls of running streams cannot be told.")
    usual_gap = float(np.median(np.concatenate([np.diff(stream.times) for stream in streams])))
    prefills = _long_prefills(run, usual_gap)
    pauses = [pause for prefill in prefills if (pause := _longest_pause(prefill, streams)) is not None]
    if len(pauses) < MIN_PREFILLS:
        return Finding.not_judged(
            name,
            f"Only {len(pauses)} long prompts were computed beside running streams: it takes {MIN_PREFILLS} to tell of stalls.",
            {"num_prefills": float(len(pauses))},
        )
    stall = float(np.median([length for length, _ in pauses]))
    single_share = float(np.median([share for _, share in pauses]))
    overlap, chance, chance_share = _coincidence(run, streams, prefills, MIN_STALL_FACTOR * usual_gap)
    is_large = stall >= MIN_STALL_FACTOR * usual_gap
    is_single = single_share >= MIN_SINGLE_SHARE
    evidence = {
        "usual_gap_seconds": usual_gap,
        "stall_seconds": stall,
        "stall_factor": stall / usual_gap if usual_gap > 0 else 0.0,
        "single_gap_share_of_prefill": single_share,
        "large_gaps_in_prefills_share": overlap,
        "large_gaps_in_prefills_share_by_chance": chance_share,
        "chance": chance,
        "num_prefills": float(len(pauses)),
    }
    found = is_large and is_single and chance < MAX_CHANCE
    told = (
        f"While {len(pauses)} long prompts were computed, running streams paused for {milliseconds(stall)} in the median "
        f"(usual gap {milliseconds(usual_gap)}), {single_share:.0%} of the time each prompt took"
    )
    if found:
        end = ": each was computed in one piece and nothing else moved."
    elif not is_large:
        end = ": prompts hardly hold up running streams."
    elif not is_single:
        end = ": prompts slow running streams, but are split so that these move on in between."
    else:
        end = f": but large gaps fall on other times as often (chance {chance:.2f})."
    return Finding(name=name, found=found, is_judged=True, evidence=evidence, sentence=told + end)


def _steady_streams(run: Run) -> list[_Stream]:
    return [
        _Stream(record.index, np.asarray(record.chunk_times, dtype=np.float64))
        for record in run.requests
        if record.is_stream and len(record.chunk_times) > MIN_STREAM_GAPS
    ]


def _long_prefills(run: Run, usual_gap: float) -> list[_Prefill]:
    """Of measured requests with long prompts, in order of their first tokens."""
    known: list[tuple[RequestRecord, int]] = [
        (record, tokens)
        for record in run.requests
        if record.is_stream and record.chunk_times and (tokens := num_prompt_tokens(record)) is not None
    ]
    if not known:
        return []
    long_from = long_prompt_tokens([tokens for _, tokens in known])
    long = [record for record, tokens in known if tokens >= long_from]
    firsts = np.sort([record.chunk_times[0] for record in long])
    same_step = max(2.0 * usual_gap, 0.002)  # first tokens this near came from one step
    prefills = []
    for record in long:
        if not run.window_begin <= record.scheduled < run.window_end:
            continue
        first = record.chunk_times[0]
        place = int(np.searchsorted(firsts, first - same_step))
        begin = max(record.sent, float(firsts[place - 1])) if place else record.sent
        if begin < first:
            prefills.append(_Prefill(record.index, begin, first))
    prefills.sort(key=lambda prefill: prefill.end)
    if len(prefills) > MAX_PREFILLS:
        prefills = [prefills[round(place)] for place in np.linspace(0, len(prefills) - 1, MAX_PREFILLS)]
    return prefills


def _longest_pause(prefill: _Prefill, streams: Sequence[_Stream]) -> tuple[float, float] | None:
    """(longest gap, its share of the prefill's time), each the median over streams that ran all along. None: none did."""
    lengths, shares = [], []
    for stream in streams:
        times = stream.times
        if stream.index == prefill.index or times[0] > prefill.begin or times[-1] < prefill.end:
            continue
        low = max(0, int(np.searchsorted(times, prefill.begin, side="right")) - 1)
        high = min(len(times) - 1, int(np.searchsorted(times, prefill.end, side="left")))
        around = times[low : high + 1]
        if len(around) < 2:
            continue
        gaps = np.diff(around)
        inside = np.minimum(around[1:], prefill.end) - np.maximum(around[:-1], prefill.begin)
        largest = int(np.argmax(inside))
        lengths.append(float(gaps[largest]))
        shares.append(float(inside[largest]) / (prefill.end - prefill.begin))
    return (float(np.median(lengths)), float(np.median(shares))) if lengths else None


def _coincidence(
    run: Run, streams: Sequence[_Stream], prefills: Sequence[_Prefill], large_seconds: float
) -> tuple[float, float, float]:
    """(share of large gaps that meet a prefill, how often shifted prefills met as many, mean share of those)."""
    starts = np.concatenate([stream.times[:-1] for stream in streams])
    ends = np.concatenate([stream.times[1:] for stream in streams])
    is_large = (ends - starts) >= large_seconds
    starts, ends = starts[is_large], ends[is_large]
    if len(starts) == 0:
        return 0.0, 1.0, 0.0
    begins = np.array([prefill.begin for prefill in prefills])
    lengths = np.array([prefill.end - prefill.begin for prefill in prefills])
    observed = _share_met(starts, ends, begins, begins + lengths)
    origin, span = run.window_begin, max(run.window_end, float((begins + lengths).max())) - run.window_begin
    generator = np.random.default_rng([run.settings.seed, 3])
    shifted = []
    for shift in generator.uniform(0.05, 0.95, _NUM_SHIFTS) * span:
        moved = origin + (begins - origin + shift) % span
        shifted.append(_share_met(starts, ends, moved, moved + lengths))
    as_many = sum(share >= observed for share in shifted)
    return observed, (as_many + 1) / (_NUM_SHIFTS + 1), float(np.mean(shifted))


def _share_met(starts: Floats, ends: Floats, begins: Floats, finishes: Floats) -> float:
    """Share of the intervals [start, end] that overlap any of [begin, finish]."""
    order = np.argsort(begins)
    latest_finish = np.maximum.accumulate(finishes[order])
    place = np.searchsorted(begins[order], ends, side="left")  # intervals that begin before the gap ends
    meets = (place > 0) & (latest_finish[np.maximum(place - 1, 0)] > starts)
    return float(meets.mean())

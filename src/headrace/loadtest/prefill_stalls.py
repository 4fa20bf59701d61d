"""Do running streams stand still while another request's long prompt is computed? Told from gaps and first tokens alone.

Owns: find_prefill_stalls. Runs in: load tool. Must not know: how verdicts are shown.
A server that computes a prompt in one step ends one long silence of all its streams with that prompt's first token. One that
splits prompts shows several shorter gaps in that time, each a part of it.
"""

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
_NUM_TRIALS = 99
_MAX_TRIED_PREFILLS = 30  # evenly chosen from more
_MAX_STREAMS_BESIDE = 16  # looked at for one prefill, evenly chosen from more


@dataclass(frozen=True, slots=True)
class _Streams:
    """Streams with enough gaps: the arrivals of each one's texts."""

    indices: npt.NDArray[np.int64]
    times: list[Floats]
    firsts: Floats
    lasts: Floats

    def beside(self, prefill: "_Prefill") -> list[Floats]:
        """Arrivals of those that ran all along while the prompt was computed; some of them when they are many."""
        running = np.flatnonzero((self.firsts <= prefill.begin) & (self.lasts >= prefill.end) & (self.indices != prefill.index))
        if len(running) > _MAX_STREAMS_BESIDE:
            running = running[np.linspace(0, len(running) - 1, _MAX_STREAMS_BESIDE).round().astype(int)]
        return [self.times[place] for place in running]


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
    3. it is not so at other times: laid anywhere in the streams' lives, as long a time is filled by one gap as much in fewer
       than 5 % of trials.
    """
    name = "prefill-stalls"
    streams = _steady_streams(run)
    if not streams.times:
        return Finding.not_judged(name, f"No stream had {MIN_STREAM_GAPS} gaps: stalls of running streams cannot be told.")
    usual_gap = float(np.median(np.concatenate([np.diff(times) for times in streams.times])))
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
    overlap, overlap_by_chance = _coincidence(run, streams, prefills, MIN_STALL_FACTOR * usual_gap)
    chance = _chance(run, streams, prefills, single_share)
    is_large = stall >= MIN_STALL_FACTOR * usual_gap
    is_single = single_share >= MIN_SINGLE_SHARE
    evidence = {
        "usual_gap_seconds": usual_gap,
        "stall_seconds": stall,
        "stall_factor": stall / usual_gap if usual_gap > 0 else 0.0,
        "single_gap_share_of_prefill": single_share,
        "large_gaps_in_prefills_share": overlap,
        "large_gaps_in_prefills_share_by_chance": overlap_by_chance,
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
        end = f": but they pause as long at other times (chance {chance:.2f})."
    return Finding(name=name, found=found, is_judged=True, evidence=evidence, sentence=told + end)


def _steady_streams(run: Run) -> _Streams:
    steady = [record for record in run.requests if record.is_stream and len(record.chunk_times) > MIN_STREAM_GAPS]
    times = [np.asarray(record.chunk_times, dtype=np.float64) for record in steady]
    return _Streams(
        indices=np.array([record.index for record in steady], dtype=np.int64),
        times=times,
        firsts=np.array([arrivals[0] for arrivals in times]),
        lasts=np.array([arrivals[-1] for arrivals in times]),
    )


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
    return _thinned(prefills, MAX_PREFILLS)


def _thinned(prefills: list[_Prefill], at_most: int) -> list[_Prefill]:
    if len(prefills) <= at_most:
        return prefills
    return [prefills[round(place)] for place in np.linspace(0, len(prefills) - 1, at_most)]


def _longest_pause(prefill: _Prefill, streams: _Streams) -> tuple[float, float] | None:
    """(longest gap, its share of the prefill's time), each the median over streams that ran all along. None: none did."""
    lengths, shares = [], []
    for times in streams.beside(prefill):
        low = max(0, int(np.searchsorted(times, prefill.begin, side="right")) - 1)
        high = min(len(times) - 1, int(np.searchsorted(times, prefill.end, side="left")))
        around = times[low : high + 1]
        if len(around) < 2:
            continue
        inside = np.minimum(around[1:], prefill.end) - np.maximum(around[:-1], prefill.begin)
        largest = int(np.argmax(inside))
        lengths.append(float(around[largest + 1] - around[largest]))
        shares.append(float(inside[largest]) / (prefill.end - prefill.begin))
    return (float(np.median(lengths)), float(np.median(shares))) if lengths else None


def _chance(run: Run, streams: _Streams, prefills: list[_Prefill], observed_share: float) -> float:
    """How often one gap fills as much of as long a time elsewhere: each prefill's time is laid anywhere in each stream's life.

    A trial counts when half of the prefills, by half of the streams beside each, look as single as the true ones do.
    """
    generator = np.random.default_rng([run.settings.seed, 4])
    votes = []
    for prefill in _thinned(prefills, _MAX_TRIED_PREFILLS):
        beside = streams.beside(prefill)
        if not beside:
            continue
        places = generator.uniform(0.0, 1.0, _NUM_TRIALS)
        seconds = prefill.end - prefill.begin
        as_single = [_fills(times, places, seconds, observed_share) for times in beside]
        votes.append(np.mean(as_single, axis=0) >= 0.5)
    num_as_single = int((np.mean(votes, axis=0) >= 0.5).sum())
    return (num_as_single + 1) / (_NUM_TRIALS + 1)


def _fills(times: Floats, places: Floats, seconds: float, share: float) -> npt.NDArray[np.bool_]:
    """Whether one gap fills `share` of the time, for each place (0..1) of it within the stream's life."""
    gaps = np.diff(times)
    large = np.flatnonzero(gaps >= share * seconds)
    begins = times[0] + places * max(0.0, float(times[-1] - times[0]) - seconds)
    inside = np.minimum(times[large + 1][:, None], begins + seconds) - np.maximum(times[large][:, None], begins)
    filled: npt.NDArray[np.bool_] = (inside >= share * seconds).any(axis=0)
    return filled


def _coincidence(run: Run, streams: _Streams, prefills: list[_Prefill], large_seconds: float) -> tuple[float, float]:
    """Share of large gaps that meet a prefill: (as they are, mean over prefills moved around the window)."""
    starts = np.concatenate([times[:-1] for times in streams.times])
    ends = np.concatenate([times[1:] for times in streams.times])
    is_large = (ends - starts) >= large_seconds
    starts, ends = starts[is_large], ends[is_large]
    if len(starts) == 0:
        return 0.0, 0.0
    begins = np.array([prefill.begin for prefill in prefills])
    lengths = np.array([prefill.end - prefill.begin for prefill in prefills])
    origin = run.window_begin
    span = max(run.window_end, float((begins + lengths).max())) - origin
    generator = np.random.default_rng([run.settings.seed, 3])
    moved = [origin + (begins - origin + shift) % span for shift in generator.uniform(0.05, 0.95, _NUM_TRIALS) * span]
    by_chance = [_share_met(starts, ends, begin, begin + lengths) for begin in moved]
    return _share_met(starts, ends, begins, begins + lengths), float(np.mean(by_chance))


def _share_met(starts: Floats, ends: Floats, begins: Floats, finishes: Floats) -> float:
    """Share of the gaps [start, end] that overlap any [begin, finish]."""
    order = np.argsort(begins)
    latest_finish = np.maximum.accumulate(finishes[order])
    place = np.searchsorted(begins[order], ends, side="left")  # intervals that begin before the gap ends
    meets = (place > 0) & (latest_finish[np.maximum(place - 1, 0)] > starts)
    return float(meets.mean())

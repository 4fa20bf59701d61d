"""What the shape of figures gives away: the knee of a sweep, and a queue that grows without end.

Owns: find_knee, find_over_saturation. Runs in: load tool. Must not know: how verdicts are shown.
Signs of head-of-line blocking are in head_of_line.py and named here too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.loadtest.head_of_line import (
    BlockingVerdict,
    find_head_of_line,
    find_short_prompt_tails,
    find_ttft_behind_queue,
)
from headrace.loadtest.prefill_stalls import find_prefill_stalls
from headrace.loadtest.records import Outcome, RequestRecord, Run
from headrace.loadtest.statistics import Regression, regress
from headrace.loadtest.verdicts import Finding

__all__ = [
    "BlockingVerdict",
    "Finding",
    "KneeVerdict",
    "SweepPoint",
    "find_head_of_line",
    "find_knee",
    "find_over_saturation",
    "find_prefill_stalls",
    "find_short_prompt_tails",
    "find_ttft_behind_queue",
]

Floats = npt.NDArray[np.float64]

MIN_KNEE_POINTS = 4
MAX_TAIL_SLOPE_SHARE = 0.25  # of the slope before the knee
MIN_ERROR_CUT = 0.50  # of the squared error of one straight line
MIN_KNEE_PEAK_SHARE = 0.85  # of the highest throughput of all points
MIN_KNEE_RISE_SHARE = 0.20  # of the highest throughput, from the lowest load to the knee: less is noise around a flat line
_NUM_BREAK_CANDIDATES = 400

MIN_SATURATION_SECONDS = 30.0
MAX_SATURATION_SECONDS = 120.0  # the last so many seconds are looked at
NUM_BATCHES = 10  # means over tenths of the time: neighbours in a queue are alike, means of long stretches hardly
MIN_GROWTH_SHARE = 1.0  # of the mean, that the fitted line must rise by
MIN_SATURATION_REQUESTS = 40
MIN_BACKLOG_DEVIATIONS = 2.0  # growth of the backlog, in standard deviations of chance at exactly full load


class SweepPoint(NamedTuple):
    """One level of a sweep: clients or offered requests/s, and what came of it."""

    load: float
    tokens_per_second: float


class KneeVerdict(msgspec.Struct, kw_only=True, frozen=True):
    """Where throughput stops rising with load. `load` is None when there is no knee, or it cannot be told."""

    found: bool
    is_judged: bool
    load: float | None = None  # where the two fitted lines meet
    tokens_per_second: float | None = None  # of the fit there
    evidence: dict[str, float] = {}
    sentence: str


def find_knee(points: Sequence[SweepPoint]) -> KneeVerdict:
    """Two straight lines that meet, fitted to throughput over load by least squares.

    Accepted as a knee when the second line rises by at most a quarter of the first one's slope, the pair halves the squared
    error of one line, and throughput at the break is at least 85 % of the highest seen, and has risen by a fifth of that from
    the lowest load. Needs MIN_KNEE_POINTS loads.
    """
    ordered = sorted(points)
    loads = np.array([point.load for point in ordered], dtype=np.float64)
    rates = np.array([point.tokens_per_second for point in ordered], dtype=np.float64)
    if len(np.unique(loads)) < MIN_KNEE_POINTS:
        return KneeVerdict(
            found=False, is_judged=False, sentence=f"A knee cannot be told from fewer than {MIN_KNEE_POINTS} load levels."
        )
    break_load, (start, rise, bend), error = _two_lines(loads, rates)
    one_line_error = _squared_error(np.stack([np.ones_like(loads), loads], axis=1), rates)[1]
    at_break = start + rise * break_load
    tail = rise + bend
    peak = float(rates.max())
    scale = float(((rates - rates.mean()) ** 2).sum())
    cut = 1.0 - error / one_line_error if one_line_error > 1e-9 * scale else 0.0
    evidence = {
        "slope_before": rise,
        "slope_after": tail,
        "error_cut_share": cut,
        "peak_share_at_break": at_break / peak if peak > 0 else 0.0,
        "break_load": break_load,
    }
    risen = rise * (break_load - float(loads.min()))
    if peak <= 0 or risen < MIN_KNEE_RISE_SHARE * peak:
        reason = "throughput hardly rises with load, so that the lowest load is at or beyond it already"
    else:
        reason = _no_knee_reason(tail / rise, cut, at_break / peak)
    if reason:
        return KneeVerdict(found=False, is_judged=True, evidence=evidence, sentence=f"No knee in sight: {reason}.")
    return KneeVerdict(
        found=True,
        is_judged=True,
        load=break_load,
        tokens_per_second=at_break,
        evidence=evidence,
        sentence=f"The knee is at a load of {break_load:.3g}: {at_break:.4g} output tokens/s, {at_break / peak:.0%} of the "
        "highest seen. More load beyond it buys latency.",
    )


def _no_knee_reason(tail_share: float, cut: float, peak_share: float) -> str:
    if tail_share > MAX_TAIL_SLOPE_SHARE:
        return f"throughput still rises at the highest load (by {tail_share:.0%} of its first slope)"
    if cut < MIN_ERROR_CUT:
        return "one straight line fits throughput nearly as well as two"
    if peak_share < MIN_KNEE_PEAK_SHARE:
        return f"throughput where the slope changes is {peak_share:.0%} of the highest only: it bends gradually"
    return ""


def _two_lines(x: Floats, y: Floats) -> tuple[float, tuple[float, float, float], float]:
    """(break, (value at 0, slope, change of slope), squared error). Two points at least lie on each side of the break."""
    inner = np.unique(x)[1:-1]
    best: tuple[float, tuple[float, float, float], float] | None = None
    for candidate in np.unique(np.concatenate([inner, np.linspace(inner[0], inner[-1], _NUM_BREAK_CANDIDATES)])):
        design = np.stack([np.ones_like(x), x, np.maximum(x - candidate, 0.0)], axis=1)
        fitted, error = _squared_error(design, y)
        if best is None or error < best[2]:
            best = float(candidate), (float(fitted[0]), float(fitted[1]), float(fitted[2])), error
    if best is None:  # the caller has made sure of inner points
        raise ValueError("no inner points")
    return best


def _squared_error(design: Floats, y: Floats) -> tuple[Floats, float]:
    fitted = np.asarray(np.linalg.lstsq(design, y, rcond=None)[0], dtype=np.float64)
    residuals = y - design @ fitted
    return fitted, float(residuals @ residuals)


def find_over_saturation(run: Run) -> Finding:
    """Whether the queue grew all along: requests in flight and TTFT both rise with time, clearly and by much.

    Looks at the last MAX_SATURATION_SECONDS of the measured window. Each of the two is averaged over NUM_BATCHES equal
    stretches of time (values a second apart in a queue are far from independent) and regressed on time; the lower end of the
    slope's 95 % t-interval must be above zero, and the line must rise by at least its mean (from nothing it rises by twice it).
    A queue near full load wanders far by itself: n arrivals and n departures, both random, differ by sqrt(2 n) in the standard
    deviation. The backlog must have grown by twice that as well.
    """
    name = "over-saturation"
    if run.settings.arrival == "closed":
        return Finding.not_judged(name, "A closed loop cannot over-saturate a server: each client waits for its answer.")
    begin, end = max(run.window_begin, run.window_end - MAX_SATURATION_SECONDS), run.window_end
    records = [record for record in run.requests if begin <= record.scheduled < end]
    if end - begin < MIN_SATURATION_SECONDS or len(records) < MIN_SATURATION_REQUESTS:
        return Finding.not_judged(
            name,
            f"Over-saturation cannot be told from {len(records)} requests over {end - begin:.0f} s: it takes "
            f"{MIN_SATURATION_REQUESTS} over {MIN_SATURATION_SECONDS:.0f} s.",
        )
    edges = np.linspace(begin, end, NUM_BATCHES + 1)
    in_flight = regress((edges[:-1] + edges[1:]) / 2, _mean_in_flight(run.requests, edges, run.wall_seconds))
    ttft = _ttft_over_time(records, edges)
    evidence = {"num_requests": float(len(records)), "seconds": end - begin}
    growths = []
    for what, line in (("in_flight", in_flight), ("ttft", ttft)):
        growth = _relative_growth(line, begin, end)
        growths.append(growth)
        evidence |= (
            {f"{what}_growth_share": growth}
            if line is None
            else {
                f"{what}_growth_share": growth,
                f"{what}_slope": line.slope,
                f"{what}_slope_low": line.slope_low,
                f"{what}_slope_high": line.slope_high,
            }
        )
    chance = math.sqrt(2.0 * len(records))
    backlog = in_flight.slope * (end - begin) if in_flight is not None else 0.0
    evidence |= {"backlog_growth_requests": backlog, "backlog_growth_deviations": backlog / chance}
    found = backlog >= MIN_BACKLOG_DEVIATIONS * chance and all(
        line is not None and line.slope_low > 0.0 and growth >= MIN_GROWTH_SHARE
        for line, growth in zip((in_flight, ttft), growths, strict=True)
    )
    offered = f"{len(records) / (end - begin):.3g} requests/s"
    sentence = (
        f"Over-saturated at {offered}: requests in flight and TTFT grew all along: percentiles depend on how long the run was."
        if found
        else f"Not over-saturated at {offered}: requests in flight and TTFT did not both grow all along."
    )
    return Finding(name=name, found=found, is_judged=True, evidence=evidence, sentence=sentence)


def _mean_in_flight(records: Sequence[RequestRecord], edges: Floats, run_end: float) -> Floats:
    """Mean number of requests between due and ended in each stretch between edges. Requests without an end run to the run's."""
    starts = np.array([record.scheduled for record in records])
    ends = np.array([record.ended if record.ended is not None else run_end for record in records])
    overlaps = np.minimum(ends[:, None], edges[None, 1:]) - np.maximum(starts[:, None], edges[None, :-1])
    means: Floats = np.maximum(overlaps, 0.0).sum(axis=0) / np.diff(edges)
    return means


def _ttft_over_time(records: Sequence[RequestRecord], edges: Floats) -> Regression | None:
    """Stretch means of TTFT from due over the time it was due. A failed request waited at least to its end."""
    due, waited = [], []
    for record in records:
        if record.outcome is Outcome.REFUSED:
            continue
        until = record.chunk_times[0] if record.chunk_times else record.ended
        if until is not None:
            due.append(record.scheduled)
            waited.append(until - record.scheduled)
    place = np.clip(np.searchsorted(edges, due, side="right") - 1, 0, len(edges) - 2)
    numbers = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, weights=np.asarray(waited), minlength=len(edges) - 1)
    filled = numbers > 0
    centres = (edges[:-1] + edges[1:]) / 2
    return regress(centres[filled], sums[filled] / numbers[filled])


def _relative_growth(line: Regression | None, begin: float, end: float) -> float:
    """How much the line rises from begin to end, as a share of its middle; 0 without a line."""
    if line is None:
        return 0.0
    middle = line.intercept + line.slope * (begin + end) / 2
    return line.slope * (end - begin) / middle if middle > 0 and math.isfinite(middle) else 0.0

"""From the records of a run to its figures.

Owns: what each figure of RunResult is computed from. Runs in: load tool. Must not know: how load is made or figures drawn.
Arithmetic is in statistics.py, tokens of merged events in tokens.py, the words of warnings in run_warnings.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.loadtest.records import Outcome, RequestRecord, Run
from headrace.loadtest.results import Distribution, GoodputFigure, RequestCounts, RunResult
from headrace.loadtest.run_warnings import WarningInputs, run_warnings
from headrace.loadtest.statistics import distribution
from headrace.loadtest.targets import DEFAULT_TARGETS, GoodputTarget
from headrace.loadtest.tokens import CountKind, TokenCounts, count_tokens

__all__ = ["DEFAULT_TARGETS", "GoodputTarget", "RequestTimings", "summarize", "timings_of"]

WORST_SHARE = 0.10  # of a request's gaps
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """The figures of one request that gave text. Seconds."""

    record: RequestRecord
    tokens: TokenCounts
    ttft: float  # sent -> first non-empty text
    ttft_felt: float  # open loop: due -> first non-empty text; closed loop: as ttft. Goodput judges by it
    e2e: float  # sent -> last text
    chunk_gaps: Floats  # between events with text; empty for whole answers
    num_zero_gaps: int  # tokens that came together with another one
    tpot: float | None  # (last text - first text) / (tokens - 1)
    worst_tbt: float | None  # mean of the largest 10 % of gaps, at least one


def timings_of(record: RequestRecord, *, is_open_loop: bool) -> RequestTimings | None:
    """Figures of one request, None when it brought no text. Whole answers have no TBT, TPOT or worst-10% TBT."""
    if not record.chunk_times:
        return None
    tokens = count_tokens(record)
    first, last = record.chunk_times[0], record.chunk_times[-1]
    num_gaps = tokens.num_text_tokens - 1 if record.is_stream else 0
    chunk_gaps = np.diff(np.asarray(record.chunk_times, dtype=np.float64)) if record.is_stream else np.empty(0)
    tpot = worst = None
    if num_gaps > 0:
        tpot = (last - first) / num_gaps
        num_worst = max(1, -(-num_gaps // round(1 / WORST_SHARE)))
        largest = np.sort(chunk_gaps)[::-1][:num_worst]
        worst = float(largest.sum()) / num_worst  # gaps of zero fill up what the measured ones leave
    return RequestTimings(
        record=record,
        tokens=tokens,
        ttft=first - record.sent,
        ttft_felt=first - (record.scheduled if is_open_loop else record.sent),
        e2e=last - record.sent,
        chunk_gaps=chunk_gaps,
        num_zero_gaps=num_gaps - len(chunk_gaps),
        tpot=tpot,
        worst_tbt=worst,
    )


def summarize(run: Run, targets: Sequence[GoodputTarget] = DEFAULT_TARGETS) -> RunResult:
    """All figures of `run`, and of each of its groups when it has several. ValueError without targets or for an empty window.

    Latencies are those of completed requests that were scheduled within the window. Rates count what arrived within the window,
    whenever it was scheduled, so that work still in flight at its edges neither adds nor lacks.
    """
    if not targets:
        raise ValueError("goodput needs at least one target")
    if run.window_end <= run.window_begin:
        raise ValueError(f"the measured window is empty: {run.window_begin:.3f} s to {run.window_end:.3f} s")
    result = _summarize(run, run.requests, targets)
    names = sorted({record.group for record in run.requests})
    if len(names) > 1:
        result.groups = {
            name: _summarize(run, [record for record in run.requests if record.group == name], targets) for name in names
        }
    return result


def _summarize(run: Run, records: Sequence[RequestRecord], targets: Sequence[GoodputTarget]) -> RunResult:
    is_open_loop = run.settings.arrival != "closed"
    measured = [record for record in records if run.window_begin <= record.scheduled < run.window_end]
    completed = [record for record in measured if record.outcome is Outcome.COMPLETED]
    timings = [item for record in completed if (item := timings_of(record, is_open_loop=is_open_loop)) is not None]
    counts = _count_outcomes(measured)
    window_seconds = run.window_end - run.window_begin
    goodput = [_goodput(target, timings, counts.offered, window_seconds) for target in targets]
    num_ended, tokens_in_window = _arrived_in_window(run, records)
    seed = run.settings.seed
    tbt, tbt_chunk = _gap_distributions(timings, seed)
    token_counts = [count_tokens(record) for record in completed]
    result = RunResult(
        label=run.label,
        settings=run.settings,
        requests=counts,
        errors=_count_errors(measured),
        first_errors=_first_errors(measured),
        window_seconds=window_seconds,
        requests_per_second=num_ended / window_seconds,
        offered_per_second=counts.offered / window_seconds,
        output_tokens=sum(item.total for item in token_counts),
        output_tokens_per_second=tokens_in_window / window_seconds,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in completed),
        goodput=goodput[0].share,
        goodput_targets=goodput,
        ttft_seconds=distribution([item.ttft for item in timings], seed=seed),
        tbt_seconds=tbt,
        tbt_chunk_seconds=tbt_chunk,
        tpot_seconds=distribution([item.tpot for item in timings if item.tpot is not None], seed=seed),
        worst_tbt_seconds=distribution([item.worst_tbt for item in timings if item.worst_tbt is not None], seed=seed),
        e2e_seconds=distribution([item.e2e for item in timings], seed=seed),
        first_event_seconds=distribution(_first_events(completed), seed=seed),
        ttft_from_due_seconds=distribution([item.ttft_felt for item in timings], seed=seed) if is_open_loop else None,
        connect_seconds=_connects(measured, seed),
        token_counts=str(_worst_kind(token_counts).value),
        usage_mismatches=sum(item.is_mismatch for item in token_counts),
        client=run.client,
    )
    result.warnings = run_warnings(
        WarningInputs(result=result, completed=completed, token_counts=token_counts, measured=measured)
    )
    return result


def _count_outcomes(measured: Sequence[RequestRecord]) -> RequestCounts:
    by_outcome = Counter(record.outcome for record in measured)
    return RequestCounts(
        offered=len(measured),
        completed=by_outcome[Outcome.COMPLETED],
        refused=by_outcome[Outcome.REFUSED],
        failed=by_outcome[Outcome.FAILED] + by_outcome[Outcome.UNFINISHED],
    )


def _count_errors(measured: Sequence[RequestRecord]) -> dict[str, int]:
    """By kind, most frequent first."""
    kinds = Counter(_error_kind(record) for record in measured if record.outcome is not Outcome.COMPLETED)
    return dict(kinds.most_common())


def _first_errors(measured: Sequence[RequestRecord]) -> dict[str, str]:
    """What was said of the first of each kind, in order of sending, that said anything."""
    found: dict[str, str] = {}
    for record in sorted(measured, key=lambda record: record.sent):
        if record.outcome is not Outcome.COMPLETED and record.error_detail:
            found.setdefault(_error_kind(record), record.error_detail)
    return found


def _error_kind(record: RequestRecord) -> str:
    return record.error_kind or record.outcome.value


def _first_events(completed: Sequence[RequestRecord]) -> list[float]:
    return [record.first_event_at - record.sent for record in completed if record.first_event_at is not None]


def _connects(measured: Sequence[RequestRecord], seed: int) -> Distribution | None:
    values = [record.connect_seconds for record in measured if record.connect_seconds is not None]
    return distribution(values, seed=seed) if values else None


def _worst_kind(token_counts: Sequence[TokenCounts]) -> CountKind:
    kinds = {item.kind for item in token_counts}
    return next((kind for kind in (CountKind.CHUNKS, CountKind.APPORTIONED) if kind in kinds), CountKind.EXACT)


def _gap_distributions(timings: Sequence[RequestTimings], seed: int) -> tuple[Distribution, Distribution]:
    """TBT over (tokens, events): all gaps of all requests, with whole requests drawn for the intervals."""
    lengths = [len(item.chunk_gaps) for item in timings]
    zeros = [item.num_zero_gaps for item in timings]
    chunk_gaps = np.concatenate([item.chunk_gaps for item in timings]) if timings else np.empty(0)
    numbers = np.arange(len(timings), dtype=np.int64)
    owners = np.repeat(numbers, lengths)
    per_chunk = distribution(chunk_gaps, owners, seed=seed)
    if not any(zeros):
        return per_chunk, per_chunk
    token_gaps = np.concatenate([chunk_gaps, np.zeros(sum(zeros))])
    token_owners = np.concatenate([owners, np.repeat(numbers, zeros)])
    return distribution(token_gaps, token_owners, seed=seed), per_chunk


def _goodput(
    target: GoodputTarget, timings: Sequence[RequestTimings], num_offered: int, window_seconds: float
) -> GoodputFigure:
    """A request is good when it completed, met both limits, and usage can be right. A single token has no TBT to miss."""
    num_good = sum(
        item.ttft_felt <= target.ttft_seconds
        and (item.worst_tbt is None or item.worst_tbt <= target.tbt_seconds)
        and not item.tokens.is_mismatch
        for item in timings
    )
    return GoodputFigure(
        name=target.name,
        ttft_seconds=target.ttft_seconds,
        tbt_seconds=target.tbt_seconds,
        share=num_good / num_offered if num_offered else 0.0,
        per_second=num_good / window_seconds,
    )


def _arrived_in_window(run: Run, records: Sequence[RequestRecord]) -> tuple[int, float]:
    """(requests that completed, output tokens that arrived) within the window, of all records.

    Tokens of requests that completed, or that were still running when the run ended; the latter have no usage, so their events
    count with the mean tokens per event of the former. Tokens of failed answers are no use to anyone and do not count.
    """
    num_ended, tokens = 0, 0.0
    num_completed_tokens = num_completed_events = 0
    num_unfinished_events = 0
    for record in records:
        if record.outcome not in (Outcome.COMPLETED, Outcome.UNFINISHED) or not record.chunk_times:
            continue
        times = np.asarray(record.chunk_times)
        is_inside = (times >= run.window_begin) & (times <= run.window_end)
        if record.outcome is Outcome.UNFINISHED:
            num_unfinished_events += int(is_inside.sum()) if record.is_stream else 0
            continue
        counts = count_tokens(record)
        ended = record.ended if record.ended is not None else record.chunk_times[-1]
        num_ended += run.window_begin <= ended <= run.window_end
        if counts.num_text_tokens:
            tokens += float(counts.per_chunk[is_inside].sum()) * counts.total / counts.num_text_tokens
        num_completed_tokens += counts.total
        num_completed_events += len(counts.per_chunk)
    per_event = num_completed_tokens / num_completed_events if num_completed_events else 1.0
    return num_ended, tokens + num_unfinished_events * per_event

"""How much the load tool itself was a bottleneck, and the words for it.

Owns: ClientLoad from samples and records, its thresholds. Runs in: load tool; pure. Must not know: processes, clocks, HTTP.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from headrace.loadtest.records import ClientLoad, Outcome, RequestRecord

# Beyond any of these the figures are partly the client's own. docs/measuring.md states them. A lag counts when it is over its
# limit at p99 and at least MIN_LATE_SAMPLES times: with few samples p99 is the largest one, and one hiccup is not a bottleneck.
MAX_PROCESS_CPU_SHARE = 0.85  # of one core, mean over the window
MIN_SEND_LAG_SECONDS = 0.010  # send lag p99 below this never counts ...
MAX_SEND_LAG_SHARE = 0.05  # ... nor below this share of the median TTFT
MAX_LOOP_LAG_SECONDS = 0.020  # p99 of how late the event loops woke
MIN_LATE_SAMPLES = 2
MAX_MISSED_PROBES = 1000

TimedLag = tuple[float, float]  # (time of the run, lateness in seconds)


class CpuSample(msgspec.Struct, frozen=True):
    """CPU seconds that a process had used by a time of the run."""

    at: float
    cpu_seconds: float


class Lags(msgspec.Struct, frozen=True):
    """Lateness in the client processes."""

    send: Sequence[TimedLag]  # a request's first step in the client - its time
    loop: Sequence[TimedLag]  # an event loop's wake-up - the time it had asked for


def judge_client(
    *,
    client_samples: Sequence[Sequence[CpuSample]],
    coordinator_samples: Sequence[CpuSample],
    lags: Lags,
    median_ttft_seconds: float | None,
    window: tuple[float, float],
) -> ClientLoad:
    """ClientLoad of the window, with its verdict. Samples: one list for each process, rising in time."""
    send_lags, loop_lags = ([lag for at, lag in timed if window[0] <= at <= window[1]] for timed in (lags.send, lags.loop))
    shares = [cpu_share(samples, window) for samples in (*client_samples, coordinator_samples)]
    load = ClientLoad(
        num_processes=len(client_samples),
        cpu_cores_used=sum(shares),
        max_process_cpu_share=max(shares),
        send_lag_p50_seconds=nearest_rank(send_lags, 0.5),
        send_lag_p99_seconds=nearest_rank(send_lags, 0.99),
        loop_lag_p99_seconds=nearest_rank(loop_lags, 0.99),
    )
    reasons = []
    if load.max_process_cpu_share > MAX_PROCESS_CPU_SHARE:
        reasons.append(
            f"a process of the load tool used {load.max_process_cpu_share:.0%} of a core (limit {MAX_PROCESS_CPU_SHARE:.0%})"
        )
    max_send_lag = max(MIN_SEND_LAG_SECONDS, MAX_SEND_LAG_SHARE * (median_ttft_seconds or 0.0))
    if _is_late(send_lags, load.send_lag_p99_seconds, max_send_lag):
        reasons.append(
            f"requests were sent up to {load.send_lag_p99_seconds * 1e3:.1f} ms late (p99; limit {max_send_lag * 1e3:.1f} ms)"
        )
    if _is_late(loop_lags, load.loop_lag_p99_seconds, MAX_LOOP_LAG_SECONDS):
        reasons.append(
            f"the clients' event loops woke up to {load.loop_lag_p99_seconds * 1e3:.1f} ms late "
            f"(p99; limit {MAX_LOOP_LAG_SECONDS * 1e3:.0f} ms): the clients, or other work on this machine, kept the CPU"
        )
    load.was_bottleneck = bool(reasons)
    load.why = "; ".join(reasons)
    return load


def _is_late(lags: Sequence[float], p99: float, limit: float) -> bool:
    return p99 > limit and sum(lag > limit for lag in lags) >= MIN_LATE_SAMPLES


def missed_probes(lag: float, interval: float) -> list[float]:
    """The lateness of each probe that one late wake-up stands for: it, and those that could not be made meanwhile.

    Without them a loop that stood still for long would have few samples of it (coordinated omission; Tene, HdrHistogram).
    """
    num_missed = min(int(lag / interval), MAX_MISSED_PROBES) if interval > 0 else 0
    return [lag - place * interval for place in range(num_missed + 1)]


def cpu_share(samples: Sequence[CpuSample], window: tuple[float, float]) -> float:
    """CPU seconds per second between the samples that enclose the window; 0 with fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    begin = max((sample for sample in samples if sample.at <= window[0]), key=_at, default=samples[0])
    end = min((sample for sample in samples if sample.at >= window[1]), key=_at, default=samples[-1])
    if end.at <= begin.at:
        return 0.0
    return (end.cpu_seconds - begin.cpu_seconds) / (end.at - begin.at)


def _at(sample: CpuSample) -> float:
    return sample.at


def nearest_rank(values: Iterable[float], share: float) -> float:
    """The smallest value with at least `share` of all at or below it; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_ttft_seconds(records: Iterable[RequestRecord]) -> float | None:
    """Of completed requests, sent to first text; None without any."""
    ttfts = [
        record.chunk_times[0] - record.sent for record in records if record.outcome is Outcome.COMPLETED and record.chunk_times
    ]
    return nearest_rank(ttfts, 0.5) if ttfts else None

"""Samples of raw records for charts and request lists: first tokens, gaps, concurrency, tokens over time.

Owns: what a chart shows of a Run. Runs in: load tool. Must not know: how a chart is drawn.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.loadtest.records import Outcome, RequestRecord, Run

Array = npt.NDArray[np.float64]


def is_measured(run: Run, record: RequestRecord) -> bool:
    """Whether it was due in the measured window."""
    return run.window_begin <= record.scheduled < run.window_end


def ttft_samples(runs: Iterable[Run]) -> Array:
    """Seconds from send to first text, of the completed requests of the measured windows."""
    return np.array([record.chunk_times[0] - record.sent for record in _with_text(runs)], dtype=np.float64)


def gap_samples(runs: Iterable[Run]) -> Array:
    """Seconds between consecutive events with text, of the completed streams of the measured windows."""
    gaps = [np.diff(record.chunk_times) for record in _with_text(runs) if record.is_stream]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _with_text(runs: Iterable[Run]) -> Iterator[RequestRecord]:
    for run in runs:
        for record in run.requests:
            if record.outcome is Outcome.COMPLETED and record.chunk_times and is_measured(run, record):
                yield record


def end_of(record: RequestRecord, run: Run) -> float:
    """When it ended; an unfinished one ends with its run."""
    if record.ended is not None:
        return record.ended
    return max(run.wall_seconds, record.sent, *record.chunk_times[-1:])


class Concurrency(NamedTuple):
    """Step functions over `times`: sent and not ended, split into waiting for a first text and streaming."""

    times: Array
    waiting: Array
    streaming: Array


def concurrency(run: Run) -> Concurrency:
    """How many requests waited and streamed at each moment."""
    changes: list[tuple[float, int, int]] = []
    for record in run.requests:
        end = end_of(record, run)
        first = record.chunk_times[0] if record.chunk_times else None
        changes.append((record.sent, 1, 0))
        if first is not None and first < end:
            changes += [(first, -1, 1), (end, 0, -1)]
        else:
            changes.append((end, -1, 0))
    changes.sort(key=lambda change: change[0])
    table = np.array(changes, dtype=np.float64).reshape(-1, 3)
    times, last_of_time = np.unique(table[:, 0][::-1], return_index=True)
    keep = len(table) - 1 - last_of_time  # the state after all changes of one moment
    return Concurrency(times, np.cumsum(table[:, 1])[keep], np.cumsum(table[:, 2])[keep])


def tokens_over_time(run: Run, bin_seconds: float) -> tuple[Array, Array]:
    """(bin starts, output tokens per second). Tokens of usage are spread evenly over a request's events."""
    times = [np.asarray(record.chunk_times) for record in run.requests if record.chunk_times]
    weights = [
        np.full(len(record.chunk_times), (record.output_tokens or len(record.chunk_times)) / len(record.chunk_times))
        for record in run.requests
        if record.chunk_times
    ]
    if not times:
        return np.empty(0), np.empty(0)
    all_times = np.concatenate(times)
    end = max(float(all_times.max()), bin_seconds)
    edges = np.arange(0.0, end + bin_seconds, bin_seconds)
    counts, _ = np.histogram(all_times, bins=edges, weights=np.concatenate(weights))
    return edges[:-1], counts / bin_seconds


def nice_bin_seconds(wall_seconds: float, num_bins: int = 80) -> float:
    """A round width that gives about `num_bins` bins, at least 50 ms."""
    wanted = max(wall_seconds / num_bins, 0.05)
    power = 10.0 ** math.floor(math.log10(wanted))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= wanted * 0.999))

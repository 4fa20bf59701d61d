"""How evenly tenants were served while they competed.

Owns: Fairness, jain_index, fairness_of. Runs in: simulator. Must not know: policies, how requests are drawn.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.protocol.errors import ConfigurationError
from headrace.simulation.engine import PrefillChunk
from headrace.simulation.limits import MAX_WINDOWS
from headrace.simulation.requests import FinishedRequest

OUTPUT_WEIGHT = 2.0  # an output token counts as so many prompt tokens (VTC, Sheng et al., OSDI 2024, section 5)
Interval = tuple[int, int]


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Over windows in which two or more tenants were backlogged: had a request that waited, from begin to end.

    Jain's index (Jain, Chiu and Hawe, DEC-TR-301, 1984) of service / weight over those tenants: 1 when all got their share,
    1/n when one of n got everything. Service is prompt tokens computed for the first time, and output tokens twice. None
    without such a window.
    """

    num_windows: int
    jain_mean: float | None
    jain_least: float | None


def jain_index(values: Sequence[float]) -> float:
    """(sum x)^2 / (n * sum x^2), in 1/n .. 1; 1 where nobody got anything. Raises ValueError without values."""
    if not values:
        raise ValueError("no value, no index")
    most = max(values)
    if most <= 0:
        return 1.0
    parts = [value / most for value in values]  # so that squares neither vanish nor overflow
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def fairness_of(
    finished: Sequence[FinishedRequest],
    chunks: Iterable[PrefillChunk],
    weights: Mapping[str, float],
    window_ns: int,
) -> Fairness:
    """Of tenants by their own name; a tenant without a weight counts with 1. ConfigurationError for too many windows."""
    waiting: dict[str, list[Interval]] = defaultdict(list)
    service: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for item in finished:
        until_ns = item.first_scheduled_ns if item.first_scheduled_ns >= 0 else item.end_ns
        waiting[item.request.tenant_id].append((item.arrival_ns, until_ns))
    if len(waiting) > 1:
        tenants = {item.request.index: item.request.tenant_id for item in finished}
        for chunk in chunks:
            service[tenants[chunk.index]][chunk.end_ns // window_ns] += chunk.num_tokens
        for item in finished:
            served = service[item.request.tenant_id]
            for at_ns in item.token_ns:
                served[at_ns // window_ns] += OUTPUT_WEIGHT
    contested = _contested({name: _full_windows(merged(intervals), window_ns) for name, intervals in waiting.items()})
    num_windows = sum(len(windows) for windows, _ in contested)
    if num_windows > MAX_WINDOWS:
        least_seconds = math.ceil(num_windows * window_ns / MAX_WINDOWS / 1e9)
        raise ConfigurationError(
            f"window_seconds: tenants wait side by side through {num_windows} windows of {window_ns / 1e9:g} s, and fairness "
            f"is judged over at most {MAX_WINDOWS}: make it {least_seconds} s or more."
        )
    indices = [
        jain_index([service[name][window] / weights.get(name, 1.0) for name in names])
        for windows, names in contested
        for window in windows
    ]
    return Fairness(
        num_windows=len(indices),
        jain_mean=sum(indices) / len(indices) if indices else None,
        jain_least=min(indices, default=None),
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order; those that touch are one."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _full_windows(intervals: Iterable[Interval], window_ns: int) -> list[range]:
    """Numbers of the windows that lie in one interval whole: for each interval, where there are any."""
    found = (range(-(-begin // window_ns), end // window_ns) for begin, end in intervals)
    return [windows for windows in found if windows]


def _contested(backlogged: Mapping[str, Iterable[range]]) -> list[tuple[range, list[str]]]:
    """Windows in which two or more are backlogged, in order, with the names of those."""
    begins = [(windows.start, 1, name) for name, ranges in backlogged.items() for windows in ranges]
    ends = [(windows.stop, 0, name) for name, ranges in backlogged.items() for windows in ranges]
    found: list[tuple[range, list[str]]] = []
    names: set[str] = set()
    since = 0
    for at, is_begin, name in sorted(begins + ends):
        if len(names) > 1 and at > since:
            found.append((range(since, at), sorted(names)))
        since = at
        if is_begin:
            names.add(name)
        else:
            names.remove(name)
    return found

"""From what happened to figures, by the load tool's definitions (docs/measuring.md).

Owns: PolicyResult and what each of its figures is computed from. Runs in: simulator. Must not know: schedulers, tables, charts.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from headrace.loadtest.figures import RequestTimings, timings_of
from headrace.loadtest.records import Outcome as Ending
from headrace.loadtest.records import RequestRecord
from headrace.loadtest.statistics import PERCENTILES, Floats
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.traffic import TrafficPolicy
from headrace.simulation.engine import Outcome
from headrace.simulation.fairness import Fairness, fairness_of
from headrace.simulation.requests import REFUSED, FinishedRequest
from headrace.simulation.settings import SimulationSettings

_COMPLETED = (FinishReason.LENGTH.value, FinishReason.STOP.value)


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of seconds; None where there is no value. Percentiles as in the load tool."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of some of the requests: all, a class, a tenant. offered = completed + refused + failed."""

    offered: int
    completed: int
    refused: int
    failed: int
    good: int  # completed within both targets
    goodput: float  # good / offered
    ttft_seconds: Tail  # from when the request was due, its refused tries included; of completed requests, as all below
    tbt_seconds: Tail
    tpot_seconds: Tail
    worst_tbt_seconds: Tail
    queue_seconds: Tail  # from the accepted try to the first step


class SchedulerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the whole simulation, warm-up included."""

    num_steps: int
    num_refusals: int  # tries
    num_returns: int  # tries of callers who waited for as long as they were told
    num_returns_admitted: int
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: int  # computed for the first time
    cached_prompt_tokens: int
    prefix_hit_share: float  # of the prompt tokens that were looked up
    busy_share: float  # of the time until the last request had ended


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of the traffic. Rates are over the measured window: from warm-up to the last due request."""

    policy: str
    window_seconds: float
    makespan_seconds: float  # until the last request had ended
    offered_per_second: float
    requests_per_second: float  # completed within the window
    output_tokens_per_second: float  # arrived within the window, of completed requests
    mean_queue: float  # requests that wait for their first step, over the window
    max_queue: int
    total: Served
    by_class: dict[str, Served]
    by_tenant: dict[str, Served]
    fairness: Fairness
    scheduler: SchedulerFigures


def tail(values_ns: Sequence[float] | Floats) -> Tail:
    """Summary of some nanoseconds, in seconds."""
    array = np.asarray(values_ns, dtype=np.float64) / 1e9
    if not len(array):
        return Tail(count=0)
    p50, p90, p99, p999 = (float(point) for point in np.quantile(array, list(PERCENTILES.values())))
    return Tail(count=len(array), mean=float(array.mean()), p50=p50, p90=p90, p99=p99, p999=p999, max=float(array.max()))


def figures_of(name: str, outcome: Outcome, settings: SimulationSettings) -> PolicyResult:
    """All figures of one simulation."""
    begin_ns = round(settings.warm_up_seconds * 1e9)
    last_due_ns = max(item.request.due_ns for item in outcome.finished)
    end_ns = last_due_ns if last_due_ns > begin_ns else outcome.end_ns
    window_seconds = max(end_ns - begin_ns, 1) / 1e9
    measured = [item for item in outcome.finished if item.request.due_ns >= begin_ns]
    timed = [(item, _timings(item)) for item in measured]
    is_good = _judge(settings)
    completed = [item for item in outcome.finished if item.reason in _COMPLETED]
    token_ns = np.fromiter((at_ns for item in completed for at_ns in item.token_ns), dtype=np.int64)
    mean_queue, max_queue = _queue(outcome.finished, begin_ns, end_ns)
    return PolicyResult(
        policy=name,
        window_seconds=window_seconds,
        makespan_seconds=outcome.end_ns / 1e9,
        offered_per_second=len(measured) / window_seconds,
        requests_per_second=sum(begin_ns <= item.end_ns <= end_ns for item in completed) / window_seconds,
        output_tokens_per_second=int(((token_ns >= begin_ns) & (token_ns <= end_ns)).sum()) / window_seconds,
        mean_queue=mean_queue,
        max_queue=max_queue,
        total=_served(timed, is_good),
        by_class=_groups(timed, is_good, lambda item: item.request.service_class, settings.policy.class_names),
        by_tenant=_groups(timed, is_good, lambda item: item.request.tenant_id, settings.policy.tenant_names),
        fairness=fairness_of(
            outcome.finished,
            outcome.chunks,
            {tenant.name: tenant.weight for tenant in settings.policy.tenants},
            round(settings.window_seconds * 1e9),
        ),
        scheduler=_scheduler_figures(outcome),
    )


def _scheduler_figures(outcome: Outcome) -> SchedulerFigures:
    facts = outcome.statistics
    looked_up = facts.num_prefix_query_tokens
    return SchedulerFigures(
        num_steps=outcome.num_steps,
        num_refusals=outcome.num_refusals,
        num_returns=sum(item.num_tries - 1 for item in outcome.finished),
        num_returns_admitted=sum(item.num_tries > 1 and item.reason != REFUSED for item in outcome.finished),
        preemptions=facts.num_preemptions,
        recomputed_tokens=facts.num_recomputed_tokens,
        prompt_tokens=facts.num_prompt_tokens,
        cached_prompt_tokens=facts.num_cached_prompt_tokens,
        prefix_hit_share=facts.num_prefix_hit_tokens / looked_up if looked_up else 0.0,
        busy_share=outcome.busy_ns / max(outcome.end_ns, 1),
    )


Timed = tuple[FinishedRequest, RequestTimings | None]
Judge = Callable[[FinishedRequest, RequestTimings], bool]


def _timings(item: FinishedRequest) -> RequestTimings | None:
    """As if a client had taken the times at which tokens were made; None for a request that did not complete.

    Times are whole nanoseconds, and so are the figures made of them: their differences are exact, where those of seconds would
    now and then miss a target by a rounding.
    """
    if item.reason not in _COMPLETED:
        return None
    num_tokens = len(item.token_ns)
    record = RequestRecord(
        index=item.request.index,
        process=0,
        scheduled=float(item.request.due_ns),
        sent=float(item.arrival_ns),
        chunk_times=[float(at_ns) for at_ns in item.token_ns],
        chunk_chars=[1] * num_tokens,
        ended=float(item.end_ns),
        outcome=Ending.COMPLETED,
        finish_reasons=[item.reason],
        output_tokens=num_tokens,
    )
    return timings_of(record, is_open_loop=True)


def _judge(settings: SimulationSettings) -> Judge:
    """Whether a completed request met its class's targets, or those that stand in their place."""
    policy: TrafficPolicy = settings.policy

    def is_good(item: FinishedRequest, timings: RequestTimings) -> bool:
        promised = policy.class_of(item.request.service_class)
        ttft_ms = settings.ttft_ms if settings.ttft_ms is not None else promised.ttft_target_ms
        tbt_ms = settings.tbt_ms if settings.tbt_ms is not None else promised.tbt_target_ms or math.inf
        return timings.ttft_felt <= ttft_ms * 1e6 and (timings.worst_tbt or 0.0) <= tbt_ms * 1e6

    return is_good


def _groups(
    timed: Sequence[Timed], is_good: Judge, key: Callable[[FinishedRequest], str], order: Sequence[str]
) -> dict[str, Served]:
    """In that order, unknown names behind."""
    groups: dict[str, list[Timed]] = {}
    for pair in timed:
        groups.setdefault(key(pair[0]), []).append(pair)
    place_of = {name: place for place, name in enumerate(order)}
    names = sorted(groups, key=lambda name: (place_of.get(name, len(place_of)), name))
    return {name: _served(groups[name], is_good) for name in names}


def _served(timed: Sequence[Timed], is_good: Judge) -> Served:
    completed = [(item, timings) for item, timings in timed if timings is not None]
    timings = [found for _, found in completed]
    refused = sum(item.reason == REFUSED for item, _ in timed)
    good = sum(is_good(item, found) for item, found in completed)
    return Served(
        offered=len(timed),
        completed=len(completed),
        refused=refused,
        failed=len(timed) - len(completed) - refused,
        good=good,
        goodput=good / len(timed) if timed else 0.0,
        ttft_seconds=tail([found.ttft_felt for found in timings]),
        tbt_seconds=tail(np.concatenate([found.chunk_gaps for found in timings]) if timings else []),
        tpot_seconds=tail([found.tpot for found in timings if found.tpot is not None]),
        worst_tbt_seconds=tail([found.worst_tbt for found in timings if found.worst_tbt is not None]),
        queue_seconds=tail([item.first_scheduled_ns - item.arrival_ns for item, _ in completed]),
    )


def _queue(finished: Sequence[FinishedRequest], begin_ns: int, end_ns: int) -> tuple[float, int]:
    """(mean, largest) number of accepted requests that wait for their first step, within the window."""
    changes: list[tuple[int, int]] = []
    waited_ns = 0
    for item in finished:
        if item.reason == REFUSED:
            continue
        until_ns = item.first_scheduled_ns if item.first_scheduled_ns >= 0 else item.end_ns
        low, high = max(item.arrival_ns, begin_ns), min(until_ns, end_ns)
        if high > low:
            waited_ns += high - low
            changes += [(low, 1), (high, -1)]
    length = largest = 0
    for _, change in sorted(changes):
        length += change
        largest = max(largest, length)
    return waited_ns / max(end_ns - begin_ns, 1), largest

"""The stamps of one request and the latencies that follow from them.

Owns: what counts as TTFT, ITL, queue time and E2E. Runs in: gateway. Must not know: clocks (times are arguments, in ns).

Gaps (TBT, ITL) lie between token events. An event of n tokens counts as one gap of the measured length and n - 1 gaps of
zero, as a client sees them; so a request of n tokens has n - 1 gaps exactly. A preemption shows as a long gap, and
changes neither TTFT nor queue time.
"""

from dataclasses import dataclass

from headrace.telemetry.accumulate import Counter, CounterFamily, Histogram
from headrace.telemetry.catalog import FINISHED_REASONS
from headrace.telemetry.containment import Faults, contained

_COMPLETED = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class RequestMeters:
    """What timelines feed: shared by all requests of a gateway."""

    started: Counter
    ended: CounterFamily  # by finished_reason
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    faults: Faults


@dataclass(frozen=True, slots=True)
class RequestLatencies:
    """Of one request, for its log line. None: it did not come to that."""

    queue_ns: int | None
    time_to_first_token_ns: int | None
    e2e_ns: int | None
    num_output_tokens: int


class RequestTimeline:
    """One request from arrival to its end. No method raises: a fault of measuring is counted and the request goes on.

    A stamp before an earlier one (two processes read the clock) counts as equal to it.
    """

    __slots__ = (
        "_arrival_ns",
        "_end_ns",
        "_first_token_ns",
        "_last_token_ns",
        "_meters",
        "_num_prompt_tokens",
        "_num_tokens",
        "_scheduled_ns",
        "faults",
    )

    def __init__(self, meters: RequestMeters, arrival_ns: int, num_prompt_tokens: int) -> None:
        self._meters = meters
        self._arrival_ns = arrival_ns
        self._num_prompt_tokens = num_prompt_tokens
        self._scheduled_ns = self._first_token_ns = self._end_ns = 0  # 0: not yet
        self._last_token_ns = arrival_ns
        self._num_tokens = 0
        self.faults = meters.faults
        self._begin()

    @contained
    def _begin(self) -> None:
        self._meters.started.add()

    @contained
    def start(self, first_scheduled_ns: int) -> None:
        """It left the queue. Only the first call counts: coming back after a preemption is no queueing."""
        if not self._scheduled_ns:
            self._scheduled_ns = max(first_scheduled_ns, self._arrival_ns)
            self._meters.queue_time.observe(self._scheduled_ns - self._arrival_ns)

    @contained
    def count_tokens(self, num_tokens: int, now_ns: int) -> None:
        """So many tokens came together. What comes after the end is not counted."""
        if num_tokens < 1 or self._end_ns:
            return
        meters = self._meters
        gap_ns = max(now_ns - self._last_token_ns, 0)
        if self._num_tokens:
            meters.inter_token_latency.observe(gap_ns)
        else:
            meters.time_to_first_token.observe(gap_ns)
            self._first_token_ns = now_ns
        if num_tokens > 1:
            meters.inter_token_latency.observe_many(0, num_tokens - 1)
        self._num_tokens += num_tokens
        self._last_token_ns += gap_ns

    @contained
    def end(self, finished_reason: str, now_ns: int, num_output_tokens: int | None = None) -> None:
        """It ended: one of catalog.FINISHED_REASONS (another one is a fault, and counts as error). Only the first call counts.

        `num_output_tokens`: what the client is told, where that differs from the tokens counted (cut at a stop string).
        """
        if self._end_ns:
            return
        self._end_ns = max(now_ns, self._last_token_ns, 1)
        meters = self._meters
        is_known = finished_reason in FINISHED_REASONS
        meters.ended.add(finished_reason if is_known else "error")
        meters.prompt_tokens.observe(self._num_prompt_tokens)
        meters.generation_tokens.observe(self._num_tokens if num_output_tokens is None else num_output_tokens)
        if finished_reason in _COMPLETED:
            meters.e2e_latency.observe(self._end_ns - self._arrival_ns)
        if not is_known:
            raise ValueError(f"no finished_reason: {finished_reason!r}")

    def latencies(self) -> RequestLatencies:
        """As far as it has come."""
        return RequestLatencies(
            queue_ns=self._scheduled_ns - self._arrival_ns if self._scheduled_ns else None,
            time_to_first_token_ns=max(self._first_token_ns - self._arrival_ns, 0) if self._num_tokens else None,
            e2e_ns=self._end_ns - self._arrival_ns if self._end_ns else None,
            num_output_tokens=self._num_tokens,
        )

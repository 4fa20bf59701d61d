"""The stamps of one request and the latencies that follow from them.

Owns: what counts as TTFT, ITL, TPOT, queue, prefill and decode time and E2E. Runs in: gateway. Must not know: clocks (times
are arguments, in ns).

Gaps (TBT, ITL) lie between token events. An event of n tokens counts as one gap of the measured length and n - 1 gaps of
zero, as a client sees them; so a request of n tokens has n - 1 gaps exactly. A preemption shows as a long gap, and
changes neither TTFT nor queue time. Queue, prefill and decode time of a request add up to its time from arrival to its last
token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.protocol.stalls import Stall, StallCause
from headrace.telemetry.accumulate import Counter, CounterFamily, Histogram
from headrace.telemetry.catalog import FINISHED_REASONS
from headrace.telemetry.containment import Faults, contained
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot, TimelineStamps

MAX_STALLS = 16  # of one request that are kept, the longest ones; all are counted
_COMPLETED = frozenset({"stop", "length"})
_NEVER = -1


@dataclass(frozen=True, slots=True)
class RequestMeters:
    """What timelines feed. Histograms but the last three are those of one service class; the rest is shared by all."""

    started: Counter
    ended: CounterFamily  # by finished_reason
    stalls: CounterFamily  # by cause
    stall_time: CounterFamily  # by cause
    tenant_requests: CounterFamily
    tenant_prompt_tokens: CounterFamily
    tenant_generation_tokens: CounterFamily
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    tokenize_time: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    stall_threshold_ns: int
    faults: Faults


class RequestTimeline:
    """One request from arrival to its end. No method raises: a fault of measuring is counted and the request goes on.

    Two processes read the clock, so a stamp may be before one that must precede it: then it counts as equal to that. What is
    told late (a start after the first token) lies between the stamps around it. So the stamps are always in order.
    """

    __slots__ = (
        "_arrival_ns",
        "_end_ns",
        "_error_code",
        "_finished_reason",
        "_first_token_ns",
        "_last_token_ns",
        "_meters",
        "_num_cached_tokens",
        "_num_output_tokens",
        "_num_preemptions",
        "_num_stalls",
        "_num_tokens",
        "_preempted_at",
        "_preempted_ns",
        "_queued_ns",
        "_scheduled_ns",
        "_stalls",
        "_tokenized_ns",
        "faults",
        "identity",
    )

    def __init__(
        self, meters: RequestMeters, identity: RequestIdentity, arrival_ns: int, tokenized_ns: int = 0, queued_ns: int = 0
    ) -> None:
        """`tokenized_ns`, `queued_ns`: 0 where it is not known."""
        self._meters = meters
        self.identity = identity
        self._arrival_ns = arrival_ns
        self._tokenized_ns = max(tokenized_ns, arrival_ns) if tokenized_ns else 0
        self._queued_ns = max(queued_ns, self._tokenized_ns, arrival_ns) if queued_ns else 0
        self._scheduled_ns = self._first_token_ns = self._end_ns = 0  # 0: not yet
        self._last_token_ns = arrival_ns
        self._num_tokens = 0
        self._num_output_tokens: int | None = None
        self._num_cached_tokens = self._num_preemptions = 0
        self._preempted_at = _NEVER  # its number of tokens when it was preempted: it is until another one comes
        self._preempted_ns = 0
        self._finished_reason = self._error_code = ""
        self._stalls: list[Stall] | None = None
        self._num_stalls = 0
        self.faults = meters.faults
        self._begin()

    @contained
    def _begin(self) -> None:
        meters = self._meters
        meters.started.add()
        meters.tenant_requests.add(self.identity.tenant)
        if self._tokenized_ns:
            meters.tokenize_time.observe(self._tokenized_ns - self._arrival_ns)

    @contained
    def start(self, first_scheduled_ns: int) -> None:
        """It left the queue. Only the first call counts: coming back after a preemption is no queueing. None after the end."""
        if self._scheduled_ns or self._end_ns:
            return
        scheduled_ns = max(first_scheduled_ns, self._latest_ns_before_start)
        if self._num_tokens:
            scheduled_ns = min(scheduled_ns, self._first_token_ns)
            self._meters.prefill_time.observe(self._first_token_ns - scheduled_ns)
        self._scheduled_ns = scheduled_ns
        self._meters.queue_time.observe(scheduled_ns - self._arrival_ns)

    @contained
    def count_tokens(self, num_tokens: int, now_ns: int) -> None:
        """So many tokens came together. What comes after the end is not counted."""
        if num_tokens < 1 or self._end_ns:
            return
        meters = self._meters
        if self._num_tokens:
            gap_ns = max(now_ns - self._last_token_ns, 0)
            meters.inter_token_latency.observe(gap_ns)
            self._last_token_ns += gap_ns
        else:
            self._first_token_ns = self._last_token_ns = max(now_ns, self._scheduled_ns, self._latest_ns_before_start)
            meters.time_to_first_token.observe(self._first_token_ns - self._arrival_ns)
            if self._scheduled_ns:
                meters.prefill_time.observe(self._first_token_ns - self._scheduled_ns)
        if num_tokens > 1:
            meters.inter_token_latency.observe_many(0, num_tokens - 1)
        self._num_tokens += num_tokens

    @contained
    def note_usage(self, num_cached_tokens: int, num_preemptions: int) -> None:
        """What the worker tells of it."""
        self._num_cached_tokens = num_cached_tokens
        self._num_preemptions = max(self._num_preemptions, num_preemptions)

    @contained
    def note_preempted(self, now_ns: int) -> None:
        """Its memory was taken."""
        self._num_preemptions += 1
        self._preempted_at = self._num_tokens
        self._preempted_ns = now_ns

    @contained
    def note_stalls(self, stalls: Iterable[Stall]) -> None:
        """Waits that are over. A slow reader may be known after the end, as what it was sent outlives the request."""
        for stall in stalls:
            self._note_stall(stall)

    @contained
    def note_cut_off(self, now_ns: int, cause: StallCause | None, waiting_cause: Callable[[], StallCause]) -> None:
        """It is about to end without the worker's word: the wait that its end cuts off is a stall when it was long enough.

        `cause`: what ended it, where that is the cause (it counts however short the wait was). `waiting_cause`: what kept
        those back that had not shown a token yet; asked only when needed.
        """
        if self._end_ns:
            return
        began_ns, state = self._last_token_ns, self.state
        if cause is None and state == "preempted":
            began_ns = max(began_ns, self._preempted_ns)
        duration_ns = max(now_ns - began_ns, 0)
        if cause is None and duration_ns >= self._meters.stall_threshold_ns:
            known = {"preempted": StallCause.PREEMPTED, "decode": StallCause.SLOW_STEP}
            cause = known.get(state) or waiting_cause()
        if cause is not None:
            self._note_stall(Stall(cause, began_ns, duration_ns))

    @contained
    def end(self, finished_reason: str, now_ns: int, num_output_tokens: int | None = None, error_code: str = "") -> None:
        """It ended: one of catalog.FINISHED_REASONS (another one is a fault, and counts as error). Only the first call counts.

        `num_output_tokens`: what the client is told, where that differs from the tokens counted (cut at a stop string).
        """
        if self._end_ns:
            return
        self._end_ns = max(now_ns, self._last_token_ns, self._scheduled_ns, self._latest_ns_before_start, 1)
        is_known = finished_reason in FINISHED_REASONS
        self._finished_reason = finished_reason if is_known else "error"
        self._error_code = error_code
        self._num_output_tokens = num_output_tokens
        self._count_end()
        if not is_known:
            raise ValueError(f"no finished_reason: {finished_reason!r}")

    def snapshot(self) -> TimelineSnapshot:
        """As far as it has come."""
        return TimelineSnapshot(
            identity=self.identity,
            stamps=TimelineStamps(
                received_ns=self._arrival_ns,
                tokenized_ns=self._tokenized_ns,
                queued_ns=self._queued_ns,
                first_scheduled_ns=self._scheduled_ns,
                first_token_ns=self._first_token_ns,
                last_token_ns=self._last_token_ns if self._num_tokens else 0,
                end_ns=self._end_ns,
            ),
            state=self.state,
            finished_reason=self._finished_reason,
            error_code=self._error_code,
            num_output_tokens=self._num_told_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
            stalls=tuple(sorted(self._stalls or (), key=lambda stall: stall.began_ns)),
            num_stalls=self._num_stalls,
        )

    @property
    def state(self) -> str:
        """As TimelineSnapshot.state. When it was scheduled is known with its first token, so "queued" includes the prefill."""
        if self._end_ns:
            return "finished"
        if self._preempted_at == self._num_tokens:
            return "preempted"
        if self._num_tokens:
            return "decode"
        return "prefill" if self._scheduled_ns else "queued"

    @property
    def last_progress_ns(self) -> int:
        """When its last token came; its arrival before the first one."""
        return self._last_token_ns

    @property
    def _latest_ns_before_start(self) -> int:
        return max(self._queued_ns, self._tokenized_ns, self._arrival_ns)

    @property
    def _num_told_tokens(self) -> int:
        return self._num_tokens if self._num_output_tokens is None else self._num_output_tokens

    def _count_end(self) -> None:
        meters, tenant = self._meters, self.identity.tenant
        num_prompt_tokens = self.identity.num_prompt_tokens
        meters.ended.add(self._finished_reason)
        meters.prompt_tokens.observe(num_prompt_tokens)
        meters.generation_tokens.observe(self._num_told_tokens)
        meters.tenant_prompt_tokens.add(tenant, amount=num_prompt_tokens)
        meters.tenant_generation_tokens.add(tenant, amount=self._num_told_tokens)
        if self._finished_reason in _COMPLETED:
            meters.e2e_latency.observe(self._end_ns - self._arrival_ns)
            if self._num_tokens:
                meters.decode_time.observe(self._last_token_ns - self._first_token_ns)
            if self._num_tokens > 1:
                meters.time_per_output_token.observe((self._end_ns - self._first_token_ns) // (self._num_tokens - 1))

    def _note_stall(self, stall: Stall) -> None:
        if stall.began_ns < self._arrival_ns:  # nobody waits before there is a request: only the rest was its wait
            ended_ns = max(stall.began_ns + stall.duration_ns, self._arrival_ns)
            stall = Stall(stall.cause, self._arrival_ns, ended_ns - self._arrival_ns)
        self._meters.stalls.add(stall.cause.value)
        self._meters.stall_time.add(stall.cause.value, amount=max(stall.duration_ns, 0))
        self._num_stalls += 1
        if self._stalls is None:
            self._stalls = []
        self._stalls.append(stall)
        if len(self._stalls) > MAX_STALLS:
            self._stalls.remove(min(self._stalls, key=lambda kept: kept.duration_ns))

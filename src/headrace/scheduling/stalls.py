"""Which waits of a request were long, and what took most of their time.

Owns: Wait, StallWatch. Runs in: worker, tests, simulation. Must not know: sequences, events, who is served next.

A request's life is cut into waits that follow one another: in the queue (arrival to first scheduled), in its prefill (to its
first token), between two tokens, and, when its memory is taken, from then to its next token. A wait that lasted at least the
threshold is a Stall. The rules by which time is given to causes:

- Queue: WORKER_BUSY until the first `schedule` that saw the request; then each time from one `schedule` to the next belongs to
  what stopped admission in the first of them. The stall spans the whole wait.
- Prefill: computing the request's own tokens is no wait. Of a step in which it has a row, the part that others' tokens are of
  all tokens is waited: PREFILL for rows of several tokens, SLOW_STEP for rows of one. A step without a row of it is waited
  whole: NO_BUDGET. The stall begins where the prefill does and lasts as long as these parts together.
- Between tokens: PREFILL when more than half of the time went into steps whose tokens, beyond its own, were mostly those of
  rows with several tokens; else SLOW_STEP. The stall spans the gap, its own row's computing included.
- PREEMPTED from the preemption to the next token, what is computed again included.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.protocol.stalls import Stall, StallCause

_QUEUE_CAUSES = (StallCause.WORKER_BUSY, StallCause.NO_SLOT, StallCause.NO_BLOCKS, StallCause.NO_BUDGET)
_PREFILL_CAUSES = (StallCause.NO_BUDGET, StallCause.PREFILL, StallCause.SLOW_STEP)
_NO_BUDGET, _PREFILL, _SLOW_STEP = range(3)  # places in _PREFILL_CAUSES


class WaitKind(enum.Enum):
    """What the present wait is for."""

    ARRIVED = enum.auto()  # no `schedule` has seen it yet
    QUEUED = enum.auto()
    PREFILL = enum.auto()
    BETWEEN_TOKENS = enum.auto()
    PREEMPTED = enum.auto()


@dataclass(slots=True, eq=False)
class Wait:
    """One request's present wait, and the stalls that no event has told yet. Written by the StallWatch only. Times in ns."""

    kind: WaitKind = WaitKind.ARRIVED
    began_ns: int = 0
    mark_ns: int = (
        0  # QUEUED: when first seen; PREFILL: up to when it is shared out; BETWEEN_TOKENS: prefill time at the last token
    )
    shares_ns: Sequence[int] = ()  # QUEUED: the watch's totals when first seen; PREFILL: waited so far; by cause
    stalls: tuple[Stall, ...] = ()

    def take_stalls(self) -> tuple[Stall, ...]:
        """Those since the last call; an event must tell them."""
        stalls, self.stalls = self.stalls, ()
        return stalls


class StallWatch:
    """Follows the waits of all requests. Costs a comparison for each token; causes are looked for only when a wait was long.

    In each step: `begin_step`, `admit` and `preempt` as it is planned, `end_step`; when its result is there `land`, `share` for
    each row, `progress` for each token. `queue` and `cut` at any time.
    """

    def __init__(self, threshold_ns: int) -> None:
        self.blocked_by: StallCause | None = None  # what stopped admission in the last step that was planned
        self._threshold_ns = threshold_ns
        self._arrived: set[Wait] = set()
        self._queue_ns = [0] * len(_QUEUE_CAUSES)  # time in which each of the causes stopped admission
        self._prefill_ns = 0  # time in steps that were mostly prefill
        self._scheduled_ns = 0
        self._landed_ns = 0
        self._landed_before_ns = 0
        self._num_tokens = 0  # of the step in flight
        self._num_prefill_tokens = 0  # of these, in rows with several
        self._is_in_flight = False

    def queue(self, wait: Wait, arrival_ns: int) -> None:
        """A request begins to wait."""
        wait.began_ns = arrival_ns
        self._arrived.add(wait)

    def begin_step(self, now_ns: int) -> None:
        """A step is going to be planned: whoever waits is seen now."""
        if self.blocked_by is not None:
            self._queue_ns[_QUEUE_CAUSES.index(self.blocked_by)] += now_ns - self._scheduled_ns
        self._scheduled_ns = now_ns
        for wait in self._arrived:
            wait.kind, wait.mark_ns, wait.shares_ns = WaitKind.QUEUED, now_ns, tuple(self._queue_ns)
        self._arrived.clear()

    def admit(self, wait: Wait, now_ns: int) -> None:
        """A request got memory: its prefill begins, or what it had lost is computed again."""
        if wait.kind is WaitKind.PREEMPTED:
            return
        self._close(wait, now_ns)
        wait.kind, wait.began_ns, wait.mark_ns, wait.shares_ns = WaitKind.PREFILL, now_ns, now_ns, [0] * len(_PREFILL_CAUSES)

    def preempt(self, wait: Wait, now_ns: int) -> None:
        """A request's memory was taken."""
        if wait.kind is not WaitKind.PREEMPTED:
            self._close(wait, now_ns)
            wait.kind, wait.began_ns, wait.shares_ns = WaitKind.PREEMPTED, now_ns, ()

    def end_step(self, blocked_by: StallCause | None, num_tokens: int, num_prefill_tokens: int) -> None:
        """The step is planned. `num_prefill_tokens`: those of its tokens that stand in rows with several."""
        self.blocked_by = blocked_by
        self._num_tokens, self._num_prefill_tokens = num_tokens, num_prefill_tokens
        self._is_in_flight = num_tokens > 0

    def land(self, now_ns: int) -> None:
        """The planned step has been computed, or has failed."""
        if not self._is_in_flight:
            return
        self._is_in_flight = False
        self._landed_before_ns, self._landed_ns = self._landed_ns, now_ns
        if 2 * self._num_prefill_tokens > self._num_tokens - 1:
            self._prefill_ns += now_ns - self._scheduled_ns

    def share(self, wait: Wait, num_tokens: int) -> None:
        """The step that has landed held so many tokens of this request."""
        if wait.kind is not WaitKind.PREFILL:
            return
        shares = list(wait.shares_ns)
        if wait.mark_ns != self._landed_before_ns:  # else it had a row in the step before: between steps nobody is served
            shares[_NO_BUDGET] += self._scheduled_ns - wait.mark_ns
        duration_ns = self._landed_ns - self._scheduled_ns
        num_prefill_tokens = self._num_prefill_tokens - (num_tokens if num_tokens > 1 else 0)
        prefill_ns = duration_ns * num_prefill_tokens // self._num_tokens
        shares[_PREFILL] += prefill_ns
        shares[_SLOW_STEP] += duration_ns * (self._num_tokens - num_tokens) // self._num_tokens - prefill_ns
        wait.shares_ns = shares
        wait.mark_ns = self._landed_ns

    def progress(self, wait: Wait, now_ns: int) -> None:
        """A token of this request is there."""
        if wait.kind is not WaitKind.BETWEEN_TOKENS:
            self._close(wait, now_ns)
            wait.kind, wait.shares_ns = WaitKind.BETWEEN_TOKENS, ()
        elif now_ns - wait.began_ns >= self._threshold_ns:
            self._close(wait, now_ns)
        wait.began_ns, wait.mark_ns = now_ns, self._prefill_ns

    def cut(self, wait: Wait, now_ns: int) -> None:
        """The request ends without getting on."""
        self._arrived.discard(wait)
        self._close(wait, now_ns)

    def _close(self, wait: Wait, now_ns: int) -> None:
        """The present wait is over: note it when it was long."""
        duration_ns = now_ns - wait.began_ns
        if duration_ns < self._threshold_ns:
            return
        if wait.kind is WaitKind.ARRIVED:
            cause = StallCause.WORKER_BUSY
        elif wait.kind is WaitKind.QUEUED:
            cause = self._queue_cause(wait, now_ns)
        elif wait.kind is WaitKind.PREFILL:
            shares = list(wait.shares_ns)
            if wait.mark_ns != self._landed_ns:
                until_ns = self._scheduled_ns if self._is_in_flight else now_ns
                shares[_NO_BUDGET] += max(0, until_ns - wait.mark_ns)
            cause = _largest(_PREFILL_CAUSES, shares)
            duration_ns = sum(shares)
        elif wait.kind is WaitKind.BETWEEN_TOKENS:
            cause = StallCause.PREFILL if 2 * (self._prefill_ns - wait.mark_ns) > duration_ns else StallCause.SLOW_STEP
        else:
            cause = StallCause.PREEMPTED
        if duration_ns >= self._threshold_ns:
            wait.stalls += (Stall(cause, wait.began_ns, duration_ns),)

    def _queue_cause(self, wait: Wait, now_ns: int) -> StallCause:
        shares = [total - before for total, before in zip(self._queue_ns, wait.shares_ns, strict=True)]
        shares[0] = wait.mark_ns - wait.began_ns
        if self.blocked_by is not None:
            shares[_QUEUE_CAUSES.index(self.blocked_by)] += now_ns - self._scheduled_ns
        return _largest(_QUEUE_CAUSES, shares)


def _largest(causes: tuple[StallCause, ...], shares: Sequence[int]) -> StallCause:
    """The cause with the largest share; the first of equals."""
    return causes[shares.index(max(shares))]

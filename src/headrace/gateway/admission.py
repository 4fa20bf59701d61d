"""Who may enter: a bound on requests in flight and on prompt tokens that wait, and when a refused one should come again.

Owns: AdmissionControl, Permit. Runs in: gateway. Must not know: rings, HTTP, the clock (time is an argument).
"""

import math
from dataclasses import dataclass

from headrace.protocol.errors import ErrorCode, RequestError

MAX_RETRY_AFTER_SECONDS = 60
WINDOW_SECONDS = 10  # over which completions and refusals are counted
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What may be in flight at once. `max_queued_prompt_tokens` counts requests that have shown no token yet."""

    max_in_flight: int  # requests that run or wait
    max_queued_prompt_tokens: int


class EventRate:
    """Counts events over the last WINDOW_SECONDS, in one bucket for each second: constant memory, O(1)."""

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_SECONDS
        self._second = 0  # the newest bucket's
        self._total = 0

    def count(self, now_ns: int) -> None:
        """One event now."""
        self._advance(now_ns)
        self._counts[self._second % WINDOW_SECONDS] += 1
        self._total += 1

    def num_recent(self, now_ns: int) -> int:
        """Events in the window that ends now."""
        self._advance(now_ns)
        return self._total

    def _advance(self, now_ns: int) -> None:
        second = now_ns // _NS_PER_SECOND
        for stale in range(max(self._second + 1, second - WINDOW_SECONDS + 1), second + 1):
            index = stale % WINDOW_SECONDS
            self._total -= self._counts[index]
            self._counts[index] = 0
        self._second = max(self._second, second)


class Permit:
    """The right of one request to be in flight: it lives exactly as long as the request's stream."""

    __slots__ = ("_admission", "_num_queued_tokens", "_released")

    def __init__(self, admission: "AdmissionControl", num_prompt_tokens: int) -> None:
        self._admission = admission
        self._num_queued_tokens = num_prompt_tokens
        self._released = False

    def leave_queue(self) -> None:
        """The prompt was computed: its tokens wait no longer. Idempotent."""
        self._admission._forget_queued(self._num_queued_tokens)
        self._num_queued_tokens = 0

    def release(self, now_ns: int, *, completed: bool) -> None:
        """The request is over. `completed`: it ran to its end, which is what the completion rate counts. Idempotent."""
        if self._released:
            return
        self._released = True
        self.leave_queue()
        self._admission._forget_in_flight(now_ns, completed)


class AdmissionControl:
    """Gives permits and counts them. A full house is an answer with Retry-After, never a wait."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._num_in_flight = 0
        self._num_queued_tokens = 0
        self._completions = EventRate()
        self._refusals = EventRate()

    @property
    def num_in_flight(self) -> int:
        """Permits that are out."""
        return self._num_in_flight

    @property
    def num_queued_prompt_tokens(self) -> int:
        """Prompt tokens of requests that have shown no token yet."""
        return self._num_queued_tokens

    def admit(self, num_prompt_tokens: int, now_ns: int) -> Permit:
        """A permit, or RequestError OVERLOADED. The only waiting prompt is never too long: the worker's limits decide that."""
        if self._num_in_flight >= self._limits.max_in_flight:
            raise self.refusal("Too many requests are in flight.", now_ns)
        queued = self._num_queued_tokens + num_prompt_tokens
        if self._num_queued_tokens and queued > self._limits.max_queued_prompt_tokens:
            raise self.refusal("Too many prompt tokens are waiting.", now_ns)
        self._num_in_flight += 1
        self._num_queued_tokens = queued
        return Permit(self, num_prompt_tokens)

    def refusal(self, reason: str, now_ns: int) -> RequestError:
        """Count one refusal; the error to answer with."""
        self._refusals.count(now_ns)
        return RequestError(
            f"{reason} Try again later.",
            code=ErrorCode.OVERLOADED,
            retry_after_seconds=self.retry_after_seconds(now_ns),
        )

    def retry_after_seconds(self, now_ns: int) -> int:
        """Time in which as many requests complete as were refused lately: those callers come again too. In 1..60.

        With no completion in the window the rate is taken as one per window, its upper bound.
        """
        num_competing = max(1, self._refusals.num_recent(now_ns))
        rate_per_second = max(1, self._completions.num_recent(now_ns)) / WINDOW_SECONDS
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(num_competing / rate_per_second)))

    def _forget_queued(self, num_tokens: int) -> None:
        self._num_queued_tokens -= num_tokens

    def _forget_in_flight(self, now_ns: int, completed: bool) -> None:
        self._num_in_flight -= 1
        if completed:
            self._completions.count(now_ns)

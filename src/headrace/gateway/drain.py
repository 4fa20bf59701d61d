"""How fast work leaves the queue, measured from what has left it lately.

Owns: EventRate, DrainMeter. Runs in: gateway, simulation. Must not know: requests, the clock (time is an argument).
"""

WINDOW_SECONDS = 10  # over which completions, refusals and drained work are counted
_NS_PER_SECOND = 1_000_000_000
MIN_BUSY_NS = 200_000_000  # of waiting in the window; with less the last rate that was measured stays


class EventRate:
    """Counts events over the last WINDOW_SECONDS, in one bucket for each second: constant memory, O(1)."""

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_SECONDS
        self._second = 0  # the newest bucket's
        self._total = 0

    def count(self, now_ns: int, amount: int = 1) -> None:
        """So many events now."""
        self._advance(now_ns)
        self._counts[self._second % WINDOW_SECONDS] += amount
        self._total += amount

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


class DrainMeter:
    """Prompt tokens that leave the queue for each second in which somebody waits.

    Time in which nobody waits is not counted: an idle server drains nothing and is not slow. What is measured is the rate at
    which a newcomer's wait shrinks, whatever bounds it (prefill, places, memory).
    """

    def __init__(self) -> None:
        self._tokens = EventRate()
        self._busy_ns = EventRate()
        self._num_waiting = 0
        self._busy_since_ns = 0
        self._last_rate: float | None = None

    def enter(self, now_ns: int) -> None:
        """A request begins to wait."""
        if not self._num_waiting:
            self._busy_since_ns = now_ns
        self._num_waiting += 1

    def leave(self, num_tokens: int, now_ns: int) -> None:
        """A request that waited has left; `num_tokens` of its prompt were served (0: it was given up)."""
        self._settle(now_ns)
        self._num_waiting -= 1
        if num_tokens:
            self._tokens.count(now_ns, num_tokens)

    def tokens_per_second(self, now_ns: int) -> float | None:
        """The rate over the window; the last one known while there is too little to tell; None before any."""
        self._settle(now_ns)
        busy_ns = self._busy_ns.num_recent(now_ns)
        num_tokens = self._tokens.num_recent(now_ns)
        if busy_ns >= MIN_BUSY_NS and num_tokens:
            self._last_rate = num_tokens * _NS_PER_SECOND / busy_ns
        return self._last_rate

    def _settle(self, now_ns: int) -> None:
        """Count the waiting time up to now."""
        if self._num_waiting and now_ns > self._busy_since_ns:
            self._busy_ns.count(now_ns, min(now_ns - self._busy_since_ns, WINDOW_SECONDS * _NS_PER_SECOND))
            self._busy_since_ns = now_ns

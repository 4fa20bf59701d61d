"""How fast work leaves the queue, measured from what has left it lately.

Owns: EventRate, DrainMeter, PlaceMeter. Runs in: gateway, simulation. Must not know: requests, the clock (time is an argument).
"""

from collections.abc import Mapping

WINDOW_SECONDS = 10  # over which completions, refusals and drained work are counted
_NS_PER_SECOND = 1_000_000_000
PLACE_MEMORY = 0.97  # weight of the past with each place that is given back
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


class PlaceMeter:
    """How long a request keeps its place, from its first token to its end.

    Time on all places over places given back (total time on test, Epstein and Sobel 1953): those that still run count with the
    time that they have had, so that it is not short answers alone that are seen at first. Both sums fade.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._place_ns = 0.0
        self._num_given_back = 0.0
        self._last_ns = 0

    def take(self, now_ns: int) -> None:
        """A request begins to run."""
        self._settle(now_ns)
        self.num_taken += 1

    def give_back(self, now_ns: int) -> None:
        """One has ended."""
        self._settle(now_ns)
        self.num_taken -= 1
        self._place_ns *= PLACE_MEMORY
        self._num_given_back = PLACE_MEMORY * (self._num_given_back + 1)

    def sums(self, now_ns: int) -> tuple[float, float]:
        """Time on places in nanoseconds, and the number of those given back, as far as remembered."""
        self._settle(now_ns)
        return self._place_ns, self._num_given_back

    def _settle(self, now_ns: int) -> None:
        if now_ns > self._last_ns:
            self._place_ns += self.num_taken * (now_ns - self._last_ns)
            self._last_ns = now_ns


def mean_place_ns(meters: Mapping[int, PlaceMeter], max_level: int, now_ns: int) -> float:
    """How long requests of levels up to this one keep a place; of all levels where those have given none back; 0: not known."""
    for level in (max_level, max(meters, default=max_level)):
        sums = [meter.sums(now_ns) for key, meter in meters.items() if key <= level]
        if num_given_back := sum(number for _, number in sums):
            return sum(place_ns for place_ns, _ in sums) / num_given_back
    return 0.0

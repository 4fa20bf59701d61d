"""How fast work leaves the queue, measured from what has left it lately.

Owns: EventRate, DrainMeter, PlaceMeter. Runs in: gateway, simulation. Must not know: requests, the clock (time is an argument).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

WINDOW_SECONDS = 10  # over which completions, refusals and drained work are counted
_NS_PER_SECOND = 1_000_000_000
PLACE_MEMORY = 0.97  # weight of the past with each place that is given back
RECENT_PLACES = 64  # of which the longest is remembered
MIN_BUSY_NS = 200_000_000  # of waiting in the window; with less the last rate that was measured stays
MIN_WAITING = 2  # from so many on the rate is one at which a queue shrinks


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


WaiterT = TypeVar("WaiterT")  # hashable


class DrainMeter(Generic[WaiterT]):
    """Prompt tokens that are computed for each second in which somebody waits for that.

    What is not counted is time in which nobody waits, for an idle server is not slow, and time in which every place is taken:
    who waits then waits for a place, which is the PlaceMeter's to tell, and the rate would outlive that wait. Nor is time in
    which a single prompt is under way: what one alone takes says little about what many would.

    A prompt's tokens count when all of it is computed, by the part of its time that is counted. So that a long one does not
    look like a standstill until then, of the one that has waited longest as much counts as if it took the whole time that is
    looked at: the rate errs to the fast side while there is doubt.
    """

    def __init__(self) -> None:
        self._tokens = EventRate()
        self._busy_ns = EventRate()
        self._waiting: dict[WaiterT, tuple[int, int, int]] = {}  # in order of coming: tokens, and both totals when it came
        self._has_places = True
        self._settled_ns = 0
        self._total_busy_ns = 0
        self._total_open_ns = 0  # in which a newcomer would have found a place
        self._last_rate: float | None = None

    def enter(self, who: WaiterT, num_tokens: int, now_ns: int) -> None:
        """A request begins to wait."""
        self._settle(now_ns)
        self._waiting[who] = (num_tokens, self._total_busy_ns, self._total_open_ns)

    def leave(self, who: WaiterT, now_ns: int, *, was_computed: bool) -> None:
        """A request waits no longer: its prompt was computed, or it was given up. KeyError when it did not wait."""
        self._settle(now_ns)
        num_tokens, busy_before_ns, open_before_ns = self._waiting.pop(who)
        open_ns = self._total_open_ns - open_before_ns
        if was_computed and open_ns:
            self._tokens.count(now_ns, round(num_tokens * (self._total_busy_ns - busy_before_ns) / open_ns))
        self._last_rate = self._measured(now_ns) or self._last_rate

    def set_places(self, now_ns: int, *, has_places: bool) -> None:
        """Whether a newcomer would find a place."""
        self._settle(now_ns)
        self._has_places = has_places

    def tokens_per_second(self, now_ns: int) -> float | None:
        """The rate over the window; the last one known while there is too little to tell; None before any."""
        self._settle(now_ns)
        return self._measured(now_ns) or self._last_rate

    def longest_waiting(self, max_num: int) -> Iterator[WaiterT]:
        """Those that have waited longest."""
        return islice(self._waiting, max_num)

    @property
    def _is_busy(self) -> bool:
        return self._has_places and len(self._waiting) >= MIN_WAITING

    def _measured(self, now_ns: int) -> float:
        """The rate over the window; 0: too little to tell."""
        busy_ns = self._busy_ns.num_recent(now_ns)
        if busy_ns < MIN_BUSY_NS:
            return 0.0
        num_tokens: float = self._tokens.num_recent(now_ns)
        if self._is_busy:
            num_oldest_tokens, _, open_before_ns = next(iter(self._waiting.values()))
            if open_ns := self._total_open_ns - open_before_ns:
                num_tokens += num_oldest_tokens * min(open_ns / busy_ns, busy_ns / open_ns)
        return num_tokens * _NS_PER_SECOND / busy_ns

    def _settle(self, now_ns: int) -> None:
        """Count the busy time up to now."""
        elapsed_ns = now_ns - self._settled_ns
        if elapsed_ns <= 0:
            return
        if self._has_places:
            self._total_open_ns += elapsed_ns
        if self._is_busy:
            self._total_busy_ns += elapsed_ns
            self._busy_ns.count(now_ns, min(elapsed_ns, WINDOW_SECONDS * _NS_PER_SECOND))
        self._settled_ns = now_ns


class PlaceMeter(Generic[WaiterT]):
    """How long a request keeps its place, from its first token to its end.

    Time on all places over places given back (total time on test, Epstein and Sobel 1953): those that still run count with the
    time that they have had, so that it is not short answers alone that are seen at first. Both sums fade. That is right for
    times that vary; where answers are of one length, the first to end would be taken for far too few. So no request is thought
    to keep a place for longer than the longest seen lately, those that still run included.
    """

    def __init__(self) -> None:
        self._since_ns: dict[WaiterT, int] = {}  # who runs, in order of coming
        self._lately_ns: deque[int] = deque(maxlen=RECENT_PLACES)
        self._place_ns = 0.0
        self._num_given_back = 0.0
        self._last_ns = 0

    def take(self, who: WaiterT, now_ns: int) -> None:
        """A request begins to run."""
        self._settle(now_ns)
        self._since_ns[who] = now_ns

    def give_back(self, who: WaiterT, now_ns: int) -> None:
        """It has ended. KeyError when it did not run."""
        self._settle(now_ns)
        self._lately_ns.append(now_ns - self._since_ns.pop(who))
        self._place_ns *= PLACE_MEMORY
        self._num_given_back = PLACE_MEMORY * (self._num_given_back + 1)

    def sums(self, now_ns: int) -> tuple[float, float]:
        """Time on places in nanoseconds, and the number of those given back, as far as remembered."""
        self._settle(now_ns)
        return self._place_ns, self._num_given_back

    def longest_ns(self, now_ns: int) -> int:
        """The longest time on a place that was seen lately."""
        oldest_ns = now_ns - next(iter(self._since_ns.values()), now_ns)
        return max(oldest_ns, max(self._lately_ns, default=0))

    def _settle(self, now_ns: int) -> None:
        if now_ns > self._last_ns:
            self._place_ns += len(self._since_ns) * (now_ns - self._last_ns)
            self._last_ns = now_ns


def mean_place_ns(meters: Mapping[int, PlaceMeter[WaiterT]], max_level: int, now_ns: int) -> float:
    """How long requests of levels up to this one keep a place; of all levels where those have given none back; 0: not known."""
    for level in (max_level, max(meters, default=max_level)):
        seen = [meter for key, meter in meters.items() if key <= level]
        sums = [meter.sums(now_ns) for meter in seen]
        if num_given_back := sum(number for _, number in sums):
            mean_ns = sum(place_ns for place_ns, _ in sums) / num_given_back
            return min(mean_ns, float(max(meter.longest_ns(now_ns) for meter in seen)))
    return 0.0

"""Bisection for the highest rate that holds, on a logarithmic scale, with a bound on the number of rates tried.

Owns: RateSearch, the interval of a share. Runs in: load tool. Must not know: what makes a rate hold.
"""

import math

GROWTH = 2.0  # while one side of the bracket is unknown
Z_95 = 1.959963984540054


class RateSearch:
    """Says which rate to try next; told whether it held, it closes in.

    `bracket` is (highest rate that held, lowest that did not); either is None when none was seen. The search ends when
    high / low <= 1 + `tolerance`, or when it would leave [min_rate, max_rate]. Raises ValueError for rates that cannot be.
    """

    def __init__(self, start: float, *, tolerance: float, min_rate: float, max_rate: float) -> None:
        if not 0 < min_rate <= max_rate or not tolerance > 0 or not start > 0:
            raise ValueError("rates and tolerance are above 0, and min_rate is at most max_rate")
        self._start = min(max(start, min_rate), max_rate)
        self._tolerance = tolerance
        self._min_rate, self._max_rate = min_rate, max_rate
        self.low: float | None = None
        self.high: float | None = None

    @property
    def bracket(self) -> tuple[float | None, float | None]:
        """(highest rate that held, lowest that did not)."""
        return self.low, self.high

    def next_rate(self) -> float | None:
        """The rate to try, or None: it is over."""
        if self.low is None and self.high is None:
            return self._start
        if self.high is None:
            assert self.low is not None
            return None if self.low >= self._max_rate else min(self.low * GROWTH, self._max_rate)
        if self.low is None:
            return None if self.high <= self._min_rate else max(self.high / GROWTH, self._min_rate)
        if self.high / self.low <= 1 + self._tolerance:
            return None
        return math.sqrt(self.low * self.high)

    def record(self, rate: float, *, held: bool) -> None:
        """Take in a verdict on `rate`, which next_rate gave."""
        if held:
            self.low = rate if self.low is None else max(self.low, rate)
        else:
            self.high = rate if self.high is None else min(self.high, rate)


def share_interval(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, "Probable inference", JASA 1927). (0, 1) when there is nothing to go by."""
    if total <= 0:
        return 0.0, 1.0
    share, z2 = hits / total, Z_95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)

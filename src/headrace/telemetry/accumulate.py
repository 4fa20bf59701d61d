"""Counters and histograms that cost well under a microsecond.

Owns: the values being accumulated. Runs in: gateway and worker, one thread each. Must not know: Prometheus, time.
Values are integers (nanoseconds, tokens), so sums are exact and nothing can become NaN.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Count. Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"a counter cannot go back by {-amount}")
        self.value += amount


class CounterFamily:
    """Counters by label values. A value in no set is counted as that label's `other`, so their number is bounded.

    Whatever a client sends, there are no more counters than combinations of known values.
    """

    __slots__ = ("_known", "_other", "values")

    def __init__(self, known: Sequence[Iterable[str]], other: Sequence[str]) -> None:
        """`known`: for each label the values it may take; `other`: for each label what stands for all the rest."""
        self._known = [frozenset(names) for names in known]
        self._other = tuple(other)
        self.values: dict[tuple[str, ...], int] = {}
        if len(self._known) == 1:  # shown as 0 from the start, so that a first event is a rise
            self.values = {(name,): 0 for name in sorted(self._known[0])}

    def add(self, *labels: str, amount: int = 1) -> None:
        """Count. Raises ValueError for a wrong number of labels, or a negative amount."""
        if amount < 0:
            raise ValueError(f"a counter cannot go back by {-amount}")
        key = tuple(
            label if label in names else rest for label, names, rest in zip(labels, self._known, self._other, strict=True)
        )
        self.values[key] = self.values.get(key, 0) + amount


class Histogram:
    """Counts by upper bound (inclusive, as Prometheus has it), and the sum. The last count is of what is above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[int]) -> None:
        """`bounds`: ascending, in the unit of the values. Raises ValueError otherwise."""
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bounds must ascend")
        self.bounds = list(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0

    def observe(self, value: int) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, value: int, count: int) -> None:
        """Count one value several times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)


class HistogramFamily:
    """One histogram for each known value of a label, made beforehand: who observes keeps the one that concerns it."""

    __slots__ = ("_other", "children")

    def __init__(self, bounds: Sequence[int], known: Iterable[str], other: str) -> None:
        """`other`: the known value that stands for all that are not known. Raises KeyError when it is none."""
        self.children = {value: Histogram(bounds) for value in known}
        self._other = self.children[other]

    def child(self, value: str) -> Histogram:
        """The histogram for this value of the label."""
        return self.children.get(value, self._other)

    @property
    def count(self) -> int:
        """How many values, over the label."""
        return sum(child.count for child in self.children.values())

    @property
    def sum(self) -> int:
        """Of all values, over the label."""
        return sum(child.sum for child in self.children.values())

"""Percentiles of what came between two looks at a histogram.

Owns: Distribution. Runs in: CLI, pure. Must not know: where buckets come from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts of buckets (not cumulative), one more than `bounds`: the last has no upper bound. `sum` of all values."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float = 0.0

    @classmethod
    def of_cumulative(cls, up_to: Mapping[float, float], total: float) -> "Distribution":
        """From what Prometheus shows: how many values are at most each bound, infinity among them (or nothing above)."""
        bounds = tuple(sorted(bound for bound in up_to if math.isfinite(bound)))
        cumulative = [up_to[bound] for bound in bounds]
        cumulative.append(up_to.get(math.inf, cumulative[-1] if cumulative else 0.0))
        counts = []
        before = 0.0
        for value in accumulate(cumulative, max):  # two scrapes of one bucket line may not go back; be safe
            counts.append(value - before)
            before = value
        return cls(bounds, tuple(counts), total)

    @property
    def count(self) -> float:
        """How many values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None of nothing."""
        return self.sum / self.count if self.count else None

    def since(self, earlier: "Distribution | None") -> "Distribution":
        """What was added since an earlier look. A histogram that went back began anew: all of it was added since."""
        if earlier is None or earlier.bounds != self.bounds:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        if any(count < 0 for count in counts) or self.sum < earlier.sum:
            return self
        return Distribution(self.bounds, counts, self.sum - earlier.sum)

    def percentile(self, percent: float) -> float | None:
        """Within its bucket by linear interpolation, as Prometheus' histogram_quantile; None of nothing.

        Of what lies above the last bound only that is known: the last bound is given.
        """
        total = self.count
        if total <= 0 or not self.bounds:
            return None
        rank = total * percent / 100
        below = 0.0
        for index, count in enumerate(self.counts[:-1]):
            if count > 0 and below + count >= rank:
                lower = self.bounds[index - 1] if index else min(0.0, self.bounds[0])
                return lower + (self.bounds[index] - lower) * max(0.0, rank - below) / count
            below += count
        return self.bounds[-1]

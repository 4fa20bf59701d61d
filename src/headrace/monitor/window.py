"""What happened between two looks at a server's counters and histograms.

Owns: Window. Runs in: CLI, pure. Must not know: which families there are.
"""

from dataclasses import dataclass

from headrace.monitor.exposition import Exposition
from headrace.monitor.percentiles import Distribution

NOTHING = Exposition()


@dataclass(frozen=True, slots=True)
class Window:
    """`earlier` is None where there was no look before; then nothing is known of a window.

    A family in which any sample went back began anew with its process: all that it counts came since, so no rate is negative.
    """

    earlier: Exposition | None
    later: Exposition
    seconds: float

    @property
    def is_open(self) -> bool:
        """Whether there are two looks to compare."""
        return self.earlier is not None and self.seconds > 0

    def added(self, counter: str, label: str) -> dict[str, float]:
        """How much was added, by the label's value. Empty when nothing is known."""
        if not self.is_open or self.earlier is None:
            return {}
        now, then = self.later.by_label(counter, label), self.earlier.by_label(counter, label)
        if any(now.get(value, 0.0) < count for value, count in then.items()):
            then = {}
        return {value: count - then.get(value, 0.0) for value, count in now.items()}

    def rate(self, counter: str) -> float | None:
        """How much was added per second, over all labels."""
        added = self.added_in_all(counter)
        return None if added is None else added / self.seconds

    def added_in_all(self, counter: str) -> float | None:
        """How much was added, over all labels."""
        now = self.later.total(counter)
        if not self.is_open or self.earlier is None or now is None:
            return None
        then = self.earlier.total(counter) or 0.0
        return now if now < then else now - then

    def share(self, part: str, *rest: str) -> float | None:
        """What one counter added, of what it and the others added together."""
        added = [self.added_in_all(name) for name in (part, *rest)]
        whole = sum(value or 0.0 for value in added)
        return None if added[0] is None or whole <= 0 else added[0] / whole

    def distribution(self, histogram: str) -> Distribution | None:
        """The values that came."""
        now = self.later.distribution(histogram)
        if not self.is_open or now is None:
            return None
        return now.since((self.earlier or NOTHING).distribution(histogram))

    def distributions(self, histogram: str, label: str) -> dict[str, Distribution]:
        """The values that came, by the label's value."""
        if not self.is_open:
            return {}
        then = (self.earlier or NOTHING).distributions(histogram, label)
        now = self.later.distributions(histogram, label)
        return {value: found.since(then.get(value)) for value, found in now.items()}

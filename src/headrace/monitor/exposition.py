"""What a server's /metrics says, as numbers to ask for: sums over labels, values by a label, and histograms.

Owns: Exposition, read_exposition. Runs in: CLI, pure. Must not know: sockets, what a family means.
The text format is Prometheus' own; its official parser reads it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from headrace.monitor.percentiles import Distribution

MAX_LINES = 40_000  # no server of ours has more than a few thousand
MAX_LINE_CHARS = 8192  # the parser's time grows with the square of a line


class ExpositionError(ValueError):
    """The text cannot be read as metrics. The message says why."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples by name. A family that the server does not have is None or empty everywhere, never 0."""

    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]] = field(default_factory=dict)

    def total(self, name: str) -> float | None:
        """The sum over all labels."""
        found = self.samples.get(name)
        return None if not found else sum(value for _, value in found)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label; samples without it are left out."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            if label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def distribution(self, name: str) -> Distribution | None:
        """A histogram over all its labels."""
        found = self._buckets(name, "")
        return found.get("")

    def distributions(self, name: str, label: str) -> dict[str, Distribution]:
        """A histogram for each value of one label."""
        return self._buckets(name, label)

    def _buckets(self, name: str, label: str) -> dict[str, Distribution]:
        """Plain counts of the buckets, by the value of a label; the empty label puts all into one."""
        cumulative: dict[str, dict[float, float]] = {}
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            if "le" not in labels or (label and label not in labels):
                continue
            of_value = cumulative.setdefault(labels[label] if label else "", {})
            bound = _number(labels["le"])
            if bound is not None:
                of_value[bound] = of_value.get(bound, 0.0) + value
        sums = self.by_label(f"{name}_sum", label) if label else {"": self.total(f"{name}_sum") or 0.0}
        return {
            value: Distribution.of_cumulative(buckets, sums.get(value, 0.0)) for value, buckets in cumulative.items() if buckets
        }


def read_exposition(text: str) -> Exposition:
    """Raises ExpositionError. Values that are no numbers are left out, as if the server had not shown them."""
    if text.count("\n") > MAX_LINES:
        raise ExpositionError(f"more than {MAX_LINES} lines")
    if max(map(len, text.split("\n"))) > MAX_LINE_CHARS:
        raise ExpositionError(f"a line of more than {MAX_LINE_CHARS} characters")
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for name, labels, value in _samples(text):
            samples.setdefault(name, []).append((labels, value))
    except (ValueError, KeyError, IndexError) as error:
        raise ExpositionError(f"the metrics do not parse: {error}") from None
    return Exposition({name: tuple(found) for name, found in samples.items()})


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isfinite(sample.value):
                yield sample.name, sample.labels, sample.value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value

"""Prometheus' text format, written fast: a scrape holds up every stream of the gateway for as long as it takes.

Owns: FamilyLines; the one home of prometheus_client. Runs in: gateway, when scraped. Must not know: where values come from.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/. What never changes of a line is made once: so a scrape
takes a tenth of the time that the library's own writer takes, which checks and escapes every label of every line anew.
"""

from collections.abc import Callable, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from headrace.telemetry.metric import Kind, Metric

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
Labels = tuple[str, ...]
_number: Callable[[float], str] = floatToGoString


class FamilyLines:
    """One family: its heading, and its samples of this scrape."""

    def __init__(self, metric: Metric, model_name: str) -> None:
        """`model_name`: the value of that label, for families that carry it; "" leaves it out."""
        self.metric = metric
        self._names = (*metric.labels, "model_name") if model_name and metric.is_of_model else metric.labels
        self._model = (model_name,) if len(self._names) > len(metric.labels) else ()
        self._heading = f"# HELP {metric.name} {_escape_help(metric.help)}\n# TYPE {metric.name} {metric.kind.value}\n"
        self._starts: dict[Labels, str] = {}
        self._histogram_starts: dict[Labels, tuple[str, ...]] = {}
        self._lines: list[str] = []

    def begin(self) -> None:
        """A scrape begins: forget the samples of the last one."""
        self._lines = [self._heading]

    def add(self, labels: Labels, value: float) -> None:
        """A sample of a counter or gauge, in the unit that is shown."""
        start = self._starts.get(labels)
        if start is None:
            start = self._starts[labels] = self._start(self.metric.name, labels)
        self._lines.append(f"{start} {_number(value)}\n")

    def add_histogram(self, labels: Labels, counts: Sequence[int], total: float) -> None:
        """Cumulative buckets from plain counts (one more than there are bounds), and the sum in the unit that is shown.

        Raises ValueError for another number of counts.
        """
        starts = self._histogram_starts.get(labels)
        if starts is None:
            starts = self._histogram_starts[labels] = self._bucket_starts(labels)
        *bucket_starts, count_start, sum_start = starts
        num_up_to = 0
        lines = []
        for start, count in zip(bucket_starts, counts, strict=True):
            num_up_to += count
            lines.append(f"{start} {_number(num_up_to)}\n")
        lines.append(f"{count_start} {_number(num_up_to)}\n{sum_start} {_number(total)}\n")
        self._lines += lines

    def text(self) -> str:
        """The family as it stands."""
        return "".join(self._lines)

    def _bucket_starts(self, labels: Labels) -> tuple[str, ...]:
        if self.metric.kind is not Kind.HISTOGRAM:
            raise ValueError(f"{self.metric.name} is no histogram")
        name = self.metric.name
        bounds = [*map(_number, self.metric.buckets), "+Inf"]
        return (
            *(self._start(f"{name}_bucket", labels, bound) for bound in bounds),
            self._start(f"{name}_count", labels),
            self._start(f"{name}_sum", labels),
        )

    def _start(self, name: str, labels: Labels, bound: str = "") -> str:
        values = dict(zip(self._names, (*labels, *self._model), strict=True))
        if bound:
            values["le"] = bound
        if not values:
            return name
        pairs = [f'{label}="{_escape_value(values[label])}"' for label in sorted(values)]
        return f"{name}{{{','.join(pairs)}}}"


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_value(text: str) -> str:
    return _escape_help(text).replace('"', r"\"")

"""From accumulators, probes and the worker's status page to what a scrape shows.

Owns: MetricsExporter, WorkerTotals. Runs in: gateway, when scraped. Must not know: how values were measured, the text format.
"""

from collections.abc import Callable, Iterator, Mapping

from headrace.telemetry import catalog
from headrace.telemetry.accumulate import CounterFamily, Histogram, HistogramFamily
from headrace.telemetry.exposition import CONTENT_TYPE, FamilyLines, Labels
from headrace.telemetry.meters import GatewayMeters, scale_of
from headrace.telemetry.metric import Kind, Metric, Reading, Source
from headrace.telemetry.status_fields import COUNTER_FIELDS, WorkerState, bucket_fields

Snapshot = Mapping[str, int]


class WorkerTotals:
    """Adds the counters of all lives of the worker, so that they never go back (Prometheus takes that for a restart).

    Show it every snapshot that is read, and the last one of a life when the worker has exited: what a life counted after
    the last snapshot shown is lost.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._earlier_lives = dict.fromkeys(COUNTER_FIELDS, 0)
        self._this_life = dict.fromkeys(COUNTER_FIELDS, 0)

    def note(self, snapshot: Snapshot) -> None:
        """Take the counters of a snapshot. One of an earlier life is ignored. Raises KeyError for a missing field."""
        counters = {field: snapshot[field] for field in COUNTER_FIELDS}
        epoch = snapshot["epoch"]
        if epoch < self._epoch:
            return
        if epoch > self._epoch:
            for field, value in self._this_life.items():
                self._earlier_lives[field] += value
            self._this_life = dict.fromkeys(COUNTER_FIELDS, 0)
            self._epoch = epoch
        self._this_life = {field: max(value, self._this_life[field]) for field, value in counters.items()}

    def total(self, field: str) -> int:
        """Over all lives."""
        return self._earlier_lives[field] + self._this_life[field]

    def histogram(self, prefix: str, num_bounds: int) -> tuple[list[int], int]:
        """Counts and sum of a histogram's fields over all lives."""
        return [self.total(name) for name in bucket_fields(prefix, num_bounds)], self.total(f"{prefix}_sum")


class MetricsExporter:
    """Renders all metrics of the catalogue.

    `read_status`: a snapshot of the status page's fields, or None when there is none. `ring_fill`: ratio by ring, read when
    scraped. `model_name`: the served name, a label of all samples but those of HTTP. A fault of what is read is counted, and
    the other metrics are shown.
    """

    def __init__(
        self,
        meters: GatewayMeters,
        read_status: Callable[[], Snapshot | None],
        ring_fill: Mapping[str, Callable[[], float]] | None = None,
        *,
        model_name: str = "",
    ) -> None:
        self._meters = meters
        self._read_status = read_status
        self._families = [FamilyLines(metric, model_name) for metric in catalog.METRICS]
        self._totals = WorkerTotals()
        self._is_worker_up = False
        self._probes: dict[str, dict[Labels, Callable[[], float]]] = {}
        for ring, read in (ring_fill or {}).items():
            self.add_probe("headrace_ring_fill_ratio", read, ring)
        self.add_probe("headrace_gateway_cpu_seconds_total", meters.cpu.process_ns)
        self.add_probe("headrace_gateway_tokens_total", meters.cpu.num_tokens)
        self.add_probe("headrace_gateway_cpu_seconds_per_token", meters.cpu.seconds_per_token)

    def add_probe(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Ask `read` for a value of this family at each scrape. Raises ValueError for a family that is not probed."""
        metric = catalog.BY_NAME.get(name)
        if metric is None or metric.source is not Source.PROBE or len(labels) != len(metric.labels):
            raise ValueError(f"{name} takes no probe with the labels {labels}")
        self._probes.setdefault(name, {})[labels] = read

    def worker_ready(self) -> None:
        """A worker is ready."""
        self._is_worker_up = True

    def worker_exited(self) -> None:
        """The worker is gone: keep what it had counted, and show none running from now on."""
        self._is_worker_up = False
        self._snapshot()

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of a scrape."""
        snapshot = self._snapshot()
        now = snapshot if snapshot is not None and self._is_worker_up else {}
        for lines in self._families:
            lines.begin()
            if lines.metric.source is Source.GATEWAY:
                self._show_accumulator(lines)
            elif lines.metric.source is Source.WORKER:
                self._show_status(lines, now)
            else:
                self._show_probes(lines)
        return "".join(lines.text() for lines in self._families).encode(), CONTENT_TYPE

    def _snapshot(self) -> Snapshot | None:
        try:
            snapshot = self._read_status()
            if snapshot is not None:
                self._totals.note(snapshot)
        except Exception as error:  # noqa: BLE001 - the gateway's own numbers are still worth showing
            self._meters.faults.note("read_status", error)
            return None
        return snapshot

    def _show_accumulator(self, lines: FamilyLines) -> None:
        metric = lines.metric
        scale = scale_of(metric)
        found = self._meters.accumulators[metric.name]
        if isinstance(found, Histogram):
            lines.add_histogram((), found.counts, found.sum * scale)
        elif isinstance(found, HistogramFamily):
            for value, child in found.children.items():
                lines.add_histogram((value,), child.counts, child.sum * scale)
        elif isinstance(found, CounterFamily):
            for labels, number in sorted(found.values.items()):
                lines.add(labels, number * scale)
        else:
            lines.add((), found.value * scale)

    def _show_status(self, lines: FamilyLines, now: Snapshot) -> None:
        metric = lines.metric
        scale = scale_of(metric)
        for index, labels, field in self._places(metric):
            if metric.kind is Kind.GAUGE:
                lines.add(labels, _READINGS[metric.reading](now, field, index))
            elif metric.kind is Kind.COUNTER:
                lines.add(labels, self._totals.total(field) * scale)
            else:
                counts, total = self._totals.histogram(field, len(metric.buckets))
                lines.add_histogram(labels, counts, total * scale)

    def _show_probes(self, lines: FamilyLines) -> None:
        metric = lines.metric
        for labels, read in self._probes.get(metric.name, {}).items():
            try:
                lines.add(labels, read() * scale_of(metric))
            except Exception as error:  # noqa: BLE001 - as in _snapshot
                self._meters.faults.note(metric.name, error)
        if metric.field:
            lines.add((metric.worker_value,), self._totals.total(metric.field) * scale_of(metric))

    def _places(self, metric: Metric) -> Iterator[tuple[int, Labels, str]]:
        """Where the status page has the family's series: the label value's place, the label values, the field."""
        if not metric.labels:
            yield 0, (), metric.field
            return
        values, _ = self._meters.label_values[metric.labels[0]]
        for index, value in enumerate(values):
            yield index, (value,), metric.field.format(index=index, value=value)


def _used_share(now: Snapshot, _field: str, _index: int) -> float:
    num_blocks = now.get("num_blocks", 0)
    return (num_blocks - now["num_free_blocks"] - now["num_cached_blocks"]) / num_blocks if num_blocks else 0.0


# Of gauges; `now` is empty while there is no worker.
_READINGS: dict[Reading, Callable[[Snapshot, str, int], float]] = {
    Reading.FIELD: lambda now, field, _: now.get(field, 0),
    Reading.IS_READY: lambda now, field, _: float(now.get(field, WorkerState.ABSENT) == WorkerState.READY),
    Reading.USED_SHARE: _used_share,
    Reading.MILLIONTHS: lambda now, field, _: now.get(field, 0) / 1e6,
    Reading.NANOSECONDS: lambda now, field, _: now.get(field, 0) / 1e9,
    Reading.IS_CAUSE: lambda now, field, index: float(now.get(field, 0) == index + 1),
}

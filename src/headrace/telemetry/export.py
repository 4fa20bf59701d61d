"""From accumulators and the worker's status page to the text that Prometheus reads.

Owns: exposition; the one home of prometheus_client. Runs in: gateway, when scraped. Must not know: how values were measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from headrace.telemetry import catalog
from headrace.telemetry.accumulate import CounterFamily, Histogram
from headrace.telemetry.catalog import Kind, Metric, Source
from headrace.telemetry.meters import GatewayMeters, scale_of
from headrace.telemetry.status_fields import COUNTER_FIELDS, WorkerState, bucket_fields


class WorkerTotals:
    """Adds the counters of all lives of the worker, so that they never go back (Prometheus takes that for a restart).

    Show it every snapshot that is read, and the last one of a life when the worker has exited: what a life counted after
    the last snapshot shown is lost.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._earlier_lives = dict.fromkeys(COUNTER_FIELDS, 0)
        self._this_life = dict.fromkeys(COUNTER_FIELDS, 0)

    def note(self, snapshot: Mapping[str, int]) -> None:
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


class MetricsExporter:
    """Renders all metrics of the catalogue, in a registry of its own.

    `read_status`: a snapshot of the status page's fields, or None when there is none. `ring_fill`: ratio by ring, read when
    scraped; its names are the label's values. A fault of either is counted, and the other metrics are shown.
    """

    def __init__(
        self,
        meters: GatewayMeters,
        read_status: Callable[[], Mapping[str, int] | None],
        ring_fill: Mapping[str, Callable[[], float]] | None = None,
    ) -> None:
        self._meters = meters
        self._read_status = read_status
        self._ring_fill = dict(ring_fill or {})
        self._totals = WorkerTotals()
        self._is_worker_up = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self._collect))

    def worker_ready(self) -> None:
        """A worker is ready."""
        self._is_worker_up = True

    def worker_exited(self) -> None:
        """The worker is gone: keep what it had counted, and show none running from now on."""
        self._is_worker_up = False
        self._snapshot()

    def exposition(self) -> tuple[bytes, str]:
        """Body and content type of a scrape."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _collect(self) -> Iterator[Family]:
        snapshot = self._snapshot()
        now = snapshot if snapshot is not None and self._is_worker_up else {}
        for metric in catalog.METRICS:
            if metric.source is Source.GATEWAY:
                yield self._gateway_family(metric)
            elif metric.source is Source.RINGS:
                yield _labelled_gauge(metric, self._ring_ratios())
            elif metric.kind is Kind.GAUGE:
                yield GaugeMetricFamily(metric.name, metric.help, value=_gauge_value(metric, now))
            elif metric.kind is Kind.COUNTER:
                yield CounterMetricFamily(metric.name, metric.help, value=self._totals.total(metric.field))
            else:
                names = bucket_fields(metric.field, len(metric.buckets))
                counts = [self._totals.total(name) for name in names]
                yield _histogram(metric, counts, self._totals.total(f"{metric.field}_sum"))

    def _snapshot(self) -> Mapping[str, int] | None:
        try:
            snapshot = self._read_status()
            if snapshot is not None:
                self._totals.note(snapshot)
        except Exception as error:  # noqa: BLE001 - the gateway's own numbers are still worth showing
            self._meters.faults.note("read_status", error)
            return None
        return snapshot

    def _ring_ratios(self) -> Iterator[tuple[str, float]]:
        for name, read in self._ring_fill.items():
            try:
                yield name, read()
            except Exception as error:  # noqa: BLE001 - as above
                self._meters.faults.note("ring_fill", error)

    def _gateway_family(self, metric: Metric) -> Family:
        found = self._meters.accumulators[metric.name]
        if isinstance(found, Histogram):
            return _histogram(metric, found.counts, found.sum)
        if isinstance(found, CounterFamily):
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.label.split(","))
            for labels, value in sorted(found.values.items()):
                family.add_metric(labels, value)
            return family
        return CounterMetricFamily(metric.name, metric.help, value=found.value)


class _Families(Collector):
    """What the registry asks at each scrape."""

    def __init__(self, collect: Callable[[], Iterator[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Family]:
        return self._collect()


def _gauge_value(metric: Metric, snapshot: Mapping[str, int]) -> float:
    """Of a worker's gauge; 0 for an empty snapshot (no worker)."""
    if metric.name == "headrace_worker_up":
        return float(bool(snapshot) and snapshot["state"] == WorkerState.READY)
    if metric.name == "headrace_kv_cache_usage_perc":
        num_blocks = snapshot.get("num_blocks", 0)
        if not num_blocks:
            return 0.0
        return (num_blocks - snapshot["num_free_blocks"] - snapshot["num_cached_blocks"]) / num_blocks
    return snapshot.get(metric.field, 0)


def _labelled_gauge(metric: Metric, values: Iterable[tuple[str, float]]) -> Family:
    family = GaugeMetricFamily(metric.name, metric.help, labels=[metric.label])
    for label, value in values:
        family.add_metric([label], value)
    return family


def _histogram(metric: Metric, counts: Sequence[int], total: int) -> Family:
    """Cumulative buckets from plain counts, in the unit that is shown."""
    family = HistogramMetricFamily(metric.name, metric.help)
    buckets, num_up_to = [], 0
    for bound, count in zip((*metric.buckets, float("inf")), counts, strict=True):
        num_up_to += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(num_up_to)))
    family.add_metric([], buckets, total * scale_of(metric))
    return family

"""All accumulators of a gateway, made from the catalogue.

Owns: what the gateway counts. Runs in: gateway, on the event loop. Must not know: exposition, rings.
"""

from collections.abc import Iterable
from typing import TypeVar

from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry import catalog
from headrace.telemetry.accumulate import Counter, CounterFamily, Histogram, HistogramFamily
from headrace.telemetry.containment import Faults, contained
from headrace.telemetry.cpu import GatewayCpu
from headrace.telemetry.metric import Kind, Metric, Source
from headrace.telemetry.snapshot import RequestIdentity
from headrace.telemetry.timeline import RequestMeters, RequestTimeline

Accumulator = Counter | CounterFamily | Histogram | HistogramFamily
LabelValues = dict[str, tuple[tuple[str, ...], str]]
DEFAULT_STALL_THRESHOLD_MS = 250.0

Wanted = TypeVar("Wanted", Counter, CounterFamily, Histogram, HistogramFamily)


class GatewayMeters:
    """Counts for one gateway. No method raises: what goes wrong is counted in headrace_metrics_faults_total and logged."""

    def __init__(
        self,
        http_routes: Iterable[str] = catalog.HTTP_ROUTES,
        *,
        traffic: TrafficPolicy | None = None,
        stall_threshold_ms: float = DEFAULT_STALL_THRESHOLD_MS,
    ) -> None:
        """`http_routes`: the route templates; every other route counts as "unmatched"."""
        self.traffic = traffic or TrafficPolicy()
        self.stall_threshold_ns = round(stall_threshold_ms * 1e6)
        self.label_values: LabelValues = catalog.label_values(self.traffic, tuple(http_routes))
        self.accumulators: dict[str, Accumulator] = {
            metric.name: _accumulator(metric, self.label_values)
            for metric in catalog.METRICS
            if metric.source is Source.GATEWAY
        }
        self.faults = Faults(self._find(Counter, "metrics_faults_total"))
        self._by_class = {name: self._request_meters(name) for name in self.traffic.class_names}
        self.cpu = GatewayCpu(self._num_tokens)
        self._http_requests = self._find(CounterFamily, "http_requests_total")
        self._rejections = self._find(CounterFamily, "admission_rejections_total")
        self._reject_reasons = self._find(CounterFamily, "rejections_total")
        self._worker_restarts = self._find(Counter, "worker_restarts_total")

    def start_request(
        self, identity: RequestIdentity, arrival_ns: int, tokenized_ns: int = 0, queued_ns: int = 0
    ) -> RequestTimeline:
        """Count an accepted request; the timeline takes its stamps and must be told its end."""
        meters = self._by_class.get(identity.service_class) or self._by_class[self.traffic.default_class]
        return RequestTimeline(meters, identity, arrival_ns, tokenized_ns, queued_ns)

    @contained
    def count_http(self, route: str, status: int) -> None:
        """Count an answered HTTP request by its route template."""
        self._http_requests.add(route, str(status))

    @contained
    def count_rejection(self, code: str, reason: str = "") -> None:
        """Count a request refused before it started by its error's wire code, and by RejectReason if the door was closed."""
        self._rejections.add(code)
        if reason:
            self._reject_reasons.add(reason)

    @contained
    def count_worker_restart(self) -> None:
        """Count a worker that is gone and is to be replaced."""
        self._worker_restarts.add()

    def _request_meters(self, service_class: str) -> RequestMeters:
        def latency(name: str) -> Histogram:
            return self._find(HistogramFamily, name).child(service_class)

        return RequestMeters(
            started=self._find(Counter, "requests_started_total"),
            ended=self._find(CounterFamily, "request_success_total"),
            stalls=self._find(CounterFamily, "stalls_total"),
            stall_time=self._find(CounterFamily, "stall_seconds_total"),
            tenant_requests=self._find(CounterFamily, "tenant_requests_total"),
            tenant_prompt_tokens=self._find(CounterFamily, "tenant_prompt_tokens_total"),
            tenant_generation_tokens=self._find(CounterFamily, "tenant_generation_tokens_total"),
            time_to_first_token=latency("time_to_first_token_seconds"),
            inter_token_latency=latency("inter_token_latency_seconds"),
            time_per_output_token=latency("request_time_per_output_token_seconds"),
            e2e_latency=latency("e2e_request_latency_seconds"),
            queue_time=latency("request_queue_time_seconds"),
            prefill_time=latency("request_prefill_time_seconds"),
            decode_time=latency("request_decode_time_seconds"),
            tokenize_time=self._find(Histogram, "request_tokenize_time_seconds"),
            prompt_tokens=self._find(Histogram, "request_prompt_tokens"),
            generation_tokens=self._find(Histogram, "request_generation_tokens"),
            stall_threshold_ns=self.stall_threshold_ns,
            faults=self.faults,
        )

    def _num_tokens(self) -> int:
        """Each token is either a request's first or has a gap before it."""
        return sum(meters.time_to_first_token.count + meters.inter_token_latency.count for meters in self._by_class.values())

    def _find(self, kind: type[Wanted], name: str) -> Wanted:
        found = self.accumulators[f"headrace_{name}"]
        if not isinstance(found, kind):
            raise TypeError(f"{name} is no {kind.__name__}")
        return found


def scale_of(metric: Metric) -> float:
    """What one counted unit is in the unit shown: nanoseconds are counted where seconds are shown. Gauges are as shown."""
    return 1e-9 if metric.unit == "seconds" and metric.kind is not Kind.GAUGE else 1.0


def _accumulator(metric: Metric, label_values: LabelValues) -> Accumulator:
    sets = [label_values[label] for label in metric.labels]
    if metric.kind is Kind.HISTOGRAM:
        bounds = [round(bound / scale_of(metric)) for bound in metric.buckets]
        return HistogramFamily(bounds, *sets[0]) if sets else Histogram(bounds)
    if not sets:
        return Counter()
    return CounterFamily([known for known, _ in sets], [other for _, other in sets])

"""All accumulators of a gateway, made from the catalogue.

Owns: what the gateway counts. Runs in: gateway, on the event loop. Must not know: exposition, rings.
"""

from collections.abc import Iterable

from headrace.telemetry import catalog
from headrace.telemetry.accumulate import Counter, CounterFamily, Histogram
from headrace.telemetry.catalog import Kind, Metric, Source
from headrace.telemetry.containment import Faults, contained
from headrace.telemetry.timeline import RequestMeters, RequestTimeline

Accumulator = Counter | CounterFamily | Histogram


class GatewayMeters:
    """Counts for one gateway. No method raises: what goes wrong is counted in headrace_metrics_faults_total and logged."""

    def __init__(self, http_routes: Iterable[str] = catalog.HTTP_ROUTES) -> None:
        """`http_routes`: the route templates; every other route counts as "unmatched"."""
        label_sets = {
            "finished_reason": (catalog.FINISHED_REASONS, "error"),
            "code": (catalog.ERROR_CODES, catalog.OTHER),
            "route": (tuple(http_routes), catalog.UNMATCHED_ROUTE),
            "status": (catalog.HTTP_STATUSES, catalog.OTHER),
        }
        self.accumulators: dict[str, Accumulator] = {
            metric.name: _accumulator(metric, label_sets) for metric in catalog.METRICS if metric.source is Source.GATEWAY
        }
        self.faults = Faults(self._counter("headrace_metrics_faults_total"))
        self._requests = RequestMeters(
            started=self._counter("headrace_requests_started_total"),
            ended=self._family("headrace_request_success_total"),
            time_to_first_token=self._histogram("headrace_time_to_first_token_seconds"),
            inter_token_latency=self._histogram("headrace_inter_token_latency_seconds"),
            e2e_latency=self._histogram("headrace_e2e_request_latency_seconds"),
            queue_time=self._histogram("headrace_request_queue_time_seconds"),
            prompt_tokens=self._histogram("headrace_request_prompt_tokens"),
            generation_tokens=self._histogram("headrace_request_generation_tokens"),
            faults=self.faults,
        )
        self._http_requests = self._family("headrace_http_requests_total")
        self._rejections = self._family("headrace_admission_rejections_total")
        self._worker_restarts = self._counter("headrace_worker_restarts_total")

    def start_request(self, arrival_ns: int, num_prompt_tokens: int) -> RequestTimeline:
        """Count an accepted request; the timeline takes its stamps and must be told its end."""
        return RequestTimeline(self._requests, arrival_ns, num_prompt_tokens)

    @contained
    def count_http(self, route: str, status: int) -> None:
        """Count an answered HTTP request by its route template."""
        self._http_requests.add(route, str(status))

    @contained
    def count_rejection(self, code: str) -> None:
        """Count a request refused at the door by its error's wire code."""
        self._rejections.add(code)

    @contained
    def count_worker_restart(self) -> None:
        """Count a worker that is gone and is to be replaced."""
        self._worker_restarts.add()

    def _counter(self, name: str) -> Counter:
        found = self.accumulators[name]
        if not isinstance(found, Counter):
            raise TypeError(f"{name} is no plain counter")
        return found

    def _family(self, name: str) -> CounterFamily:
        found = self.accumulators[name]
        if not isinstance(found, CounterFamily):
            raise TypeError(f"{name} is no counter with labels")
        return found

    def _histogram(self, name: str) -> Histogram:
        found = self.accumulators[name]
        if not isinstance(found, Histogram):
            raise TypeError(f"{name} is no histogram")
        return found


def scale_of(metric: Metric) -> float:
    """What one accumulated unit is in the unit shown: accumulators count nanoseconds where seconds are shown."""
    return 1e-9 if metric.unit == "seconds" else 1.0


def _accumulator(metric: Metric, label_sets: dict[str, tuple[tuple[str, ...], str]]) -> Accumulator:
    if metric.kind is Kind.HISTOGRAM:
        return Histogram([round(bound / scale_of(metric)) for bound in metric.buckets])
    if not metric.label:
        return Counter()
    sets = [label_sets[label] for label in metric.label.split(",")]
    return CounterFamily([known for known, _ in sets], [other for _, other in sets])

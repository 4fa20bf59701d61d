"""One table of every metric, and the values that labels may take.

Owns: the names that operators see. Runs in: everywhere. Must not know: how values are kept or shown.
Names follow vLLM's, with the prefix headrace_. A label's values come from fixed sets, never from a client.
docs/metrics.md is made from this table (tools/metrics_page.py).
"""

from headrace.protocol.errors import ErrorCode, RejectReason
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.catalog_worker import NOW_METRICS, STEP_METRICS
from headrace.telemetry.metric import LATENCY_BUCKETS, STEP_STAGES, TOKEN_BUCKETS, Kind, Metric, Source

FINISHED_REASONS = ("stop", "length", "abort", "error", "deadline")
_REASON_NAMES = {FinishReason.CANCELLED: "abort"}
ERROR_CODES = tuple(member.value.code for member in ErrorCode)
REJECT_REASONS = tuple(reason.value for reason in RejectReason)
HTTP_STATUSES = tuple(
    str(status)
    for status in (200, 204, 400, 401, 403, 404, 405, 408, 411, 413, 415, 421, 422, 429, 431, 499, 500, 501, 502, 503, 504)
)
OTHER = "other"  # for what is in no set of a label's values
UNMATCHED_ROUTE = "unmatched"
HTTP_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{model:path}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/debug/requests",
    "/debug/log-level",
    "/version",
    "/openapi.json",
    "/docs",
)  # fmt: skip
STALL_CAUSES = tuple(cause.value for cause in StallCause)
RINGS = ("request", "event")
PROCESSES = ("gateway", "worker")


def finished_reason(reason: FinishReason) -> str:
    """The label value for the way in which a request ended (vLLM calls a cancelled one aborted)."""
    return _REASON_NAMES.get(reason, reason.value)


def label_values(traffic: TrafficPolicy, http_routes: tuple[str, ...] = HTTP_ROUTES) -> dict[str, tuple[tuple[str, ...], str]]:
    """For each label the values that it may take, and the one that stands for all the rest."""
    return {
        "finished_reason": (FINISHED_REASONS, "error"),
        "code": (ERROR_CODES, OTHER),
        "reason": (REJECT_REASONS, OTHER),
        "route": (http_routes, UNMATCHED_ROUTE),
        "status": (HTTP_STATUSES, OTHER),
        "class": (traffic.class_names, traffic.default_class),
        "tenant": (traffic.tenant_names, OTHER),
        "cause": (STALL_CAUSES, OTHER),
        "stage": (STEP_STAGES, OTHER),
        "ring": (RINGS, OTHER),
        "process": (PROCESSES, OTHER),
    }


def _latency(name: str, text: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, Source.GATEWAY, text, unit="seconds", buckets=LATENCY_BUCKETS, labels=("class",))


def _counter(name: str, text: str, *, unit: str = "", labels: tuple[str, ...] = (), is_of_model: bool = True) -> Metric:
    return Metric(name, Kind.COUNTER, Source.GATEWAY, text, unit=unit, labels=labels, is_of_model=is_of_model)


# Of requests, as the gateway sees them. Arrival: the request's body was complete.
REQUEST_METRICS = (
    _counter("headrace_requests_started_total", "Requests that were accepted."),
    _counter(
        "headrace_request_success_total",
        "Requests that ended, by reason; over all reasons it reaches the number of those started.",
        labels=("finished_reason",),
    ),
    _latency("headrace_time_to_first_token_seconds", "Arrival to first token, once for each request that emitted one."),
    _latency(
        "headrace_inter_token_latency_seconds",
        "TBT (ITL): gaps between consecutive tokens of a request. Of n tokens that come together the first has the gap that "
        "was measured, and the others have gaps of 0.",
    ),
    _latency(
        "headrace_request_time_per_output_token_seconds",
        "TPOT: (E2E - TTFT) / (output tokens - 1), once for each request that ended with stop or length and had two tokens.",
    ),
    _latency("headrace_e2e_request_latency_seconds", "Arrival to end of requests that ended with stop or length."),
    _latency("headrace_request_queue_time_seconds", "Arrival until the request was first scheduled."),
    _latency("headrace_request_prefill_time_seconds", "First scheduled to first token."),
    _latency("headrace_request_decode_time_seconds", "First to last token of requests that ended with stop or length."),
    Metric(
        "headrace_request_tokenize_time_seconds",
        Kind.HISTOGRAM,
        Source.GATEWAY,
        "Arrival until the request was checked, rendered and tokenized.",
        unit="seconds",
        buckets=LATENCY_BUCKETS,
    ),
    Metric(
        "headrace_request_prompt_tokens",
        Kind.HISTOGRAM,
        Source.GATEWAY,
        "Prompt tokens of each request that ended.",
        unit="tokens",
        buckets=TOKEN_BUCKETS,
    ),
    Metric(
        "headrace_request_generation_tokens",
        Kind.HISTOGRAM,
        Source.GATEWAY,
        "Output tokens of each request that ended, for whatever reason.",
        unit="tokens",
        buckets=TOKEN_BUCKETS,
    ),
    _counter("headrace_tenant_requests_total", "Requests that were accepted, by tenant.", labels=("tenant",)),
    _counter(
        "headrace_tenant_prompt_tokens_total",
        "Prompt tokens of requests that ended, by tenant; those found in the prefix cache are among them.",
        unit="tokens",
        labels=("tenant",),
    ),
    _counter(
        "headrace_tenant_generation_tokens_total",
        "Output tokens of requests that ended, by tenant.",
        unit="tokens",
        labels=("tenant",),
    ),
    _counter(
        "headrace_stalls_total",
        "Waits of a request that lasted at least the stall threshold, by cause, counted when the wait is over.",
        labels=("cause",),
    ),
    _counter("headrace_stall_seconds_total", "Duration of those waits.", unit="seconds", labels=("cause",)),
)

# The gateway itself. Faults stand last, so that a scrape shows those that it met itself.
GATEWAY_METRICS = (
    _counter("headrace_admission_rejections_total", "Requests that were refused at the door, by error code.", labels=("code",)),
    _counter(
        "headrace_rejections_total",
        "Requests that admission turned away, by reason: a bound of the server or of the class, a first token that would come "
        "too late, the tenant's share, shedding.",
        labels=("reason",),
    ),
    Metric(
        "headrace_predicted_wait_seconds",
        Kind.GAUGE,
        Source.PROBE,
        "What a newcomer of the class would wait until its prompt is computed, as admission predicts it; 0 before anything was "
        "measured.",
        unit="seconds",
        labels=("class",),
    ),
    Metric(
        "headrace_admission_promises",
        Kind.GAUGE,
        Source.PROBE,
        "Refused callers who were told when to come again and for whom a place is kept.",
    ),
    _counter(
        "headrace_http_requests_total",
        "HTTP requests, by route template and status.",
        labels=("route", "status"),
        is_of_model=False,
    ),
    _counter("headrace_worker_restarts_total", "Times that a worker was gone and was to be replaced."),
    Metric(
        "headrace_ring_fill_ratio",
        Kind.GAUGE,
        Source.PROBE,
        "Fill of a ring between gateway and worker, 0 to 1.",
        labels=("ring",),
    ),
    Metric(
        "headrace_ring_full_total",
        Kind.COUNTER,
        Source.PROBE,
        "Times that a message found no room in a ring: a request is refused, anything else is kept and sent later.",
        labels=("ring",),
        field="num_event_ring_full",
        worker_value="event",
    ),
    Metric(
        "headrace_gateway_cpu_seconds_total",
        Kind.COUNTER,
        Source.PROBE,
        "Processor time of the gateway process, all its threads.",
        unit="seconds",
    ),
    Metric(
        "headrace_gateway_tokens_total",
        Kind.COUNTER,
        Source.PROBE,
        "Output tokens that the gateway took from the worker for its clients.",
        unit="tokens",
    ),
    Metric(
        "headrace_gateway_cpu_seconds_per_token",
        Kind.GAUGE,
        Source.PROBE,
        "Processor time of the gateway for each output token over the last 10 seconds; 0 when there was none.",
        unit="seconds",
    ),
    Metric(
        "headrace_record_lines_total",
        Kind.COUNTER,
        Source.PROBE,
        "Lines written to the record of traffic (--record), by process.",
        labels=("process",),
        field="num_record_lines",
        worker_value="worker",
    ),
    Metric(
        "headrace_record_drops_total",
        Kind.COUNTER,
        Source.PROBE,
        "Lines that the record could not take: its disk or its greatest size stood against it.",
        labels=("process",),
        field="num_record_drops",
        worker_value="worker",
    ),
    _counter("headrace_metrics_faults_total", "Faults inside the measuring itself; none of them failed a request."),
)

METRICS = (*NOW_METRICS, *STEP_METRICS, *REQUEST_METRICS, *GATEWAY_METRICS)
BY_NAME = {metric.name: metric for metric in METRICS}

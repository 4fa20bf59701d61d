"""One table of every metric: name, type, help, unit, labels, buckets, and who fills it.

Owns: the names that operators see. Runs in: everywhere. Must not know: how values are kept or shown.
Names follow vLLM's, with the prefix headrace_. A label's values come from fixed sets, never from a client.
"""

import enum
from dataclasses import dataclass

from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason


class Kind(enum.Enum):
    """The Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(enum.Enum):
    """Who fills it."""

    GATEWAY = "gateway"  # an accumulator of GatewayMeters
    WORKER = "worker"  # a field of the status page, or several (see export.py)
    RINGS = "rings"  # read from the rings when scraped


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `buckets` are upper bounds in the unit that is shown; the last one, infinity, is not written.

    Accumulators count integers: nanoseconds where the unit is seconds, else the unit itself.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    unit: str = ""
    buckets: tuple[float, ...] = ()
    label: str = ""  # at most one label, or two joined by a comma
    field: str = ""  # of the status page, where one field says it (a prefix for histograms)


# 1 ms to 5 minutes; close together where tokens come.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(1 << exponent) for exponent in range(18))

FINISHED_REASONS = ("stop", "length", "abort", "error", "deadline")
_REASON_NAMES = {FinishReason.CANCELLED: "abort"}
ERROR_CODES = tuple(member.value.code for member in ErrorCode)
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
    "/version",
    "/openapi.json",
    "/docs",
)  # fmt: skip


def finished_reason(reason: FinishReason) -> str:
    """The label value for the way in which a request ended (vLLM calls a cancelled one aborted)."""
    return _REASON_NAMES.get(reason, reason.value)


def _worker(name: str, kind: Kind, text: str, **rest: str) -> Metric:
    return Metric(name, kind, Source.WORKER, text, **rest)  # type: ignore[arg-type]


def _latency(name: str, text: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, Source.GATEWAY, text, unit="seconds", buckets=LATENCY_BUCKETS)


METRICS = (
    # Now, in the worker. 0 while no worker runs.
    _worker("headrace_worker_up", Kind.GAUGE, "1 while a worker is ready, else 0."),
    _worker("headrace_num_requests_running", Kind.GAUGE, "Requests in the running batch.", field="num_running"),
    _worker(
        "headrace_num_requests_waiting",
        Kind.GAUGE,
        "Requests that the worker holds and does not run, preempted ones included.",
        field="num_waiting",
    ),
    _worker("headrace_kv_cache_usage_perc", Kind.GAUGE, "Part of the KV blocks that live requests hold, 0 to 1."),
    # Since the start of the server, in the worker; kept over restarts of the worker.
    _worker(
        "headrace_prefix_cache_queries_total",
        Kind.COUNTER,
        "Prompt tokens that were looked up in the prefix cache.",
        unit="tokens",
        field="num_prefix_query_tokens",
    ),
    _worker(
        "headrace_prefix_cache_hits_total",
        Kind.COUNTER,
        "Prompt tokens that were found in the prefix cache.",
        unit="tokens",
        field="num_prefix_hit_tokens",
    ),
    _worker(
        "headrace_num_preemptions_total",
        Kind.COUNTER,
        "Times that blocks were taken back from a running request.",
        field="num_preemptions",
    ),
    _worker(
        "headrace_prompt_tokens_total",
        Kind.COUNTER,
        "Prompt tokens computed (those found in the prefix cache are not among them).",
        unit="tokens",
        field="num_prompt_tokens",
    ),
    _worker(
        "headrace_prompt_tokens_cached_total",
        Kind.COUNTER,
        "Prompt tokens taken from the prefix cache instead of being computed.",
        unit="tokens",
        field="num_cached_prompt_tokens",
    ),
    _worker(
        "headrace_generation_tokens_total",
        Kind.COUNTER,
        "Tokens generated, with the few that came after a stop string or an abort and that nobody was sent.",
        unit="tokens",
        field="num_generated_tokens",
    ),
    _worker(
        "headrace_recomputed_tokens_total",
        Kind.COUNTER,
        "Tokens computed again after a preemption.",
        unit="tokens",
        field="num_recomputed_tokens",
    ),
    Metric(
        "headrace_step_duration_seconds",
        Kind.HISTOGRAM,
        Source.WORKER,
        "Duration of one step, counted once however many requests are in it.",
        unit="seconds",
        buckets=LATENCY_BUCKETS,
        field="step_duration",
    ),
    Metric(
        "headrace_iteration_tokens",
        Kind.HISTOGRAM,
        Source.WORKER,
        "Tokens computed in one step.",
        unit="tokens",
        buckets=TOKEN_BUCKETS,
        field="iteration_tokens",
    ),
    # Of requests, as the gateway sees them.
    Metric("headrace_requests_started_total", Kind.COUNTER, Source.GATEWAY, "Requests that were accepted."),
    Metric(
        "headrace_request_success_total",
        Kind.COUNTER,
        Source.GATEWAY,
        "Requests that ended, by reason; over all reasons it reaches the number of those started.",
        label="finished_reason",
    ),
    _latency("headrace_time_to_first_token_seconds", "Arrival to first token, once for each request that emitted one."),
    _latency(
        "headrace_inter_token_latency_seconds",
        "TBT (ITL): gaps between consecutive tokens of a request. Of n tokens that come together the first has the gap that "
        "was measured, and the others have gaps of 0.",
    ),
    _latency("headrace_e2e_request_latency_seconds", "Arrival to end of requests that ended with stop or length."),
    _latency("headrace_request_queue_time_seconds", "Arrival until the request was first scheduled."),
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
    # The gateway itself.
    Metric(
        "headrace_admission_rejections_total",
        Kind.COUNTER,
        Source.GATEWAY,
        "Requests that were refused at the door, by error code.",
        label="code",
    ),
    Metric(
        "headrace_http_requests_total",
        Kind.COUNTER,
        Source.GATEWAY,
        "HTTP requests, by route template and status.",
        label="route,status",
    ),
    Metric(
        "headrace_worker_restarts_total", Kind.COUNTER, Source.GATEWAY, "Times that a worker was gone and was to be replaced."
    ),
    Metric(
        "headrace_ring_fill_ratio", Kind.GAUGE, Source.RINGS, "Fill of a ring between gateway and worker, 0 to 1.", label="ring"
    ),
    # Last, so that a scrape shows the faults that it met itself.
    Metric(
        "headrace_metrics_faults_total",
        Kind.COUNTER,
        Source.GATEWAY,
        "Faults inside the measuring itself; none of them failed a request.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}

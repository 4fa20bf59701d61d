"""One frame of `headrace top`, from two looks at the server.

Owns: frame_of, and the names of the metrics it reads. Runs in: CLI, pure. Must not know: HTTP, terminals.
"""

from headrace.monitor.model import (
    Batch,
    Cache,
    ClassLoad,
    Frame,
    Gateway,
    Latency,
    LatencySeconds,
    LongestStall,
    Percentiles,
    RequestRow,
    Requests,
    Server,
    StallSum,
    Status,
    Throughput,
)
from headrace.monitor.percentiles import Distribution
from headrace.monitor.scrape import Scrape
from headrace.monitor.window import NOTHING, Window
from headrace.telemetry.reports import RequestReport

# Families of telemetry/catalog.py. One that a server does not have is "not known", never an error.
WORKER_UP = "headrace_worker_up"
WORKER_RESTARTS = "headrace_worker_restarts_total"
GENERATION_TOKENS = "headrace_generation_tokens_total"
PROMPT_TOKENS = "headrace_prompt_tokens_total"
CACHED_TOKENS = "headrace_prompt_tokens_cached_total"
STARTED = "headrace_requests_started_total"
FINISHED = "headrace_request_success_total"
REFUSED = "headrace_admission_rejections_total"
TTFT = "headrace_time_to_first_token_seconds"
TBT = "headrace_inter_token_latency_seconds"
TPOT = "headrace_request_time_per_output_token_seconds"
QUEUE_TIME = "headrace_request_queue_time_seconds"
RUNNING = "headrace_num_requests_running"
WAITING = "headrace_num_requests_waiting"
CLASS_RUNNING = "headrace_class_requests_running"
CLASS_WAITING = "headrace_class_requests_waiting"
BLOCKED = "headrace_admission_blocked"
STEP_DURATION = "headrace_step_duration_seconds"
STEP_STAGE = "headrace_step_stage_seconds"
STEP_TOKENS = "headrace_iteration_tokens"
STEP_ROWS = "headrace_step_rows"
PREFILL_TOKENS = "headrace_prefill_tokens_total"
DECODE_TOKENS = "headrace_decode_tokens_total"
PADDING_TOKENS = "headrace_padding_tokens_total"
KV_USAGE = "headrace_kv_cache_usage_perc"
PREFIX_QUERIES = "headrace_prefix_cache_queries_total"
PREFIX_HITS = "headrace_prefix_cache_hits_total"
EVICTIONS = "headrace_kv_block_evictions_total"
PREEMPTIONS = "headrace_num_preemptions_total"
RECOMPUTED = "headrace_recomputed_tokens_total"
RING_FILL = "headrace_ring_fill_ratio"
RING_FULL = "headrace_ring_full_total"
GATEWAY_CPU = "headrace_gateway_cpu_seconds_total"
GATEWAY_TOKENS = "headrace_gateway_tokens_total"
STALLS = "headrace_stalls_total"
STALL_SECONDS = "headrace_stall_seconds_total"
NAMES = tuple(value for name, value in sorted(globals().items()) if name.isupper() and isinstance(value, str))

PREFIX, CLASS, CAUSE = "headrace_", "class", "cause"


def frame_of(url: str, earlier: Scrape | None, later: Scrape, max_requests: int) -> Frame:
    """`earlier`: the look before, from which rates and percentiles of the window between follow; None for the first look."""
    metrics = later.metrics or NOTHING
    before = earlier.metrics if earlier is not None else None
    seconds = later.at_seconds - earlier.at_seconds if earlier is not None else 0.0
    window = Window(before if later.metrics is not None else None, metrics, seconds)
    return Frame(
        unix_seconds=later.unix_seconds,
        window_seconds=round(seconds, 3) if window.is_open else None,
        server=_server(url, later),
        metrics_error=_why_no_numbers(later),
        throughput=_throughput(window),
        latency_seconds=LatencySeconds(
            ttft=_latency(window, TTFT),
            tbt=_latency(window, TBT),
            tpot=_latency(window, TPOT),
            queue=_latency(window, QUEUE_TIME),
        ),
        batch=_batch(window),
        cache=Cache(
            usage=None if (usage := metrics.total(KV_USAGE)) is None else _share(usage),
            hit_rate=_part_of(window, PREFIX_HITS, PREFIX_QUERIES),
            evictions_per_second=window.rate(EVICTIONS),
            preemptions_per_second=window.rate(PREEMPTIONS),
            recomputed_tokens_per_second=window.rate(RECOMPUTED),
        ),
        gateway=Gateway(
            cpu_seconds_per_token=_per(window.added_in_all(GATEWAY_CPU), window.added_in_all(GATEWAY_TOKENS)),
            ring_fill={ring: _share(fill) for ring, fill in metrics.by_label(RING_FILL, "ring").items()},
            ring_full_per_second=window.rate(RING_FULL),
        ),
        stalls=_stalls(window),
        requests=_requests(later, max_requests),
    )


def _server(url: str, scrape: Scrape) -> Server:
    metrics = scrape.metrics or NOTHING
    if scrape.error:
        status = Status.UNREACHABLE
    elif scrape.is_ready is None:
        status = Status.UNKNOWN
    else:
        status = Status.READY if scrape.is_ready else Status.NOT_READY
    worker_up = metrics.total(WORKER_UP)
    return Server(
        url=url,
        status=status,
        reason=scrape.error or scrape.reason or None,
        model=scrape.model or None,
        version=scrape.version or None,
        worker_up=None if worker_up is None else worker_up > 0,
        worker_restarts=_whole(metrics.total(WORKER_RESTARTS)),
    )


def _why_no_numbers(scrape: Scrape) -> str | None:
    if scrape.error:
        return None  # it is said already
    if scrape.metrics is not None and not any(name.startswith(PREFIX) for name in scrape.metrics.samples):
        return "/metrics has none of Headrace's metrics"
    return scrape.metrics_error or None


def _throughput(window: Window) -> Throughput:
    return Throughput(
        output_tokens_per_second=window.rate(GENERATION_TOKENS),
        prompt_tokens_per_second=window.rate(PROMPT_TOKENS),
        cached_share=window.share(CACHED_TOKENS, PROMPT_TOKENS),
        started_per_second=window.rate(STARTED),
        finished_per_second={
            reason: added / window.seconds for reason, added in sorted(window.added(FINISHED, "finished_reason").items())
        },
        refused_per_second=window.rate(REFUSED),
    )


def _latency(window: Window, histogram: str) -> Latency:
    by_class = window.distributions(histogram, CLASS)
    return Latency(
        all=_percentiles(window.distribution(histogram)),
        by_class={name: _percentiles(found) for name, found in sorted(by_class.items())},
    )


def _percentiles(found: Distribution | None) -> Percentiles:
    if found is None:
        return Percentiles()
    return Percentiles(count=round(found.count), p50=found.percentile(50), p90=found.percentile(90), p99=found.percentile(99))


def _batch(window: Window) -> Batch:
    metrics = window.later
    running, waiting = metrics.by_label(CLASS_RUNNING, CLASS), metrics.by_label(CLASS_WAITING, CLASS)
    steps = window.distribution(STEP_DURATION)
    rows, tokens = window.distribution(STEP_ROWS), window.distribution(STEP_TOKENS)
    stages = {stage: found.sum for stage, found in window.distributions(STEP_STAGE, "stage").items()}
    in_stages = sum(stages.values())
    return Batch(
        running=_whole(metrics.total(RUNNING)),
        waiting=_whole(metrics.total(WAITING)),
        blocked_by=sorted(cause for cause, value in metrics.by_label(BLOCKED, CAUSE).items() if value > 0),
        classes={
            name: ClassLoad(running=round(running.get(name, 0)), waiting=round(waiting.get(name, 0)))
            for name in sorted({*running, *waiting})
        },
        steps_per_second=None if steps is None else steps.count / window.seconds,
        rows_per_step=None if rows is None else rows.mean,
        tokens_per_step=None if tokens is None else tokens.mean,
        prefill_share=window.share(PREFILL_TOKENS, DECODE_TOKENS),
        padding_share=window.share(PADDING_TOKENS, PREFILL_TOKENS, DECODE_TOKENS),
        step_seconds=_percentiles(steps),
        stage_shares={stage: value / in_stages for stage, value in stages.items()} if in_stages > 0 else {},
    )


def _stalls(window: Window) -> dict[str, StallSum] | None:
    """Of the causes that occurred."""
    counts, seconds = window.added(STALLS, CAUSE), window.added(STALL_SECONDS, CAUSE)
    if not counts:
        return None
    return {
        cause: StallSum(count=round(counts.get(cause, 0)), seconds=seconds.get(cause, 0.0))
        for cause in sorted({*counts, *seconds})
        if counts.get(cause, 0) > 0 or seconds.get(cause, 0) > 0
    }


def _requests(scrape: Scrape, max_requests: int) -> Requests:
    if scrape.requests is None:
        return Requests(error=scrape.requests_error or None)
    found = sorted(scrape.requests.live, key=lambda report: (report.waiting_for is None, -report.age_ms))
    return Requests(num_live=scrape.requests.num_live, slowest=[_row(report) for report in found[:max_requests]])


def _row(report: RequestReport) -> RequestRow:
    longest = max(report.stalls, key=lambda stall: stall.duration_ms, default=None)
    silence_ms = None if report.last_token_ms is None else max(0.0, report.age_ms - report.last_token_ms)
    return RequestRow(
        request_id=report.request_id if report.choice == 0 else f"{report.request_id}#{report.choice}",
        service_class=report.service_class,
        tenant=report.tenant,
        state=report.state,
        age_seconds=report.age_ms / 1e3,
        prompt_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        last_token_seconds_ago=None if silence_ms is None else round(silence_ms / 1e3, 6),
        waiting_for=report.waiting_for,
        longest_stall=None if longest is None else LongestStall(cause=longest.cause, seconds=longest.duration_ms / 1e3),
    )


def _part_of(window: Window, part: str, whole: str) -> float | None:
    """What one counter added, of what another added that counts it too."""
    added, of_all = window.added_in_all(part), window.added_in_all(whole)
    return _share(added / of_all) if added is not None and of_all else None


def _per(amount: float | None, count: float | None) -> float | None:
    return amount / count if amount is not None and count else None


def _share(value: float) -> float:
    """Another server's gauge may be anything."""
    return min(1.0, max(0.0, value))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)

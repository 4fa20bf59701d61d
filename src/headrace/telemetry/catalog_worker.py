"""The part of the table of metrics that comes from the worker's status page.

Owns: the worker's families. Runs in: everywhere. Must not know: how values are kept or shown.
"""

from dataclasses import replace

from headrace.telemetry.metric import (
    BLOCK_AGE_BUCKETS,
    LATENCY_BUCKETS,
    ROW_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_BUCKETS,
    Kind,
    Metric,
    Reading,
    Source,
)


def _gauge(
    name: str, field: str, text: str, *, labels: tuple[str, ...] = (), reading: Reading = Reading.FIELD, unit: str = ""
) -> Metric:
    return Metric(name, Kind.GAUGE, Source.WORKER, text, unit=unit, labels=labels, field=field, reading=reading)


def _counter(name: str, field: str, text: str, unit: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, Source.WORKER, text, unit=unit, field=field)


def _histogram(name: str, field: str, text: str, unit: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.HISTOGRAM, Source.WORKER, text, unit=unit, buckets=buckets, labels=labels, field=field)


_RUNNING = _gauge("headrace_num_requests_running", "num_running", "Requests in the running batch.")
_WAITING = _gauge(
    "headrace_num_requests_waiting",
    "num_waiting",
    "Requests that the worker holds and does not run, preempted ones included.",
)
_KV_USAGE = _gauge(
    "headrace_kv_cache_usage_perc",
    "",
    "Part of the KV blocks that live requests hold, 0 to 1.",
    reading=Reading.USED_SHARE,
)


def _alias(metric: Metric, name: str) -> Metric:
    """The same values under the name by which routers look for them without being told another (docs/metrics.md)."""
    return replace(metric, name=name, help=f"As {metric.name}, under vLLM's name.")


# Now. 0 while no worker runs.
NOW_METRICS = (
    _gauge("headrace_worker_up", "state", "1 while a worker is ready, else 0.", reading=Reading.IS_READY),
    _RUNNING,
    _WAITING,
    _KV_USAGE,
    _alias(_RUNNING, "vllm:num_requests_running"),
    _alias(_WAITING, "vllm:num_requests_waiting"),
    _alias(_KV_USAGE, "vllm:kv_cache_usage_perc"),
    _gauge(
        "headrace_class_requests_running",
        "num_running_class_{index}",
        "Requests in the running batch, by service class.",
        labels=("class",),
    ),
    _gauge(
        "headrace_class_requests_waiting",
        "num_waiting_class_{index}",
        "Requests that the worker holds and does not run, by service class.",
        labels=("class",),
    ),
    _gauge(
        "headrace_admission_blocked",
        "blocked_by",
        "1 at what keeps the next waiting request from starting now, else 0.",
        labels=("cause",),
        reading=Reading.IS_CAUSE,
    ),
    _gauge(
        "headrace_step_time_error_ratio",
        "step_time_error_millionths",
        "Mean of |measured - predicted| / predicted over about the last 25 steps: how well step times are known.",
        reading=Reading.MILLIONTHS,
    ),
    _gauge(
        "headrace_step_time_predicted_seconds",
        "step_time_predicted_ns",
        "Predicted duration of the last step.",
        reading=Reading.NANOSECONDS,
        unit="seconds",
    ),
    _gauge(
        "headrace_step_time_target_seconds",
        "step_time_target_ns",
        "What prefill was cut for in the last step: the shortest TBT target of its streams; 0 when there was none.",
        reading=Reading.NANOSECONDS,
        unit="seconds",
    ),
)

# Since the start of the server; kept over restarts of the worker.
STEP_METRICS = (
    _counter(
        "headrace_prefix_cache_queries_total",
        "num_prefix_query_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
        "tokens",
    ),
    _counter(
        "headrace_prefix_cache_hits_total",
        "num_prefix_hit_tokens",
        "Prompt tokens that were found in the prefix cache.",
        "tokens",
    ),
    _counter("headrace_kv_block_evictions_total", "num_evictions", "Cached KV blocks that were dropped for new ones."),
    _histogram(
        "headrace_kv_block_lifetime_seconds",
        "block_lifetime",
        "Of each evicted block, the time from when it got its content.",
        "seconds",
        BLOCK_AGE_BUCKETS,
    ),
    _histogram(
        "headrace_kv_block_idle_before_evict_seconds",
        "block_idle",
        "Of each evicted block, the time from when a request last held it.",
        "seconds",
        BLOCK_AGE_BUCKETS,
    ),
    _counter("headrace_num_preemptions_total", "num_preemptions", "Times that blocks were taken back from a running request."),
    _counter(
        "headrace_claim_preemptions_total",
        "num_claim_preemptions",
        "Of headrace_num_preemptions_total, those in favour of a request of a higher class.",
    ),
    _counter(
        "headrace_prompt_tokens_total",
        "num_prompt_tokens",
        "Prompt tokens computed (those found in the prefix cache are not among them).",
        "tokens",
    ),
    _counter(
        "headrace_prompt_tokens_cached_total",
        "num_cached_prompt_tokens",
        "Prompt tokens taken from the prefix cache instead of being computed.",
        "tokens",
    ),
    _counter(
        "headrace_generation_tokens_total",
        "num_generated_tokens",
        "Tokens generated, with the few that came after a stop string or an abort and that nobody was sent.",
        "tokens",
    ),
    _counter(
        "headrace_recomputed_tokens_total", "num_recomputed_tokens", "Tokens computed again after a preemption.", "tokens"
    ),
    _counter(
        "headrace_prefill_tokens_total",
        "num_prefill_tokens",
        "Tokens computed in rows of more than one: prompts, and what is computed again.",
        "tokens",
    ),
    _counter("headrace_decode_tokens_total", "num_decode_tokens", "Tokens computed in rows of one.", "tokens"),
    _counter(
        "headrace_padding_tokens_total",
        "num_padding_tokens",
        "Positions computed in vain because rows of different length lay in one rectangle.",
        "tokens",
    ),
    _histogram(
        "headrace_step_duration_seconds",
        "step_duration",
        "Duration of one step, counted once however many requests are in it.",
        "seconds",
        LATENCY_BUCKETS,
    ),
    _histogram(
        "headrace_step_stage_seconds",
        "stage_{value}",
        "Duration of one stage of a step; execute_other is what the executor does besides forward and sample.",
        "seconds",
        STAGE_BUCKETS,
        labels=("stage",),
    ),
    _histogram("headrace_step_rows", "step_rows", "Requests that one step computed tokens of.", "requests", ROW_BUCKETS),
    _histogram("headrace_iteration_tokens", "iteration_tokens", "Tokens computed in one step.", "tokens", TOKEN_BUCKETS),
)

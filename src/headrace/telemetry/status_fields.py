"""The fields of the worker's status page, and the step histograms that are kept for it.

Owns: names and order of the fields. Runs in: worker (fills), gateway and supervisor (read). Must not know: shared memory.
"""

import enum
from collections.abc import Iterable, Sequence

from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import MAX_CLASSES
from headrace.telemetry.accumulate import Histogram
from headrace.telemetry.metric import (
    BLOCK_AGE_BUCKETS,
    LATENCY_BUCKETS,
    ROW_BUCKETS,
    STAGE_BUCKETS,
    STEP_STAGES,
    TOKEN_BUCKETS,
)


class WorkerState(enum.IntEnum):
    """The value of the field `state`."""

    ABSENT = 0  # nothing was written yet
    READY = 1
    STOPPING = 2


_CAUSES = tuple(StallCause)


def blocked_by_number(cause: StallCause | None) -> int:
    """The value of the field `blocked_by`: 0 for none, else the cause's place in StallCause, counted from 1."""
    return 0 if cause is None else _CAUSES.index(cause) + 1


def blocked_by_cause(number: int) -> StallCause | None:
    """The cause that a value of the field `blocked_by` stands for; None for 0, and for what no version of it says."""
    return _CAUSES[number - 1] if 1 <= number <= len(_CAUSES) else None


def _nanoseconds(seconds: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(bound * 1e9) for bound in seconds)


STEP_DURATION_BOUNDS_NS = _nanoseconds(LATENCY_BUCKETS)
STAGE_BOUNDS_NS = _nanoseconds(STAGE_BUCKETS)
BLOCK_AGE_BOUNDS_NS = _nanoseconds(BLOCK_AGE_BUCKETS)
ITERATION_TOKENS_BOUNDS = tuple(map(int, TOKEN_BUCKETS))
STEP_ROWS_BOUNDS = tuple(map(int, ROW_BUCKETS))


def bucket_fields(prefix: str, num_bounds: int) -> tuple[str, ...]:
    """Names of a histogram's counts (not cumulative), one more than it has bounds."""
    return tuple(f"{prefix}_bucket_{index}" for index in range(num_bounds + 1))


def histogram_fields(prefix: str, bounds: Sequence[int]) -> tuple[str, ...]:
    """Names of a histogram's counts, and of its sum."""
    return (*bucket_fields(prefix, len(bounds)), f"{prefix}_sum")


RUNNING_CLASS_FIELDS = tuple(f"num_running_class_{index}" for index in range(MAX_CLASSES))
WAITING_CLASS_FIELDS = tuple(f"num_waiting_class_{index}" for index in range(MAX_CLASSES))

# The histograms of the page: their bounds by prefix. Durations and ages are in nanoseconds.
HISTOGRAMS = {
    "step_duration": STEP_DURATION_BOUNDS_NS,
    "iteration_tokens": ITERATION_TOKENS_BOUNDS,
    "step_rows": STEP_ROWS_BOUNDS,
    **{f"stage_{stage}": STAGE_BOUNDS_NS for stage in STEP_STAGES},
    "block_lifetime": BLOCK_AGE_BOUNDS_NS,  # of a cached block: from when its content was there to its eviction
    "block_idle": BLOCK_AGE_BOUNDS_NS,  # of a cached block: from when the last sequence let go of it to its eviction
}

# Counters of one life of the worker: the exposition adds up the lives.
COUNTER_FIELDS = (
    "num_steps",
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_generated_tokens",
    "num_recomputed_tokens",
    "num_preemptions",
    "num_claim_preemptions",  # of these, in favour of a higher claim
    "num_prefix_query_tokens",
    "num_prefix_hit_tokens",
    "num_evictions",  # cached blocks dropped
    "num_padding_tokens",  # positions computed in vain
    "num_prefill_tokens",  # tokens of rows with more than one
    "num_decode_tokens",  # tokens of rows with one
    "num_event_ring_full",  # times that an event ring refused a batch; the batch is kept and offered again
    "num_record_lines",  # written to the record
    "num_record_drops",  # lines that the record could not take
    *(name for prefix, bounds in HISTOGRAMS.items() for name in histogram_fields(prefix, bounds)),
)  # fmt: skip

STATUS_FIELDS = (
    "epoch",  # which life of the worker
    "pid",
    "heartbeat_ns",  # CLOCK_MONOTONIC at this write
    "state",  # a WorkerState
    "num_running",
    "num_waiting",
    *RUNNING_CLASS_FIELDS,  # by index in TrafficPolicy.classes
    *WAITING_CLASS_FIELDS,
    "blocked_by",  # what stops admission now: see blocked_by_number
    "step_time_error_millionths",  # mean relative error of the step-time model
    "step_time_predicted_ns",  # of the last step
    "step_time_target_ns",  # the shortest TBT target of the last step's streams; 0: none
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    *COUNTER_FIELDS,
)  # fmt: skip


class StepMeter:
    """Counts steps for the status page: each step once, however many requests are in it. Evicted blocks, too."""

    def __init__(self) -> None:
        self._histograms = {prefix: Histogram(bounds) for prefix, bounds in HISTOGRAMS.items()}
        self._fields = tuple(
            (bucket_fields(prefix, len(bounds)), f"{prefix}_sum", self._histograms[prefix])
            for prefix, bounds in HISTOGRAMS.items()
        )
        self._step_duration = self._histograms["step_duration"]
        self._iteration_tokens = self._histograms["iteration_tokens"]
        self._step_rows = self._histograms["step_rows"]
        self._stages = tuple(self._histograms[f"stage_{stage}"] for stage in STEP_STAGES)
        self._block_lifetime = self._histograms["block_lifetime"]
        self._block_idle = self._histograms["block_idle"]
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    def observe_step(self, duration_ns: int, num_tokens: int, num_rows: int = 1, num_decode_rows: int = 0) -> None:
        """Count one step. `num_decode_rows`: those of its rows that compute one token."""
        self._step_duration.observe(duration_ns)
        self._iteration_tokens.observe(num_tokens)
        self._step_rows.observe(num_rows)
        self.num_steps += 1
        self.num_decode_tokens += num_decode_rows
        self.num_prefill_tokens += num_tokens - num_decode_rows

    def observe_stages(self, durations_ns: Sequence[int]) -> None:
        """Count one step's time by stage, in the order of STEP_STAGES."""
        for histogram, duration_ns in zip(self._stages, durations_ns, strict=True):
            histogram.observe(duration_ns)

    def observe_evictions(self, evictions: Iterable[tuple[int, int]]) -> None:
        """Count evicted blocks, each with its lifetime and its idle time before (ns)."""
        for lifetime_ns, idle_ns in evictions:
            self._block_lifetime.observe(lifetime_ns)
            self._block_idle.observe(idle_ns)

    def fill(self, values: dict[str, int]) -> None:
        """Put its fields into what is to be written to the page."""
        values["num_steps"] = self.num_steps
        values["num_prefill_tokens"] = self.num_prefill_tokens
        values["num_decode_tokens"] = self.num_decode_tokens
        for names, sum_name, histogram in self._fields:
            values.update(zip(names, histogram.counts, strict=True))
            values[sum_name] = histogram.sum

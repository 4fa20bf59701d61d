"""The fields of the worker's status page, and the step histograms that are kept for it.

Owns: names and order of the fields. Runs in: worker (fills), gateway and supervisor (read). Must not know: shared memory.
"""

import enum

from headrace.telemetry.accumulate import Histogram
from headrace.telemetry.catalog import LATENCY_BUCKETS, TOKEN_BUCKETS


class WorkerState(enum.IntEnum):
    """The value of the field `state`."""

    ABSENT = 0  # nothing was written yet
    READY = 1
    STOPPING = 2


STEP_DURATION_BOUNDS_NS = tuple(round(bound * 1e9) for bound in LATENCY_BUCKETS)
ITERATION_TOKENS_BOUNDS = tuple(map(int, TOKEN_BUCKETS))


def bucket_fields(prefix: str, num_bounds: int) -> tuple[str, ...]:
    """Names of a histogram's counts (not cumulative), one more than it has bounds."""
    return tuple(f"{prefix}_bucket_{index}" for index in range(num_bounds + 1))


STEP_DURATION_FIELDS = bucket_fields("step_duration", len(STEP_DURATION_BOUNDS_NS))
ITERATION_TOKENS_FIELDS = bucket_fields("iteration_tokens", len(ITERATION_TOKENS_BOUNDS))

# Counters of one life of the worker: the exposition adds up the lives.
COUNTER_FIELDS = (
    "num_steps",
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_generated_tokens",
    "num_recomputed_tokens",
    "num_preemptions",
    "num_prefix_query_tokens",
    "num_prefix_hit_tokens",
    *STEP_DURATION_FIELDS,
    "step_duration_sum",  # ns
    *ITERATION_TOKENS_FIELDS,
    "iteration_tokens_sum",
)  # fmt: skip

STATUS_FIELDS = (
    "epoch",  # which life of the worker
    "pid",
    "heartbeat_ns",  # CLOCK_MONOTONIC at this write
    "state",  # a WorkerState
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    *COUNTER_FIELDS,
)  # fmt: skip


class StepMeter:
    """Counts steps for the status page: each step once, however many requests are in it."""

    def __init__(self) -> None:
        self.step_duration = Histogram(STEP_DURATION_BOUNDS_NS)
        self.iteration_tokens = Histogram(ITERATION_TOKENS_BOUNDS)
        self.num_steps = 0

    def observe_step(self, duration_ns: int, num_tokens: int) -> None:
        """Count one step."""
        self.step_duration.observe(duration_ns)
        self.iteration_tokens.observe(num_tokens)
        self.num_steps += 1

    def fill(self, values: dict[str, int]) -> None:
        """Put its fields into what is to be written to the page."""
        values["num_steps"] = self.num_steps
        values.update(zip(STEP_DURATION_FIELDS, self.step_duration.counts, strict=True))
        values["step_duration_sum"] = self.step_duration.sum
        values.update(zip(ITERATION_TOKENS_FIELDS, self.iteration_tokens.counts, strict=True))
        values["iteration_tokens_sum"] = self.iteration_tokens.sum

"""What the worker shows of itself on the status page.

Owns: WorkerReport. Runs in: worker. Must not know: shared memory, metric names.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.protocol.step import StepPlan
from headrace.scheduling import SchedulerStatistics
from headrace.telemetry.status_fields import (
    RUNNING_CLASS_FIELDS,
    STATUS_FIELDS,
    WAITING_CLASS_FIELDS,
    StepMeter,
    WorkerState,
    blocked_by_number,
)

PAGE_INTERVAL_NS = 20_000_000  # while steps follow one another the page is written no more often


class WorkerReport:
    """Fills the status page. `write` replaces all fields at once.

    It is written before each wait, so that gauges are right when nothing happens, at the first step after a wait, and while
    steps follow one another at the first that ends PAGE_INTERVAL_NS after the last write: short steps do not pay for it each.
    Nothing is written before the worker is ready: until then the page keeps the last numbers of the life before, which the
    gateway still has to add up.
    """

    def __init__(self, write: Callable[[Mapping[str, int]], None], *, epoch: int, pid: int) -> None:
        self._write = write
        self._meter = StepMeter()
        self._values: dict[str, int] = {**dict.fromkeys(STATUS_FIELDS, 0), "epoch": epoch, "pid": pid}
        self._due_ns = 0
        self.state = WorkerState.READY

    def count_step(self, plan: StepPlan, stages_ns: Sequence[int]) -> None:
        """One step was executed. `stages_ns`: the time of each of STEP_STAGES, which together are the step's."""
        num_decode_rows = 0
        for row in plan.rows:
            if len(row.token_ids) == 1:
                num_decode_rows += 1
        self._meter.observe_step(sum(stages_ns), plan.num_tokens, len(plan.rows), num_decode_rows)
        self._meter.observe_stages(stages_ns)

    def is_due(self, now_ns: int) -> bool:
        """Whether a step that ends now is to be shown at once."""
        return now_ns >= self._due_ns

    def note_wait(self) -> None:
        """The worker is going to sleep: the first step afterwards is shown at once."""
        self._due_ns = 0

    def write(
        self,
        statistics: SchedulerStatistics,
        now_ns: int,
        *,
        evictions: Sequence[tuple[int, int]] = (),
        num_event_ring_full: int = 0,
        num_record_lines: int = 0,
        num_record_drops: int = 0,
    ) -> None:
        """Show the numbers of now; `now_ns` is the sign of life.

        `evictions`: (lifetime, idle time) of the blocks evicted since the last write. The other numbers are counts so far.
        """
        self._due_ns = now_ns + PAGE_INTERVAL_NS
        self._meter.observe_evictions(evictions)
        values = self._values
        values["heartbeat_ns"] = now_ns
        values["state"] = self.state
        values["num_running"] = statistics.num_running
        values["num_waiting"] = statistics.num_waiting
        values.update(zip(RUNNING_CLASS_FIELDS, statistics.num_running_by_class, strict=False))
        values.update(zip(WAITING_CLASS_FIELDS, statistics.num_waiting_by_class, strict=False))
        values["blocked_by"] = blocked_by_number(statistics.blocked_by)
        values["step_time_error_millionths"] = round(statistics.step_time_error_ratio * 1e6)
        values["step_time_predicted_ns"] = statistics.step_time_predicted_ns
        values["step_time_target_ns"] = statistics.step_time_target_ns
        values["num_blocks"] = statistics.num_blocks
        values["num_free_blocks"] = statistics.num_free_blocks
        values["num_cached_blocks"] = statistics.num_cached_blocks
        values["num_prompt_tokens"] = statistics.num_prompt_tokens
        values["num_cached_prompt_tokens"] = statistics.num_cached_prompt_tokens
        values["num_generated_tokens"] = statistics.num_generated_tokens
        values["num_recomputed_tokens"] = statistics.num_recomputed_tokens
        values["num_preemptions"] = statistics.num_preemptions
        values["num_claim_preemptions"] = statistics.num_claim_preemptions
        values["num_prefix_query_tokens"] = statistics.num_prefix_query_tokens
        values["num_prefix_hit_tokens"] = statistics.num_prefix_hit_tokens
        values["num_evictions"] = statistics.num_evictions
        values["num_padding_tokens"] = statistics.num_padding_tokens
        values["num_event_ring_full"] = num_event_ring_full
        values["num_record_lines"] = num_record_lines
        values["num_record_drops"] = num_record_drops
        self._meter.fill(values)
        self._write(values)

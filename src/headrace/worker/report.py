"""What the worker shows of itself on the status page.

Owns: WorkerReport. Runs in: worker. Must not know: shared memory, metric names.
"""

from collections.abc import Callable, Mapping

from headrace.scheduling import SchedulerStatistics
from headrace.telemetry.status_fields import StepMeter, WorkerState


class WorkerReport:
    """Fills the status page: once for each step, and before each wait, so that gauges are right when nothing happens.

    `write` replaces all fields at once. Nothing is written before the worker is ready: until then the page keeps the last
    numbers of the life before, which the gateway still has to add up.
    """

    def __init__(self, write: Callable[[Mapping[str, int]], None], *, epoch: int, pid: int) -> None:
        self._write = write
        self._meter = StepMeter()
        self._values: dict[str, int] = {"epoch": epoch, "pid": pid}
        self.state = WorkerState.READY

    def count_step(self, duration_ns: int, num_tokens: int) -> None:
        """One step was executed."""
        self._meter.observe_step(duration_ns, num_tokens)

    def write(self, statistics: SchedulerStatistics, now_ns: int) -> None:
        """Show the numbers of now; `now_ns` is the sign of life."""
        values = self._values
        values["heartbeat_ns"] = now_ns
        values["state"] = self.state
        values["num_running"] = statistics.num_running
        values["num_waiting"] = statistics.num_waiting
        values["num_blocks"] = statistics.num_blocks
        values["num_free_blocks"] = statistics.num_free_blocks
        values["num_cached_blocks"] = statistics.num_cached_blocks
        values["num_prompt_tokens"] = statistics.num_prompt_tokens
        values["num_cached_prompt_tokens"] = statistics.num_cached_prompt_tokens
        values["num_generated_tokens"] = statistics.num_generated_tokens
        values["num_recomputed_tokens"] = statistics.num_recomputed_tokens
        values["num_preemptions"] = statistics.num_preemptions
        values["num_prefix_query_tokens"] = statistics.num_prefix_query_tokens
        values["num_prefix_hit_tokens"] = statistics.num_prefix_hit_tokens
        self._meter.fill(values)
        self._write(values)

"""The worker's lines in a record of traffic: one for its life, one for each step.

Owns: RecordSink, StepLog. Runs in: worker. Must not know: files, and how lines are written.
"""

from typing import Protocol

from headrace.protocol.messages import WorkerLimits
from headrace.protocol.record import RecordLine, RecordStep, RecordWorker
from headrace.protocol.step import StepPlan, StepResult
from headrace.scheduling import SchedulerStatistics

_NS_PER_US = 1000


class RecordSink(Protocol):
    """Takes lines (telemetry/recorder.py)."""

    num_lines: int  # written
    num_drops: int  # that could not be

    @property
    def is_open(self) -> bool:
        """Whether lines are still taken: if not, they need not be made."""
        ...

    def at_us(self, at_ns: int) -> int:
        """A moment of CLOCK_MONOTONIC as the record counts it."""
        ...

    def write(self, line: RecordLine) -> None:
        """Add a line."""
        ...

    def flush_due(self, now_ns: int) -> None:
        """Write out what has waited long enough."""
        ...


class StepLog:
    """Makes the lines of one life of the worker."""

    def __init__(self, sink: RecordSink, epoch: int, limits: WorkerLimits, now_ns: int) -> None:
        """Writes the line about the worker itself."""
        self._sink = sink
        self._epoch = epoch
        line = RecordWorker(at_us=sink.at_us(now_ns), epoch=epoch, num_blocks=limits.num_blocks, block_size=limits.block_size)
        sink.write(line)

    @property
    def num_lines(self) -> int:
        """Written so far."""
        return self._sink.num_lines

    @property
    def num_drops(self) -> int:
        """Lines that the record could not take."""
        return self._sink.num_drops

    def step(
        self, plan: StepPlan, result: StepResult, began_ns: int, duration_ns: int, statistics: SchedulerStatistics
    ) -> None:
        """A step that was computed; `statistics` as it left them. One that failed as a whole has no line."""
        sink = self._sink
        if not sink.is_open:
            sink.num_drops += 1
            return
        num_decode_rows = num_context_tokens = 0
        for row in plan.rows:
            num_tokens = len(row.token_ids)
            num_context_tokens += row.start_position + num_tokens
            num_decode_rows += num_tokens == 1
        line = RecordStep(
            at_us=sink.at_us(began_ns),
            epoch=self._epoch,
            duration_us=duration_ns // _NS_PER_US,
            forward_us=result.forward_ns // _NS_PER_US,
            sample_us=result.sample_ns // _NS_PER_US,
            decode_rows=num_decode_rows,
            prefill_rows=len(plan.rows) - num_decode_rows,
            prefill_tokens=plan.num_tokens - num_decode_rows,
            context_tokens=num_context_tokens,
            running=statistics.num_running,
            waiting=statistics.num_waiting,
        )
        sink.write(line)

    def flush_due(self, now_ns: int) -> None:
        """Before a wait: what has waited long enough goes out."""
        self._sink.flush_due(now_ns)

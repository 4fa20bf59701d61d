"""The step between `schedule` and `apply`.

Owns: the plan that is being computed, and the memory that it may still write to. Runs in: worker, tests, simulation.
Must not know: how a step is planned, what becomes of its result.
"""

from headrace.kvcache import BlockTable, KVCacheManager
from headrace.protocol.step import StepPlan
from headrace.scheduling.sequence import Sequence


class InFlight:
    """At most one plan at a time. Blocks of a sequence that ends meanwhile are kept until the step has landed."""

    def __init__(self, blocks: KVCacheManager) -> None:
        self._blocks = blocks
        self._plan: StepPlan | None = None
        self._sequences: list[Sequence] = []
        self._late_tables: list[BlockTable] = []  # of sequences that ended while the step may still write there

    @property
    def is_empty(self) -> bool:
        """Whether no plan waits for its result."""
        return self._plan is None

    @property
    def num_late_tables(self) -> int:
        """Sequences that have ended and still hold blocks."""
        return len(self._late_tables)

    def launch(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """The plan is handed out; `sequences` are those of its rows."""
        self._plan, self._sequences = plan, sequences

    def release(self, sequence: Sequence) -> None:
        """Take back the blocks of a sequence that ends: now, or when the step has landed."""
        if sequence in self._sequences:
            self._late_tables.append(sequence.table)
        else:
            self._blocks.release(sequence.table)

    def land(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of the plan's rows; it is not in flight any more. RuntimeError when it was not."""
        if self._plan is None and not plan.rows:
            return []
        if self._plan is not plan:
            raise RuntimeError(f"step {plan.step_id} is not in flight")
        sequences, self._sequences, self._plan = self._sequences, [], None
        for table in self._late_tables:
            self._blocks.release(table)
        self._late_tables.clear()
        return sequences

"""When a waiting sequence may join the batch.

Owns: the seam between open batch and other ways to form one. Runs in: worker, tests, simulation.
Must not know: memory, devices, how rows lie in a batch.
"""

from typing import Protocol


class JoinPolicy(Protocol):
    """Decides how many may join now; budget and memory may still allow fewer."""

    def num_may_join(self, *, num_running: int, num_waiting: int, now_ns: int) -> int:
        """Sequences that may be admitted in this step; at least 1 when nothing runs and somebody waits long enough."""
        ...


class OpenBatch:
    """Continuous batching: whoever waits joins as soon as there is room (iteration-level scheduling, Orca, OSDI 2022)."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def num_may_join(self, *, num_running: int, num_waiting: int, now_ns: int) -> int:
        """As many as there are free places."""
        return min(self._max_num_seqs - num_running, num_waiting)

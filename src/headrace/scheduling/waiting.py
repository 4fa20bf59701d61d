"""Sequences in order: those that run, and those with a deadline.

Owns: the order of service. Runs in: worker, tests, simulation.
Must not know: budgets, blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace.scheduling.claims import Rank
from headrace.scheduling.sequence import Sequence


def _rank(sequence: Sequence) -> tuple[int, Rank]:
    return sequence.rank


def _deadline(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.deadline_ns, sequence.request_id


class RankedSequences:
    """Sequences sorted by rank, the first to be served first. Adding and removing move pointers only: quick to thousands."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def add(self, sequence: Sequence) -> None:
        """Put it where its rank belongs."""
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take it out. Raises RuntimeError when it is not here."""
        index = bisect_left(self._items, sequence.rank, key=_rank)
        if index == len(self._items) or self._items[index] is not sequence:
            raise RuntimeError(f"request {sequence.request_id} is not where its rank belongs")
        del self._items[index]


class Deadlines:
    """Live sequences that have a deadline, the earliest first."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, sequence: Sequence) -> None:
        """Watch it, if it has a deadline."""
        if sequence.request.deadline_ns:
            insort(self._items, sequence, key=_deadline)

    def remove(self, sequence: Sequence) -> None:
        """Watch it no longer. One without a deadline is fine."""
        if sequence.request.deadline_ns:
            del self._items[bisect_left(self._items, _deadline(sequence), key=_deadline)]

    @property
    def next_ns(self) -> int | None:
        """The earliest; None when nobody has one."""
        return self._items[0].request.deadline_ns if self._items else None

    def first_due(self, now_ns: int) -> Sequence | None:
        """A sequence whose deadline has passed, if any."""
        return self._items[0] if self._items and self._items[0].request.deadline_ns <= now_ns else None

"""Sequences in order: those that run, those that wait, and those with a deadline.

Owns: the order of service. Runs in: worker, tests, simulation.
Must not know: budgets, blocks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace.scheduling.sequence import Sequence


def _rank(sequence: Sequence) -> tuple[int, int]:
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


class WaitingQueue:
    """Who is served next: by priority (lower first, ageing), then arrival; preempted sequences before newcomers.

    A preempted sequence gives way only to a newcomer that has both a better priority and a better rank.
    """

    def __init__(self) -> None:
        self._preempted = RankedSequences()
        self._newcomers = RankedSequences()
        self._lane_of: dict[int, RankedSequences] = {}

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._newcomers

    def add_newcomer(self, sequence: Sequence) -> None:
        """Queue a sequence that has never run."""
        self._add(self._newcomers, sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence whose memory was taken."""
        self._add(self._preempted, sequence)

    def head(self) -> Sequence | None:
        """The next to be admitted; it stays in the queue. None when nobody waits."""
        if not len(self._preempted):
            return self._newcomers[0] if len(self._newcomers) else None
        preempted = self._preempted[0]
        if not len(self._newcomers):
            return preempted
        newcomer = self._newcomers[0]
        overtakes = newcomer.request.priority < preempted.request.priority and newcomer.rank < preempted.rank
        return newcomer if overtakes else preempted

    def remove(self, sequence: Sequence) -> None:
        """Take it out. Raises KeyError when it does not wait."""
        self._lane_of.pop(sequence.request_id).remove(sequence)

    def _add(self, lane: RankedSequences, sequence: Sequence) -> None:
        lane.add(sequence)
        self._lane_of[sequence.request_id] = lane


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

    def first_due(self, now_ns: int) -> Sequence | None:
        """A sequence whose deadline has passed, if any."""
        return self._items[0] if self._items and self._items[0].request.deadline_ns <= now_ns else None

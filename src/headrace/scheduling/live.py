"""Every live sequence, and the one place in which it is: running or waiting.

Owns: LiveSequences. Runs in: worker, tests, simulation. Must not know: blocks, budgets, events.
"""

from headrace.protocol.lifecycle import RequestState
from headrace.scheduling.claims import ClaimRules
from headrace.scheduling.class_queue import ClassQueue
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.waiting import Deadlines, RankedSequences


class LiveSequences:
    """Sequences by id, those that run by rank, those that wait in order of service, and how many there are of each class."""

    def __init__(self, num_classes: int, rules: ClaimRules) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.running = RankedSequences()
        self.waiting: ClassQueue[Sequence] = ClassQueue(rules)
        self.deadlines = Deadlines()
        self.num_changes = 0  # of who runs; with the same number, the same ones run at the same levels
        self.num_running_by_class = [0] * num_classes
        self.num_waiting_by_class = [0] * num_classes

    def add(self, sequence: Sequence) -> None:
        """A newcomer waits."""
        self.by_id[sequence.request_id] = sequence
        self.waiting.add_newcomer(sequence)
        self.num_waiting_by_class[sequence.class_index] += 1
        self.deadlines.add(sequence)

    def admit(self, sequence: Sequence, now_ns: int) -> None:
        """One that waited runs."""
        self.waiting.remove(sequence, now_ns)
        self.running.add(sequence)
        self.num_changes += 1
        self.num_waiting_by_class[sequence.class_index] -= 1
        self.num_running_by_class[sequence.class_index] += 1

    def preempt(self, sequence: Sequence, now_ns: int, *, by_claim: bool) -> None:
        """One that ran waits; `by_claim`: in favour of a strictly higher claim."""
        self.running.remove(sequence)
        self.num_changes += 1
        self.waiting.add_preempted(sequence, now_ns, by_claim=by_claim)
        self.num_running_by_class[sequence.class_index] -= 1
        self.num_waiting_by_class[sequence.class_index] += 1

    def pass_over(self, sequence: Sequence, duration_ns: int) -> None:
        """One that runs got nothing for so long: that counts as waiting, and may raise its claim."""
        self.running.remove(sequence)
        self.num_changes += sequence.claim.pass_over(duration_ns)
        self.running.add(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """It ends, wherever it stands; its state still says where."""
        if sequence.state is RequestState.RUNNING:
            self.running.remove(sequence)
            self.num_changes += 1
            self.num_running_by_class[sequence.class_index] -= 1
        else:
            self.waiting.remove(sequence, now_ns)
            self.num_waiting_by_class[sequence.class_index] -= 1
        self.deadlines.remove(sequence)
        del self.by_id[sequence.request_id]

    def of_ring(self, reply_ring: int, below_request_id: int) -> list[Sequence]:
        """The sequences of this ring with ids below the given one."""
        return [
            sequence
            for sequence in self.by_id.values()
            if sequence.request.reply_ring == reply_ring and sequence.request_id < below_request_id
        ]

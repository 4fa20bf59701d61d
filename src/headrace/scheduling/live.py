"""Every live sequence, and the one place in which it is: running or waiting; and what those that live are charged.

Owns: LiveSequences. Runs in: worker, tests, simulation. Must not know: blocks, budgets, events.
"""

from headrace.protocol.lifecycle import RequestState
from headrace.scheduling.claims import Account, Claim, ClaimRules
from headrace.scheduling.class_queue import ClassQueue
from headrace.scheduling.fairness import TokenCosts
from headrace.scheduling.recent_shares import RecentShares
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.waiting import Deadlines, RankedSequences


class LiveSequences:
    """Sequences by id, those that run by rank, those that wait in order of service, and how many there are of each class."""

    def __init__(self, num_classes: int, rules: ClaimRules) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.running = RankedSequences()
        self.num_running_by_account: dict[Account, int] = {}  # those with any
        self._weights = rules.weights
        self._costs = TokenCosts()
        self.waiting: ClassQueue[Sequence] = ClassQueue(rules, self._costs)
        self._shares = [RecentShares(rules.weights) for _ in range(rules.num_levels)]
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
        account = sequence.claim.account
        self.num_running_by_account[account] = self.num_running_by_account.get(account, 0) + 1

    def preempt(self, sequence: Sequence, now_ns: int, *, by_claim: bool) -> None:
        """One that ran waits; `by_claim`: in favour of a strictly higher claim."""
        self._stop_running(sequence)
        self.waiting.add_preempted(sequence, now_ns, by_claim=by_claim)
        self.num_waiting_by_class[sequence.class_index] += 1

    def charge(
        self,
        claim: Claim,
        now_ns: int,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        """Count tokens for the claim's account, at the level where it stands: the prompt once, at its first admission."""
        self.waiting.charge(
            claim,
            num_prefill_tokens=num_prefill_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )
        cost = self._costs.of(num_prefill_tokens, num_cached_tokens, num_output_tokens)
        self._shares[claim.level].charge(claim.account, cost, now_ns)

    def is_light(self, sequence: Sequence) -> bool:
        """Whether its account had far less of late than another one of its level."""
        return self._shares[sequence.claim.level].is_light(sequence.claim.account)

    def is_under_share(self, sequence: Sequence, max_num_seqs: int) -> bool:
        """Whether its account is light, and so few of it run that one more is within its share of the places."""
        if not self.is_light(sequence):
            return False
        account, weights = sequence.claim.account, self._weights
        all_weights = sum(weights[other] for other in self.num_running_by_account if other != account) + weights[account]
        num_running = self.num_running_by_account.get(account, 0)
        return num_running + 1 <= max(1.0, max_num_seqs * weights[account] / all_weights)

    def num_light_expected(self, level: int, now_ns: int, max_num: int) -> int:
        """How many light accounts of a level may come at any moment, counted up to `max_num`."""
        return self._shares[level].num_expected(now_ns, max_num)

    def pass_over(self, sequence: Sequence, duration_ns: int) -> None:
        """One that runs got nothing for so long: that counts as waiting, and may raise its claim."""
        self.running.remove(sequence)
        self.num_changes += sequence.claim.pass_over(duration_ns)
        self.running.add(sequence)

    def remove(self, sequence: Sequence, now_ns: int) -> None:
        """It ends, wherever it stands; its state still says where."""
        if sequence.state is RequestState.RUNNING:
            self._stop_running(sequence)
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

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.num_changes += 1
        self.num_running_by_class[sequence.class_index] -= 1
        account = sequence.claim.account
        num_left = self.num_running_by_account[account] - 1
        if num_left:
            self.num_running_by_account[account] = num_left
        else:
            del self.num_running_by_account[account]

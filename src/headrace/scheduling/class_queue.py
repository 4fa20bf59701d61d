"""Who is served next: levels strictly, accounts within a level fairly, requests within an account by due time.

Owns: ClassQueue. Runs in: worker, tests, simulation.
Must not know: budgets, blocks, steps.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic

from headrace.scheduling.claims import Account, Claim, ClaimantT, ClaimRules, Rank
from headrace.scheduling.fairness import TenantLedger, TokenCosts

MAX_PROMOTIONS = 64  # in one call of advance: a crowd that came together must not make one step long when it ages together
CREDIT_QUANTUM = 2048.0  # tokens / weight by which preferring cached prefixes may disturb the shares
PREFIX_WINDOW = 4  # requests of one account that are looked at for cached prefixes


class _Timetable:
    """Request ids by a time, the earliest first. Adding and removing move pointers only: quick to thousands."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, at_ns: int, request_id: int) -> None:
        insort(self._entries, (at_ns, request_id))

    def remove(self, at_ns: int, request_id: int) -> None:
        index = bisect_left(self._entries, (at_ns, request_id))
        if index == len(self._entries) or self._entries[index] != (at_ns, request_id):
            raise RuntimeError(f"request {request_id} is not watched for {at_ns}")
        del self._entries[index]

    def first_due(self, now_ns: int) -> int | None:
        return self._entries[0][1] if self._entries and self._entries[0][0] <= now_ns else None

    def next_ns(self) -> int | None:
        return self._entries[0][0] if self._entries else None

    def due(self, now_ns: int) -> list[int]:
        return [request_id for _, request_id in self._entries[: bisect_left(self._entries, (now_ns + 1,))]]


class _Level:
    """Those that wait at one level: preempted ones, and newcomers by account. A lane is a sorted list of ranks."""

    def __init__(self, ledger: TenantLedger) -> None:
        self.ledger = ledger
        self.preempted: list[Rank] = []
        self.newcomers: dict[Account, list[Rank]] = {}

    def add(self, claim: Claim, is_newcomer: bool) -> None:
        lane = self.preempted
        if is_newcomer:
            lane = self.newcomers.setdefault(claim.account, [])
            if not lane:
                self.ledger.activate(claim.account)
        insort(lane, claim.rank)

    def remove(self, claim: Claim, is_newcomer: bool) -> None:
        lane = self.newcomers[claim.account] if is_newcomer else self.preempted
        index = bisect_left(lane, claim.rank)
        if index == len(lane) or lane[index] != claim.rank:
            raise RuntimeError(f"request {claim.request_id} is not where its rank belongs")
        del lane[index]
        if is_newcomer and not lane:
            del self.newcomers[claim.account]
            self.ledger.deactivate(claim.account)


class ClassQueue(Generic[ClaimantT]):
    """Sequences that wait. Adding, removing, `advance`, `head` and `candidates` hardly grow dearer with their number.

    The order: a lower level before a higher one; within a level those that were preempted (by rank), then the account with the
    smallest token counter, and its requests by rank. A preempted one gives way only to a newcomer of its level that has both a
    better priority and a better rank. Each level has counters of its own, so that what an account had at another level is
    neither credit nor debt: a crowd of aged requests joins the level above as one more account and gets its weight, no more.

    Call `advance` before asking for the head: it raises those that have waited long enough.
    """

    def __init__(self, rules: ClaimRules, costs: TokenCosts | None = None) -> None:
        self._levels = [_Level(TenantLedger(rules.weights, costs)) for _ in range(rules.num_levels)]
        self._items: dict[int, ClaimantT] = {}
        self._newcomer_ids: set[int] = set()
        self._promotions = _Timetable()
        self._exits = _Timetable()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: ClaimantT) -> bool:
        return self._items.get(item.claim.request_id) is item

    def __iter__(self) -> Iterator[ClaimantT]:
        """All that wait, level by level, preempted ones first. The order of accounts is not that of service."""
        for level in self._levels:
            for lane in (level.preempted, *level.newcomers.values()):
                for rank in lane:
                    yield self._items[rank[2]]

    def add_newcomer(self, item: ClaimantT) -> None:
        """Queue a sequence that has never run. Raises RuntimeError when its id waits already."""
        self._add(item, is_newcomer=True)

    def add_preempted(self, item: ClaimantT, now_ns: int, *, by_claim: bool) -> None:
        """Queue a sequence whose memory was taken; `by_claim`: for a strictly higher claim. RuntimeError when it waits."""
        if item.claim.request_id not in self._items:
            item.claim.wait_again(now_ns, by_claim=by_claim)
        self._add(item, is_newcomer=False)

    def remove(self, item: ClaimantT, now_ns: int) -> None:
        """Take it out, to run or to end; its claim stands still from now on. Raises KeyError when it does not wait."""
        claim = item.claim
        del self._items[claim.request_id]
        is_newcomer = claim.request_id in self._newcomer_ids
        self._levels[claim.level].remove(claim, is_newcomer)
        if claim.level:
            self._promotions.remove(claim.promotes_ns, claim.request_id)
        if at_ns := claim.leaves_queue_ns if is_newcomer else claim.deadline_ns:
            self._exits.remove(at_ns, claim.request_id)
        self._newcomer_ids.discard(claim.request_id)
        claim.end_wait(now_ns)

    def advance(self, now_ns: int) -> int:
        """Raise those that have waited for another `aging_ns`, at most MAX_PROMOTIONS levels in one call. Returns how many."""
        for num_promotions in range(MAX_PROMOTIONS):
            request_id = self._promotions.first_due(now_ns)
            if request_id is None:
                return num_promotions
            claim = self._items[request_id].claim
            is_newcomer = request_id in self._newcomer_ids
            self._promotions.remove(claim.promotes_ns, request_id)
            self._levels[claim.level].remove(claim, is_newcomer)
            claim.promote()
            self._levels[claim.level].add(claim, is_newcomer)
            if claim.level:
                self._promotions.add(claim.promotes_ns, request_id)
        return MAX_PROMOTIONS

    def expired(self, now_ns: int) -> list[ClaimantT]:
        """Those that must leave, the longest overdue first: newcomers past their queue timeout, all past their deadline.

        They stay in the queue; the caller ends them and removes them.
        """
        return [self._items[request_id] for request_id in self._exits.due(now_ns)]

    def next_expiry_ns(self) -> int | None:
        """When the next one must leave; None when nobody's time is limited."""
        return self._exits.next_ns()

    def head(self) -> ClaimantT | None:
        """The next to be admitted; it stays in the queue. None when nobody waits."""
        return self._turn()[0]

    def first_of(self, is_wanted: Callable[[ClaimantT], bool]) -> ClaimantT | None:
        """The first newcomer at the head's level whose account is wanted, in order of counters; each account's first is asked.

        None when the head is a preempted one: nobody of its level goes before it for the sake of a share.
        """
        head, level = self._turn()
        if head is None or head.claim.request_id not in self._newcomer_ids:
            return None
        for account in level.ledger.with_credit(math.inf):
            item = self._items[level.newcomers[account][0][2]]
            if is_wanted(item):
                return item
        return None

    def candidates(
        self, now_ns: int, max_num: int = 8, *, quantum: float = CREDIT_QUANTUM, window: int = PREFIX_WINDOW
    ) -> list[ClaimantT]:
        """Those of which any may be admitted next, the head first; empty when nobody waits.

        More than the head only when no preempted one waits at its level: then from the accounts whose counter is less than
        `quantum` above the smallest, in that order, the first `window` by rank; but of an account whose first has used up half
        of its time to the first token, that one alone. So preferring one of them (`prefer_cached`) adds at most `quantum` to
        the difference of service between accounts, and within an account nobody is passed over after half of that time.
        """
        head, level = self._turn()
        if head is None:
            return []
        if level.preempted:
            return [head]
        found: list[ClaimantT] = []
        for account in level.ledger.with_credit(quantum):
            lane = level.newcomers[account]
            is_hurried = self._items[lane[0][2]].claim.hurry_ns <= now_ns
            found += [self._items[rank[2]] for rank in lane[: 1 if is_hurried else window]]
            if len(found) >= max_num:
                break
        return found[:max_num]

    def charge(
        self, claim: Claim, *, num_prefill_tokens: int = 0, num_cached_tokens: int = 0, num_output_tokens: int = 0
    ) -> None:
        """Count tokens for the claim's account, at the level where it stands: the prompt once, at its first admission."""
        self._levels[claim.level].ledger.charge(
            claim.account,
            num_prefill_tokens=num_prefill_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )

    def num_waiting_by_level(self) -> list[int]:
        """How many wait at each level now, promoted ones where they were raised to."""
        return [len(level.preempted) + sum(map(len, level.newcomers.values())) for level in self._levels]

    def check_integrity(self) -> None:
        """Raise RuntimeError when somebody is not in exactly one place. Costs a walk over everything: for tests."""
        listed = [item.claim.request_id for item in self]
        if sorted(listed) != sorted(self._items):
            raise RuntimeError(f"waiting are {sorted(self._items)}, listed are {sorted(listed)}")
        if not self._newcomer_ids <= self._items.keys():
            raise RuntimeError("a newcomer is known that does not wait")
        claims = [item.claim for item in self._items.values()]
        if len(self._promotions) != sum(claim.level > 0 for claim in claims):
            raise RuntimeError("a promotion is watched for nobody, or not for one below the highest level")
        exits = [c.leaves_queue_ns if c.request_id in self._newcomer_ids else c.deadline_ns for c in claims]
        if len(self._exits) != sum(map(bool, exits)):
            raise RuntimeError("an exit is watched for nobody, or not for one that has it")
        for level in self._levels:
            if len(level.ledger) != len(level.newcomers) or not all(account in level.ledger for account in level.newcomers):
                raise RuntimeError("an account is active without newcomers, or has newcomers and is not")
            for lane in (level.preempted, *level.newcomers.values()):
                if lane != sorted(lane):
                    raise RuntimeError("a lane is out of order")

    def _add(self, item: ClaimantT, *, is_newcomer: bool) -> None:
        claim = item.claim
        request_id = claim.request_id
        if request_id in self._items:
            raise RuntimeError(f"request {request_id} waits already")
        self._items[request_id] = item
        if is_newcomer:
            self._newcomer_ids.add(request_id)
        self._levels[claim.level].add(claim, is_newcomer)
        if claim.level:
            self._promotions.add(claim.promotes_ns, request_id)
        if at_ns := claim.leaves_queue_ns if is_newcomer else claim.deadline_ns:
            self._exits.add(at_ns, request_id)

    def _turn(self) -> tuple[ClaimantT | None, _Level]:
        """The next to be admitted, and the first level where anybody waits."""
        for level in self._levels:
            account = level.ledger.first()
            newcomer = None if account is None else self._items[level.newcomers[account][0][2]]
            if level.preempted:
                preempted = self._items[level.preempted[0][2]]
                if newcomer is None or not _overtakes(newcomer.claim, preempted.claim):
                    return preempted, level
            if newcomer is not None:
                return newcomer, level
        return None, self._levels[0]


def _overtakes(newcomer: Claim, preempted: Claim) -> bool:
    """Whether a newcomer goes before a preempted one of the same level."""
    return newcomer.priority < preempted.priority and newcomer.rank < preempted.rank

"""Claims and the queue of classes, against the same rules written down naively; ageing, expiry, prefixes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.protocol.errors import ConfigurationError
from headrace.scheduling.claims import Account, ClaimRules, prefer_cached
from headrace.scheduling.class_queue import MAX_PROMOTIONS, ClassQueue
from headrace.scheduling.fairness import TokenCosts
from tests.core.claimants import AGING_NS, PlainLedger, Waiter, make_claim, make_rules, request_of

CREDIT_NS = AGING_NS // 4
COSTS = TokenCosts(1.0, 2.0, 0.25)


def make_queue(**rules: object) -> tuple[ClassQueue[Waiter], ClaimRules]:
    made = make_rules(**rules)  # type: ignore[arg-type]
    return ClassQueue[Waiter](made, COSTS), made


class QueueMachine(RuleBasedStateMachine):
    """Sequences come, run, are preempted, age and go; the model keeps lists and computes everything from scratch."""

    @initialize(weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * 3), timeout_ns=st.sampled_from([0, 2 * AGING_NS]))
    def start(self, weights: tuple[float, float, float], timeout_ns: int) -> None:
        # c1 and c2 share a level, and levels have a gap: there are three.
        self.rules = make_rules(
            levels=(0, 3, 3, 7), class_weights=(*weights, 1.0), queue_timeout_ns=timeout_ns, ttft_target_ns=AGING_NS
        )
        self.queue = ClassQueue[Waiter](self.rules, COSTS)
        self.timeout_ns = timeout_ns
        self.now_ns = 10_000
        self.next_id = 0
        self.waiting: list[Waiter] = []
        self.preempted: set[Waiter] = set()  # of those that wait
        self.running: list[Waiter] = []
        self.waited_ns: dict[Waiter, int] = {}  # in waits that ended, and credit
        self.since_ns: dict[Waiter, int] = {}
        self.level: dict[Waiter, int] = {}
        self.ledgers = [PlainLedger(self.rules.weights, COSTS) for _ in range(self.rules.num_levels)]

    def model_level(self, item: Waiter) -> int:
        waited_ns = self.waited_ns[item]
        if item in self.waiting:
            waited_ns += self.now_ns - self.since_ns[item]
        return max(0, item.claim.class_level - waited_ns // AGING_NS)

    def update_ledgers(self) -> None:
        for level, ledger in enumerate(self.ledgers):
            newcomers = [w for w in self.waiting if w not in self.preempted and self.level[w] == level]
            ledger.update({item.claim.account for item in newcomers})

    def put(self, item: Waiter) -> None:
        self.waiting.append(item)
        self.level.setdefault(item, item.claim.class_level)
        self.update_ledgers()

    def take(self, item: Waiter) -> None:
        self.queue.remove(item, self.now_ns)
        self.waiting.remove(item)
        self.preempted.discard(item)
        self.waited_ns[item] += self.now_ns - self.since_ns[item]
        self.update_ledgers()

    def newcomers_in_turn(self, level: int) -> list[list[Waiter]]:
        lanes = []
        for account in self.ledgers[level].order():
            lane = [w for w in self.waiting if w not in self.preempted and self.level[w] == level]
            lanes.append(sorted((w for w in lane if w.claim.account == account), key=lambda w: w.claim.rank))
        return lanes

    def model_head(self) -> Waiter | None:
        for level in range(self.rules.num_levels):
            preempted = [w for w in self.preempted if self.level[w] == level]
            lanes = self.newcomers_in_turn(level)
            newcomer = lanes[0][0] if lanes else None
            if not preempted and newcomer is None:
                continue
            first = min(preempted, key=lambda w: w.claim.rank) if preempted else None
            if first is None or newcomer is None:
                return first or newcomer
            overtakes = newcomer.claim.priority < first.claim.priority and newcomer.claim.rank < first.claim.rank
            return newcomer if overtakes else first
        return None

    @rule(
        level=st.integers(0, 3),
        tenant=st.sampled_from(["a", "b", "nobody knows"]),
        priority=st.sampled_from([0, 0, 0, -2, 3]),
        delay_ns=st.integers(0, 500),
        lives_ns=st.sampled_from([0, 0, 300, 3000]),
    )
    def add(self, level: int, tenant: str, priority: int, delay_ns: int, lives_ns: int) -> None:
        arrival_ns = self.now_ns - delay_ns
        deadline_ns = arrival_ns + lives_ns if lives_ns else 0
        request = request_of(
            self.next_id, level=level, tenant=tenant, arrival_ns=arrival_ns, priority=priority, deadline_ns=deadline_ns
        )
        self.next_id += 1
        item = Waiter(self.rules.claim(request))
        assert item.claim.account[0] in ("a", "b", "other")
        self.waited_ns[item], self.since_ns[item] = 0, arrival_ns
        self.queue.add_newcomer(item)
        self.put(item)
        with pytest.raises(RuntimeError):
            self.queue.add_newcomer(item)

    @rule(step_ns=st.sampled_from([1, 50, 400, 1000, 2300]))
    def time_passes(self, step_ns: int) -> None:
        self.now_ns += step_ns
        while True:
            due = [w for w in self.waiting if self.level[w] > self.model_level(w)]
            if not due:
                break
            reach = {w: self.since_ns[w] - self.waited_ns[w] + AGING_NS for w in due}
            at_ns = {w: reach[w] + AGING_NS * (w.claim.class_level - self.level[w]) for w in due}
            item = min(due, key=lambda w: (at_ns[w], w.claim.request_id))
            level, self.level[item] = self.level[item], -1  # it leaves one level before it enters the next
            self.update_ledgers()
            self.level[item] = level - 1
            self.update_ledgers()
        self.queue.advance(self.now_ns)

    @precondition(lambda self: self.waiting)
    @rule(cached=st.integers(0, 40), data=st.data())
    def run_head(self, cached: int, data: st.DataObject) -> None:
        item = self.queue.head()
        assert item is not None
        was_newcomer = item not in self.preempted
        self.take(item)
        self.running.append(item)
        if was_newcomer:
            prefill = data.draw(st.integers(1, 60))
            self.queue.charge(item.claim, num_prefill_tokens=prefill, num_cached_tokens=cached)
            self.ledgers[self.level[item]].charge(item.claim.account, prefill, cached, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def draw_token(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.queue.charge(item.claim, num_output_tokens=1)
        self.ledgers[self.level[item]].charge(item.claim.account, 0, 0, 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), duration_ns=st.integers(1, 1500))
    def pass_over(self, data: st.DataObject, duration_ns: int) -> None:
        item = data.draw(st.sampled_from(self.running))
        before = item.claim.key
        self.waited_ns[item] += duration_ns
        self.level[item] = self.model_level(item)
        assert item.claim.pass_over(duration_ns) == (item.claim.key != before)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), by_claim=st.booleans())
    def preempt(self, data: st.DataObject, by_claim: bool) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.running.remove(item)
        self.queue.add_preempted(item, self.now_ns, by_claim=by_claim)
        self.preempted.add(item)
        self.since_ns[item] = self.now_ns
        self.waited_ns[item] += CREDIT_NS if by_claim else 0
        self.put(item)
        self.time_passes(0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.waiting)
    @rule()
    def leave_the_expired(self) -> None:
        found = self.queue.expired(self.now_ns)
        expected = set()
        for item in self.waiting:
            ends = [item.claim.deadline_ns]
            if item not in self.preempted and self.timeout_ns:
                ends.append(item.claim.rank[1] + self.timeout_ns)
            if any(0 < end_ns <= self.now_ns for end_ns in ends):
                expected.add(item)
        assert len(found) == len(expected)
        assert set(found) == expected
        for item in found:
            self.take(item)
        assert self.queue.expired(self.now_ns) == []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "rules"):
            return
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        assert set(self.queue) == set(self.waiting)
        if any(self.level[w] != self.model_level(w) for w in self.waiting):
            self.time_passes(0)  # an arrival in the past, older than aging
        for item in self.waiting + self.running:
            assert item.claim.level == self.level[item] == self.model_level(item)
        counts = Counter(self.level[w] for w in self.waiting)
        assert self.queue.num_waiting_by_level() == [counts[level] for level in range(self.rules.num_levels)]
        assert self.queue.head() is self.model_head()

    @invariant()
    def candidates_are_of_the_head_s_level(self) -> None:
        if not hasattr(self, "rules"):
            return
        quantum, window, max_num = 30.0, 2, 5
        found = self.queue.candidates(self.now_ns, max_num, quantum=quantum, window=window)
        head = self.model_head()
        assert found[:1] == ([] if head is None else [head])
        if head is None or any(self.level[w] == self.level[head] for w in self.preempted):
            assert len(found) == (head is not None)
            return
        ledger = self.ledgers[self.level[head]]
        least = min(ledger.counters[account] for account in ledger.active)
        expected: list[Waiter] = []
        for index, lane in enumerate(self.newcomers_in_turn(self.level[head])):
            if index == 0 or ledger.counters[lane[0].claim.account] < least + quantum:
                expected += lane[:1] if lane[0].claim.hurry_ns <= self.now_ns else lane[:window]
        assert found == expected[:max_num]


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def fill(queue: ClassQueue[Waiter], rules: ClaimRules, num: int, *, level: int, tenant: str, first_id: int = 0) -> list[Waiter]:
    requests = [request_of(first_id + index, level=level, tenant=tenant) for index in range(num)]
    items = [Waiter(rules.claim(request)) for request in requests]
    for item in items:
        queue.add_newcomer(item)
    return items


def test_a_crowd_that_ages_together_joins_the_level_above_as_one_account() -> None:
    """200 aged requests of class c1 (weight 1) and a backlog of c0 (weight 4), of one tenant: 4 of 5 tokens stay with c0."""
    queue, rules = make_queue(class_weights=(4.0, 1.0, 1.0, 1.0))
    fill(queue, rules, 200, level=1, tenant="a")
    fill(queue, rules, 200, level=0, tenant="a", first_id=1000)
    served: Counter[Account] = Counter()

    def serve(num: int) -> None:
        for _ in range(num):
            item = queue.head()
            assert item is not None
            queue.remove(item, AGING_NS)
            queue.charge(item.claim, num_prefill_tokens=10)
            served[item.claim.account] += 1

    serve(50)
    assert served == {("a", "c0"): 50}
    while queue.advance(AGING_NS):
        pass
    serve(100)
    assert served["a", "c0"] - 50 == pytest.approx(80, abs=1)


def test_promotions_of_one_call_are_bounded() -> None:
    queue, rules = make_queue()
    fill(queue, rules, 150, level=2, tenant="a")
    assert queue.advance(AGING_NS - 1) == 0
    assert [queue.advance(AGING_NS) for _ in range(4)] == [MAX_PROMOTIONS, MAX_PROMOTIONS, 150 - 2 * MAX_PROMOTIONS, 0]
    assert queue.num_waiting_by_level() == [0, 150, 0, 0]


def test_a_queue_timeout_is_for_those_that_have_never_run() -> None:
    """SCH-16: it is known at the moment when it passes, whatever the model does."""
    queue, rules = make_queue(queue_timeout_ns=5_000)
    (item,) = fill(queue, rules, 1, level=0, tenant="a")
    assert queue.expired(4_999) == []
    assert queue.expired(5_000) == [item]
    queue.remove(item, 4_000)
    queue.add_preempted(item, 6_000, by_claim=False)
    assert queue.expired(10**9) == []


def test_sch_07_a_preempted_sequence_comes_before_newcomers_of_its_level() -> None:
    queue, rules = make_queue()
    (old,) = fill(queue, rules, 1, level=1, tenant="a")
    queue.remove(old, 10)
    fill(queue, rules, 3, level=1, tenant="b", first_id=1)
    queue.add_preempted(old, 20, by_claim=True)
    assert queue.head() is old
    assert queue.candidates(20) == [old]
    (higher,) = fill(queue, rules, 1, level=0, tenant="a", first_id=9)
    assert queue.head() is higher


@given(st.integers(1, 3), st.integers(1, 4000), st.lists(st.integers(0, 900), max_size=40))
def test_preemptions_by_claim_are_bounded(level: int, credit_ns: int, waits_ns: list[int]) -> None:
    """However short the waits between them are, after so many the claim is the highest, which nobody preempts."""
    rules = make_rules(preemption_credit_ns=credit_ns)
    claim = rules.claim(request_of(1, level=level))
    queue = ClassQueue[Waiter](rules)
    item = Waiter(claim)
    queue.add_newcomer(item)
    now_ns = 0
    for wait_ns in waits_ns + [0] * 4000:
        now_ns += wait_ns
        queue.advance(now_ns)
        queue.remove(item, now_ns)
        if claim.level == 0:
            break
        queue.add_preempted(item, now_ns, by_claim=True)
    assert claim.level == 0
    assert claim.num_claim_preemptions <= -(-level * AGING_NS // credit_ns) <= rules.max_num_claim_preemptions


def test_earliest_due_first_within_an_account() -> None:
    rules = make_rules(ttft_target_ns=AGING_NS, priority_aging_ns=100)
    claims = [
        rules.claim(request_of(1, arrival_ns=50)),
        rules.claim(request_of(2, arrival_ns=60, deadline_ns=700)),  # its own deadline is earlier than the class's target
        rules.claim(request_of(3, arrival_ns=40, priority=2)),
        rules.claim(request_of(4, arrival_ns=90, priority=-1)),
        rules.claim(request_of(5, arrival_ns=50)),
    ]
    assert [claim.rank[0] for claim in claims] == [1050, 700, 1240, 990, 1050]
    assert [claim.request_id for claim in sorted(claims, key=lambda claim: claim.key)] == [2, 4, 1, 5, 3]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_the_longest_cached_prefix_is_preferred_and_the_first_of_equals(lengths: list[int]) -> None:
    items = [Waiter(make_claim(index)) for index in range(len(lengths))]
    chosen = prefer_cached(items, lambda item: lengths[item.claim.request_id])
    assert chosen is (items[lengths.index(max(lengths))] if lengths else None)


def test_one_in_a_hurry_is_not_passed_over_for_a_cached_prefix() -> None:
    queue, rules = make_queue(ttft_target_ns=1_000)
    items = fill(queue, rules, 3, level=0, tenant="a")
    assert queue.candidates(499) == items
    assert queue.candidates(500) == items[:1]


def test_due_is_no_later_than_ageing_would_make_it() -> None:
    """A promise of ten minutes must not let everybody of the level above pass for ten minutes."""
    rules = make_rules(ttft_target_ns=10**9)
    assert rules.claim(request_of(1, level=2, arrival_ns=5)).rank[0] == 5 + 3 * AGING_NS


def test_impossible_rules_are_refused() -> None:
    for field in ("aging_ns", "preemption_credit_ns"):
        with pytest.raises(ConfigurationError):
            make_rules(**{field: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        make_rules(priority_aging_ns=-1)
    with pytest.raises(RuntimeError, match="highest"):
        make_claim(1).promote()
    queue, _ = make_queue()
    with pytest.raises(KeyError):
        queue.remove(Waiter(make_claim(1)), 0)

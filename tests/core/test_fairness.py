"""The ledger of tenants: weighted shares, no credit for idle time, nobody held back, counters that stay finite."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.protocol.errors import ConfigurationError
from headrace.scheduling.claims import Account
from headrace.scheduling.fairness import TenantLedger, TokenCosts, jain_index
from tests.core.claimants import PlainLedger


def account(name: str) -> Account:
    return name, "standard"


A, B, C = account("a"), account("b"), account("c")
PLAIN = TokenCosts(prefill=1.0, output=1.0, cached=0.0)


def serve(ledger: TenantLedger, service: dict[Account, float], cost: int) -> None:
    """Admit the first: one request of that cost."""
    first = ledger.first()
    assert first is not None
    ledger.charge(first, num_prefill_tokens=cost)
    service[first] = service.get(first, 0) + cost


@given(st.lists(st.integers(1, 500), min_size=20, max_size=300), st.sampled_from([(1, 1), (1, 3), (0.5, 4)]))
def test_backlogged_tenants_are_served_by_weight_within_one_request(costs: list[int], weights: tuple[float, float]) -> None:
    ledger = TenantLedger({A: weights[0], B: weights[1]}, PLAIN)
    ledger.activate(A)
    ledger.activate(B)
    service = {A: 0.0, B: 0.0}
    for cost in costs:
        serve(ledger, service, cost)
        assert abs(service[A] / weights[0] - service[B] / weights[1]) <= max(costs) / min(weights)


def test_one_to_three() -> None:
    ledger = TenantLedger({A: 1.0, B: 3.0}, PLAIN)
    ledger.activate(A)
    ledger.activate(B)
    service: dict[Account, float] = {}
    for _ in range(400):
        serve(ledger, service, 10)
    assert service == {A: 1000, B: 3000}
    assert jain_index([service[A] / 1, service[B] / 3]) == 1


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 50))
def test_idle_time_is_no_credit(num_idle_picks: int, cost_a: int, cost_b: int) -> None:
    """B comes (back) after A had much alone: from then on they share as if B had never been away."""
    ledger = TenantLedger({A: 1.0, B: 1.0}, PLAIN)
    ledger.activate(B)
    ledger.charge(B, num_prefill_tokens=cost_b)
    ledger.deactivate(B)
    ledger.activate(A)
    for _ in range(num_idle_picks):
        ledger.charge(A, num_prefill_tokens=cost_a)
    ledger.activate(B)
    service = {A: 0.0, B: 0.0}
    for _ in range(60):
        serve(ledger, service, cost_a if ledger.first() == A else cost_b)
        assert abs(service[A] - service[B]) <= max(cost_a, cost_b)


def test_leaving_is_no_way_out_of_debt() -> None:
    ledger = TenantLedger({A: 1.0, B: 1.0}, PLAIN)
    ledger.activate(A)
    ledger.activate(B)
    ledger.charge(A, num_prefill_tokens=1000)
    ledger.deactivate(A)
    ledger.activate(A)
    assert ledger.first() == B
    assert ledger.counter(A) - ledger.counter(B) == 1000


def test_who_returns_to_an_empty_queue_starts_level_with_the_last_that_left() -> None:
    ledger = TenantLedger({A: 1.0, B: 1.0}, PLAIN)
    ledger.activate(A)
    ledger.charge(A, num_prefill_tokens=500)
    ledger.deactivate(A)
    ledger.charge(A, num_output_tokens=70)  # still running
    ledger.activate(B)
    assert ledger.counter(B) == ledger.counter(A) == 570


def test_tokens_count_as_configured() -> None:
    ledger = TenantLedger({A: 2.0})
    ledger.charge(A, num_prefill_tokens=100, num_cached_tokens=50, num_output_tokens=10)
    assert ledger.counter(A) == pytest.approx((100 + 5 + 20) / 2)
    with pytest.raises(KeyError):
        ledger.charge(B, num_prefill_tokens=1)
    with pytest.raises(ConfigurationError):
        TokenCosts(prefill=1.0, cached=2.0)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 300)), max_size=30), st.floats(0, 400))
def test_credit_is_what_is_less_than_a_quantum_above_the_smallest(charges: list[tuple[Account, int]], quantum: float) -> None:
    ledger = TenantLedger({A: 1.0, B: 2.0, C: 0.5}, PLAIN)
    for one in (A, B, C):
        ledger.activate(one)
    for one, tokens in charges:
        ledger.charge(one, num_prefill_tokens=tokens)
    counters = {one: ledger.counter(one) for one in (A, B, C)}
    least = min(counters.values())
    found = list(ledger.with_credit(quantum))
    assert found[0] == ledger.first()
    assert set(found) == {one for one, value in counters.items() if value < least + quantum} | {found[0]}
    assert found == sorted(found, key=lambda one: (counters[one], one))


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0, 500))
def test_preferring_within_the_quantum_disturbs_shares_by_no_more(seed: int, quantum: float) -> None:
    """An adversary picks any account with credit: the difference stays within two requests and the quantum."""
    rng = random.Random(seed)
    weights = {A: 1.0, B: 2.0, C: 0.5}
    ledger = TenantLedger(weights, PLAIN)
    for one in weights:
        ledger.activate(one)
    favourite = rng.choice(list(weights))
    for _ in range(300):
        credited = list(ledger.with_credit(quantum))
        chosen = favourite if favourite in credited else rng.choice(credited)
        ledger.charge(chosen, num_prefill_tokens=rng.randint(1, 100))
        counters = [ledger.counter(one) for one in weights]
        assert max(counters) - min(counters) <= quantum + 100 / min(weights.values())


def test_counters_are_rebased_and_the_order_stays() -> None:
    weights = {account(name): 1.0 for name in "abcdefgh"}
    ledger = TenantLedger(weights, PLAIN)
    active = list(weights)[:6]
    for one in active:
        ledger.activate(one)
    huge = 2**38
    for index in range(200):
        ledger.charge(active[index % 6], num_prefill_tokens=huge + index)
        before = [(ledger.counter(one), one) for one in active]
        first = ledger.first()
        assert first == min(before)[1]
        assert [one for _, one in sorted(before)] == list(ledger.with_credit(math.inf))
    assert max(ledger.counter(one) for one in weights) < 2**42
    # Alone and with nobody waiting, one account runs on and on.
    for one in active:
        ledger.deactivate(one)
    for _ in range(200):
        ledger.charge(A, num_output_tokens=huge)
    assert ledger.counter(A) < 2**42


class LedgerMachine(RuleBasedStateMachine):
    """Against VTC written down naively."""

    @initialize(weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5))
    def start(self, weights: list[float]) -> None:
        self.weights = {account(f"t{index}"): weight for index, weight in enumerate(weights)}
        costs = TokenCosts(1.0, 2.0, 0.25)
        self.ledger = TenantLedger(self.weights, costs)
        self.plain = PlainLedger(self.weights, costs)

    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.weights)))
        self.ledger.activate(one)
        self.plain.update(self.plain.active | {one})

    @precondition(lambda self: self.plain.active)
    @rule(data=st.data())
    def deactivate(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.plain.active)))
        self.ledger.deactivate(one)
        self.plain.update(self.plain.active - {one})

    @rule(data=st.data(), prefill=st.integers(0, 50), cached=st.integers(0, 50), output=st.integers(0, 5))
    def charge(self, data: st.DataObject, prefill: int, cached: int, output: int) -> None:
        one = data.draw(st.sampled_from(sorted(self.weights)))
        self.ledger.charge(one, num_prefill_tokens=prefill, num_cached_tokens=cached, num_output_tokens=output)
        self.plain.charge(one, prefill, cached, output)

    @invariant()
    def agrees(self) -> None:
        """Work-conserving too: first is somebody whenever anybody is active."""
        if not hasattr(self, "weights"):
            return
        assert {one: self.ledger.counter(one) for one in self.weights} == self.plain.counters
        assert len(self.ledger) == len(self.plain.active)
        expected = self.plain.order()
        assert list(self.ledger.with_credit(math.inf)) == expected
        assert self.ledger.first() == (expected[0] if expected else None)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_jain() -> None:
    assert jain_index([3, 3, 3]) == pytest.approx(1)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain_index([0, 0]) == 1
    with pytest.raises(ValueError, match="no share"):
        jain_index([])

"""Who had little of late: decay, weights, and accounts that may come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.claims import Account
from headrace.scheduling.recent_shares import EXPECTED_NS, HALF_LIFE_NS, LIGHT_PART, RecentShares


def account(name: str) -> Account:
    return name, "standard"


A, B, C = account("a"), account("b"), account("c")
SECOND = 1_000_000_000


def shares(**weights: float) -> RecentShares:
    return RecentShares({A: 1.0, B: 1.0, C: 1.0} | {account(name): weight for name, weight in weights.items()})


def test_alone_nobody_is_light() -> None:
    found = shares()
    found.charge(A, 100, 0)
    assert not found.is_light(A)
    assert found.num_expected(0, 9) == 0


def test_light_is_less_than_half_of_the_one_with_most() -> None:
    found = shares()
    found.charge(A, 100, 0)
    assert found.is_light(B)
    found.charge(B, 49.9, 0)
    assert found.is_light(B)
    found.charge(B, 0.2, 0)
    assert not found.is_light(B)
    assert not found.is_light(A)


def test_weights_divide() -> None:
    found = shares(b=4.0)
    found.charge(A, 100, 0)
    found.charge(B, 199, 0)
    assert found.is_light(B)
    found.charge(B, 2, 0)
    assert not found.is_light(B)


def test_what_was_long_ago_counts_less() -> None:
    found = shares()
    found.charge(A, 160, 0)
    found.charge(B, 30, 3 * HALF_LIFE_NS)  # A's are worth 20 by now
    assert not found.is_light(B)
    assert not found.is_light(A)
    found.charge(B, 11, 3 * HALF_LIFE_NS)
    assert found.is_light(A)


def test_only_light_accounts_that_asked_not_long_ago_are_expected() -> None:
    found = shares()
    found.charge(B, 1, 0)
    found.charge(C, 90, 0)
    assert found.num_expected(0, 9) == 1  # B beside C
    found.charge(A, 1000, 0)
    assert found.num_expected(EXPECTED_NS - 1, 9) == 2
    assert found.num_expected(EXPECTED_NS - 1, 1) == 1
    assert found.num_expected(EXPECTED_NS, 9) == 0
    found.charge(B, 1, EXPECTED_NS)
    assert found.num_expected(EXPECTED_NS, 9) == 1


def test_an_unknown_account_is_a_defect() -> None:
    with pytest.raises(KeyError):
        shares().charge(account("nobody"), 1, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.floats(0.1, 1e7), st.integers(0, 2_000) | st.integers(0, 10**7)), max_size=60
    )
)
def test_it_is_what_a_sum_of_decayed_tokens_says(charges: list[tuple[Account, float, int]]) -> None:
    """Against the definition: each charge halved for each half-life since; however long the pauses are."""
    found = shares()
    now_ns = 0
    done: list[tuple[Account, float, int]] = []
    for one, cost, pause_seconds in charges:
        now_ns += pause_seconds * SECOND
        found.charge(one, cost, now_ns)
        done.append((one, cost, now_ns))
        amounts = dict.fromkeys((A, B, C), 0.0)
        for other, its_cost, its_ns in done:
            amounts[other] += its_cost * 0.5 ** ((now_ns - its_ns) / HALF_LIFE_NS)
        most = max(amounts.values())
        for other, amount in amounts.items():
            if abs(amount - LIGHT_PART * most) > 1e-3 * most:
                assert found.is_light(other) == (amount < LIGHT_PART * most)


def test_times_going_back_do_no_harm() -> None:
    found = shares()
    found.charge(A, 10, 10**12)
    found.charge(B, 4, 0)
    assert found.is_light(B)

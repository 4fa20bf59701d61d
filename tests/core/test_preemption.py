"""Who gives way: only strictly lower claims, the lowest first, and nobody in vain."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.claims import Claim
from headrace.scheduling.preemption import choose_victim, choose_victims
from tests.core.claimants import make_claim


@dataclass(eq=False)
class Runner:
    claim: Claim
    num_computed_tokens: int
    num_blocks: int


RUNNING = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 6)), max_size=10)


def make(rows: list[tuple[int, int, int]]) -> list[Runner]:
    return [Runner(make_claim(index, level=level), tokens, blocks) for index, (level, tokens, blocks) in enumerate(rows)]


@given(RUNNING, st.integers(0, 3))
def test_the_victim_is_the_lowest_claim_strictly_below(rows: list[tuple[int, int, int]], level: int) -> None:
    running = make(rows)
    victim = choose_victim(running, level)
    lower = [runner for runner in running if runner.claim.level > level]
    if victim is None:
        assert not lower
        return
    assert victim.claim.level == max(runner.claim.level for runner in lower)
    equals = [runner for runner in lower if runner.claim.level == victim.claim.level]
    assert victim.num_computed_tokens == min(runner.num_computed_tokens for runner in equals)
    cheapest = [runner for runner in equals if runner.num_computed_tokens == victim.num_computed_tokens]
    assert victim.claim.rank == max(runner.claim.rank for runner in cheapest)


@given(RUNNING, st.integers(0, 3), st.integers(0, 20))
def test_victims_are_as_many_as_needed_and_none_in_vain(rows: list[tuple[int, int, int]], level: int, num_blocks: int) -> None:
    running = make(rows)
    victims = choose_victims(running, level, num_blocks, lambda runner: runner.num_blocks)
    lower = [runner for runner in running if runner.claim.level > level]
    assert all(victim in lower for victim in victims)
    if victims:
        assert victims[0] is choose_victim(running, level)
        assert sum(victim.num_blocks for victim in victims) >= num_blocks
        assert len(victims) == 1 or sum(victim.num_blocks for victim in victims[:-1]) < num_blocks
        kept = [runner for runner in lower if runner not in victims]
        assert all(runner.claim.level <= victim.claim.level for runner in kept for victim in victims)
    else:
        assert not lower or sum(runner.num_blocks for runner in lower) < num_blocks


def test_one_slot_needs_one_victim() -> None:
    running = make([(0, 5, 2), (2, 30, 2), (2, 10, 0), (1, 0, 2)])
    assert choose_victims(running, 1, 0, lambda runner: runner.num_blocks) == [running[2]]
    assert choose_victims(running, 2, 0, lambda runner: runner.num_blocks) == []

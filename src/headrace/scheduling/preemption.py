"""Who gives way when a higher claim finds no slot or no memory.

Owns: choose_victim, choose_victims. Runs in: worker, tests, simulation.
Must not know: queues, how memory is taken and given back.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from headrace.scheduling.claims import Claimant, Rank


class Runner(Claimant, Protocol):
    """A claimant that runs."""

    @property
    def num_computed_tokens(self) -> int:
        """What would have to be computed again."""
        ...


RunnerT = TypeVar("RunnerT", bound=Runner)


def choose_victim(running: Iterable[RunnerT], level: int) -> RunnerT | None:
    """Who gives way to a claim of `level`: one of the lowest claim among those that run, if it is strictly lower; else None.

    Among equals the one with the least to compute again; then the last in rank. An equal or higher claim never gives way, and
    levels of those that run stand still, so two sequences cannot throw each other out in turn.
    """
    victim: RunnerT | None = None
    worst: tuple[int, int, Rank] | None = None
    for runner in running:
        if runner.claim.level > level:
            order = _order(runner)
            if worst is None or order > worst:
                victim, worst = runner, order
    return victim


def choose_victims(
    running: Iterable[RunnerT], level: int, num_blocks: int, num_blocks_of: Callable[[RunnerT], int]
) -> list[RunnerT]:
    """Who gives way so that a claim of `level` gets `num_blocks` more blocks (0: only a slot): in the order of `choose_victim`.

    Empty when all lower claims together would not give so many: nobody is thrown out in vain. `num_blocks_of` says what a
    sequence would give back (blocks that others share do not count).
    """
    victims: list[RunnerT] = []
    num_found = 0
    for runner in sorted((runner for runner in running if runner.claim.level > level), key=_order, reverse=True):
        victims.append(runner)
        num_found += num_blocks_of(runner)
        if num_found >= num_blocks:
            return victims
    return []


def _order(runner: Runner) -> tuple[int, int, Rank]:
    """The largest gives way first."""
    return runner.claim.level, -runner.num_computed_tokens, runner.claim.rank

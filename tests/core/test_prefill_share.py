"""Sharing a step's prefill tokens: nothing is spent twice, nobody gets crumbs, short prompts end early."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.prefill_share import share_prefill


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], list[int], int, int]:
    remaining = draw(st.lists(st.integers(1, 600), min_size=1, max_size=12))
    levels = sorted(draw(st.lists(st.integers(0, 2), min_size=len(remaining), max_size=len(remaining))))
    return draw(st.integers(0, 1024)), remaining, levels, draw(st.integers(1, 64)), draw(st.sampled_from([1, 4, 16, 32]))


@given(cases())
def test_shares_keep_the_rules(case: tuple[int, list[int], list[int], int, int]) -> None:
    budget, remaining, levels, min_chunk, block_size = case
    shares = share_prefill(budget, remaining, levels, min_chunk=min_chunk, block_size=block_size)
    assert sum(shares) <= budget
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    assert budget == 0 or any(shares)
    getting = [index for index, share in enumerate(shares) if share]
    for index in getting:
        if len(getting) > 1 or budget >= min_chunk:
            assert shares[index] >= min(min_chunk, remaining[index]), "a crumb"
        if budget >= min_chunk and shares[index] < remaining[index] and shares[index] != min_chunk:
            # A multiple of blocks, or the minimum and whole blocks more.
            assert shares[index] % block_size == 0 or (shares[index] - min_chunk) % block_size == 0
    # Whoever stands before one that gets something, at its level or above, gets something too.
    assert getting == list(range(len(getting))) or any(levels[i] != levels[0] for i in getting)
    # What is left over is less than a block, or than a chunk for somebody who got nothing, or everybody is served.
    left = budget - sum(shares)
    if shares != remaining:
        assert left < max(block_size, min_chunk)


@given(cases())
def test_a_lower_level_takes_nothing_from_a_higher_one(case: tuple[int, list[int], list[int], int, int]) -> None:
    budget, remaining, levels, min_chunk, block_size = case
    highest = [left for left, level in zip(remaining, levels, strict=True) if level == levels[0]]
    shares = share_prefill(budget, remaining, levels, min_chunk=min_chunk, block_size=block_size)
    alone = share_prefill(budget, highest, [0] * len(highest), min_chunk=min_chunk, block_size=block_size)
    assert shares[: len(highest)] == alone


@given(st.integers(64, 1024), st.lists(st.integers(1, 600), min_size=2, max_size=8))
def test_shares_are_max_min_fair_but_for_blocks(budget: int, remaining: list[int]) -> None:
    """Whoever gets less than another by more than rounding has got all it needs."""
    shares = share_prefill(budget, remaining, [0] * len(remaining), min_chunk=1, block_size=1)
    for share, left in zip(shares, remaining, strict=True):
        assert share == left or share >= max(shares) - len(remaining)


def test_a_short_prompt_behind_a_long_one_ends_at_once() -> None:
    assert share_prefill(256, [10_000, 40], [0, 0], min_chunk=32, block_size=16) == [208, 40]
    assert share_prefill(256, [10_000, 10_000], [0, 0], min_chunk=32, block_size=16) == [128, 128]
    assert share_prefill(256, [10_000, 40], [0, 1], min_chunk=32, block_size=16) == [256, 0]
    # What is cut off to whole blocks goes to the first that can use it.
    assert share_prefill(189, [500, 500, 500], [0, 0, 0], min_chunk=32, block_size=32) == [64, 64, 32]
    assert share_prefill(189, [500, 500, 80], [0, 0, 0], min_chunk=32, block_size=32) == [64, 64, 32]
    assert share_prefill(256, [100, 5_000, 70], [0, 1, 1], min_chunk=32, block_size=16) == [100, 80, 70]


def test_a_long_prompt_is_not_put_off_for_ever_by_short_ones() -> None:
    """Ten new short prompts in every step: the long one before them gets its equal share each time."""
    left, num_steps = 4096, 0
    while left > 0:
        left -= share_prefill(512, [left, *[40] * 10], [0] * 11, min_chunk=32, block_size=16)[0]
        num_steps += 1
    assert num_steps <= 4096 // 48 + 1


def test_fewer_rows_rather_than_crumbs() -> None:
    assert share_prefill(70, [500, 500, 500], [0, 0, 0], min_chunk=32, block_size=1) == [35, 35, 0]
    assert share_prefill(20, [500, 500], [0, 0], min_chunk=32, block_size=16) == [20, 0]
    assert share_prefill(20, [500, 8], [0, 1], min_chunk=32, block_size=16) == [20, 0]

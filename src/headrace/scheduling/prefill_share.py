"""How one step's prefill tokens are shared among the prompts under way.

Owns: share_prefill. Runs in: worker, tests, simulation.
Must not know: sequences, blocks, time.
"""

from collections.abc import Sequence


def share_prefill(
    budget_tokens: int, remaining_tokens: Sequence[int], levels: Sequence[int], *, min_chunk: int, block_size: int
) -> list[int]:
    """Tokens of each prompt to compute in this step; 0: none.

    `remaining_tokens` (each at least 1) stand in the order of claims, `levels` are theirs and never fall. A level gets what the
    levels before it leave over. Within a level:

    - As many prompts as can get `min_chunk` tokens each (or all they have left) take part, the first ones; at least one does.
    - They share by water-filling (max-min fairness: Bertsekas and Gallager, Data Networks, 6.5.2): equal shares, and what a
      short prompt does not need goes to the others. So a short prompt behind a long one ends nearly as early as alone.
    - A share that does not end its prompt is cut to a multiple of `block_size`, where that leaves `min_chunk`, and what was cut
      goes to the first ones, a block for each. Less than a block may stay unused.

    The sum never exceeds the budget. If anybody has work and the budget is at least 1, somebody gets some.
    """
    shares = [0] * len(remaining_tokens)
    begin = 0
    while begin < len(shares) and budget_tokens > 0:
        end = begin
        while end < len(shares) and levels[end] == levels[begin]:
            end += 1
        found = _share_level(budget_tokens, remaining_tokens[begin:end], min_chunk, block_size, is_first=begin == 0)
        shares[begin:end] = found
        budget_tokens -= sum(found)
        begin = end
    return shares


def _share_level(budget: int, remaining: Sequence[int], min_chunk: int, block_size: int, *, is_first: bool) -> list[int]:
    shares = [0] * len(remaining)
    num_rows = _num_rows(budget, remaining, min_chunk)
    if num_rows == 0:
        if is_first:  # less than one chunk for anybody: the first gets all there is
            shares[0] = min(budget, remaining[0])
        return shares
    left = budget
    # Water-filling: the shortest first, each at most an equal part of what is left.
    for num_filled, index in enumerate(sorted(range(num_rows), key=remaining.__getitem__)):
        shares[index] = min(remaining[index], left // (num_rows - num_filled))
        left -= shares[index]
    for index in range(num_rows):
        if shares[index] < remaining[index]:
            whole = max(min_chunk, shares[index] - shares[index] % block_size)
            left += shares[index] - whole
            shares[index] = whole
    for index in range(num_rows):  # less than a block was cut off each, so once around is enough
        extra = min(block_size, remaining[index] - shares[index])
        if extra <= left:
            shares[index] += extra
            left -= extra
    return shares


def _num_rows(budget: int, remaining: Sequence[int], min_chunk: int) -> int:
    """How many of the first can get `min_chunk`, or all they have left."""
    needed = 0
    for index, tokens in enumerate(remaining):
        needed += min(tokens, min_chunk)
        if needed > budget:
            return index
    return len(remaining)

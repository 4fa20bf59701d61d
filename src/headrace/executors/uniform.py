"""Counter-based random numbers: the draw for one position of one request, made from (seed, position) and nothing else.

Owns: the generator. Runs in: worker. Must not know: logits, batches.
There is no state to advance: a request can be continued anywhere, and no neighbour can shift its draws.
"""

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def mix64(value: int) -> int:
    """A bijection of [0, 2**64) that scatters neighbouring values: the finaliser of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (variant 13 of Stafford's constants).
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_bits(seed: int, position: int) -> int:
    """64 random bits of the stream `seed` at `position`: SplitMix64 started at mix64(seed), its output number `position`.

    The seed is mixed first, so that the streams of seeds 1, 2, 3, ... do not overlap by a shift.
    """
    return mix64((mix64((seed + _GOLDEN_GAMMA) & _MASK) + (position + 1) * _GOLDEN_GAMMA) & _MASK)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (random_bits(seed, position) >> 11) * 2.0**-53

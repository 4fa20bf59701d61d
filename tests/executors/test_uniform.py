"""The counter-based generator: known values, range, independence of neighbouring seeds and positions."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.executors.uniform import mix64, random_bits, uniform

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


def test_the_stream_is_splitmix64() -> None:
    """The published first outputs of SplitMix64 from state 1234567; a seed's stream starts at mix64 of the mixed seed."""
    golden, state, outputs = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + golden) % 2**64
        outputs.append(mix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    start = mix64(golden)
    assert [random_bits(0, i) for i in range(3)] == [mix64((start + (i + 1) * golden) % 2**64) for i in range(3)]


@given(SEEDS, POSITIONS)
def test_it_lies_in_the_half_open_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_neighbours_do_not_resemble_one_another() -> None:
    """Means, and correlation between neighbouring seeds and positions, as of 4,096 independent numbers (within 5 sigma)."""
    size = 64
    grid = [[uniform(seed, position) - 0.5 for position in range(size)] for seed in range(size)]
    flat = [value for line in grid for value in line]
    deviation = (1 / 12) / len(flat) ** 0.5
    assert abs(sum(flat) / len(flat)) < 5 * (1 / 12) ** 0.5 / len(flat) ** 0.5
    by_seed = sum(grid[s][p] * grid[s + 1][p] for s in range(size - 1) for p in range(size))
    by_position = sum(grid[s][p] * grid[s][p + 1] for s in range(size) for p in range(size - 1))
    shifted = sum(grid[s][p + 1] * grid[s + 1][p] for s in range(size - 1) for p in range(size - 1))
    for correlation in (by_seed, by_position, shifted):
        assert abs(correlation / len(flat)) < 5 * deviation
    assert len(set(flat)) == len(flat)

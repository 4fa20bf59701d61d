"""Processor time for each token over a window, with clocks of the test."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.telemetry.cpu import SAMPLE_NS, WINDOW_NS, GatewayCpu

SECOND = 1_000_000_000


class Machine:
    """A clock, a processor and a number of tokens."""

    def __init__(self):
        self.now = 100 * SECOND
        self.process = 0
        self.tokens = 0
        self.cpu = GatewayCpu(lambda: self.tokens, lambda: self.now, lambda: self.process)

    def batch(self, tokens, cpu_ns, passes_ns):
        self.cpu.note()
        self.tokens += tokens
        self.process += cpu_ns
        self.now += passes_ns


def test_before_the_first_token_it_is_0():
    assert Machine().cpu.seconds_per_token() == 0.0


def test_a_steady_load():
    machine = Machine()
    for _ in range(3000):
        machine.batch(10, 200_000, 10_000_000)
    assert machine.cpu.seconds_per_token() == 20e-6
    assert machine.cpu.process_ns() == 3000 * 200_000
    assert machine.cpu.num_tokens() == 30_000


def test_what_is_older_than_the_window_is_forgotten():
    machine = Machine()
    for _ in range(1000):
        machine.batch(1, 1_000_000, 10_000_000)
    for _ in range(1100):
        machine.batch(1, 5_000, 10_000_000)
    assert machine.cpu.seconds_per_token() == 5e-6
    machine.process += SECOND
    machine.now += 60 * SECOND
    assert machine.cpu.seconds_per_token() == 0.0
    machine.batch(4, 8_000, 10_000_000)
    assert machine.cpu.seconds_per_token() == 2e-6, "idle time before the batch does not count"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**8), st.integers(0, 3 * SECOND)), max_size=200))
def test_memory_is_bounded_and_the_value_is_never_negative(batches):
    machine = Machine()
    for batch in batches:
        machine.batch(*batch)
        assert machine.cpu.seconds_per_token() >= 0
        assert len(machine.cpu._samples) <= WINDOW_NS // SAMPLE_NS + 1

"""Order of blocks, interruption, and the pooling of an arm's blocks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.figures import DEFAULT_TARGETS, summarize
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.studies.alternation import Arm, alternate, pool_runs, round_order, summarize_pooled
from tests.loadtest.studies.synthetic import PaperServer

SETTINGS = RunSettings(url="http://h", model="m", num_clients=2, num_requests=8, output_tokens=10, seed=100)


def arms_of(server: PaperServer, *names: str) -> list[Arm]:
    return [Arm(name, SETTINGS, server) for name in names]


def test_two_arms_are_a_b_b_a_and_the_first_round_is_thrown_away():
    server = PaperServer()
    seen = []
    blocks, ending = alternate(
        arms_of(server, "A", "B"), 2, on_block=lambda block, number, total: seen.append((block.arm, number, total))
    )
    assert seen == [("B", 1, 6), ("A", 2, 6), ("A", 3, 6), ("B", 4, 6), ("B", 5, 6), ("A", 6, 6)]
    assert [(block.arm, block.round_number) for block in blocks] == [("A", 0), ("B", 0), ("B", 1), ("A", 1)]
    assert (ending.by, ending.sentence("x")) == ("", "")


def test_a_round_has_one_seed_and_rounds_differ():
    server = PaperServer()
    alternate(arms_of(server, "A", "B", "C"), 2)
    seeds = [settings.seed for settings, _ in server.calls]
    assert seeds == [100] * 3 + [101] * 3 + [102] * 3
    assert [label for _, label in server.calls] == ["C", "B", "A", "A", "B", "C", "C", "B", "A"]


@given(st.integers(2, 5), st.integers(0, 9))
def test_every_round_has_every_arm_once_and_the_next_is_its_mirror(num_arms, round_number):
    order = round_order(num_arms, round_number)
    assert sorted(order) == list(range(num_arms))
    assert round_order(num_arms, round_number + 1) == order[::-1]


def interrupting(server: PaperServer, after: int):
    def measure(settings: RunSettings, label: str) -> Run:
        if len(server.calls) == after:
            raise KeyboardInterrupt
        return server(settings, label)

    return measure


def test_an_interrupt_keeps_whole_rounds_only():
    server = PaperServer()
    arms = [Arm(name, SETTINGS, interrupting(server, 5)) for name in "AB"]
    blocks, ending = alternate(arms, 3)  # 2 discarded, 2 of round 0, 1 of round 1
    assert ending.by == "interrupt"
    assert [(block.arm, block.round_number) for block in blocks] == [("A", 0), ("B", 0)]


def test_an_interrupt_before_the_first_whole_round_is_raised():
    server = PaperServer()
    with pytest.raises(KeyboardInterrupt):
        alternate([Arm(name, SETTINGS, interrupting(server, 3)) for name in "AB"], 3)


def test_pooling_lays_windows_end_to_end_and_leaves_out_what_is_outside():
    server = PaperServer()
    runs = []
    for place in range(3):
        run = server(msgspec.structs.replace(SETTINGS, seed=place), "A")
        runs.append(msgspec.structs.replace(run, window_begin=0.1, window_end=run.wall_seconds - 0.1))
    pooled = pool_runs(runs, "A")
    inside = sum(run.window_begin <= record.scheduled < run.window_end for run in runs for record in run.requests)
    assert len(pooled.requests) == inside < sum(len(run.requests) for run in runs)
    assert pooled.window_end == pytest.approx(sum(run.window_end - run.window_begin for run in runs))
    assert [record.index for record in pooled.requests] == list(range(inside))
    assert all(0 <= record.scheduled < pooled.window_end for record in pooled.requests)


def test_pooled_figures_are_those_of_all_requests_and_rates_those_of_the_windows():
    """Three equal blocks must have the figures of one of them: no gap between blocks may lower a rate."""
    run = PaperServer()(SETTINGS, "A")
    one, three = summarize(run), summarize_pooled([run, run, run], "arm", DEFAULT_TARGETS)
    assert three.label == "arm"
    assert three.requests.offered == 3 * one.requests.offered
    assert three.output_tokens_per_second == pytest.approx(one.output_tokens_per_second)
    assert three.requests_per_second == pytest.approx(one.requests_per_second)
    assert three.ttft_seconds.p50 == pytest.approx(one.ttft_seconds.p50)
    assert three.tbt_seconds.p90 == pytest.approx(one.tbt_seconds.p90)


def test_one_slow_client_among_the_blocks_is_a_slow_client():
    run = PaperServer()(SETTINGS, "A")
    slow = msgspec.structs.replace(
        run, client=msgspec.structs.replace(run.client, was_bottleneck=True, why="a process used its whole core")
    )
    client = pool_runs([run, slow], "A").client
    assert client.was_bottleneck
    assert client.why == "in 1 of 2 blocks: a process used its whole core"
    assert not pool_runs([run, run], "A").client.was_bottleneck


def test_nothing_cannot_be_pooled():
    with pytest.raises(ValueError, match="nothing"):
        pool_runs([], "A")

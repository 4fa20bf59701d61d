"""compare and stream on servers whose true ratio is known."""

import msgspec
import pytest

from headrace.loadtest.figures import DEFAULT_TARGETS
from headrace.loadtest.records import RunSettings
from headrace.loadtest.report.model import Ratio, VerdictKind
from headrace.loadtest.studies.alternation import Arm
from headrace.loadtest.studies.paired import figure_of, ratio_verdict, run_compare
from headrace.loadtest.studies.stream import run_stream
from tests.loadtest.studies.synthetic import PaperServer

SETTINGS = RunSettings(url="http://h", model="m", num_clients=4, num_requests=16, output_tokens=20, seed=3)


def compare(first: PaperServer, second: PaperServer, rounds: int = 6, second_settings: RunSettings = SETTINGS):
    return run_compare([Arm("first", SETTINGS, first), Arm("second", second_settings, second)], rounds)


def texts(report, kind: VerdictKind | None = None) -> str:
    return "\n".join(item.text for section in report.sections for item in section.verdicts if kind in (None, item.kind))


def test_a_server_twice_as_fast_is_found_to_be():
    report = compare(PaperServer(noise=0.1), PaperServer(noise=0.1, speed=2.0, chance=1))
    ratios = {ratio.figure: ratio for ratio in report.sections[0].ratios}
    assert ratios["ttft_seconds/p50"].value == pytest.approx(0.5, rel=0.05)
    assert ratios["e2e_seconds/p50"].value == pytest.approx(0.5, rel=0.05)
    assert ratios["output_tokens_per_second"].value == pytest.approx(2.0, rel=0.05)
    assert all(ratio.is_win and ratio.low < ratio.value < ratio.high for ratio in ratios.values())
    assert "second is better" in texts(report)
    assert report.figures["num_rounds"] == 6


def test_equal_servers_win_nothing():
    """Of the figures of equal servers about one in twenty may seem to differ; more than one in eight would be a fault."""
    claims = total = 0
    for seed in range(20):
        settings = msgspec.structs.replace(SETTINGS, seed=seed * 50)
        pair = [Arm(name, settings, PaperServer(noise=0.2, chance=place)) for place, name in enumerate("ab")]
        ratios = run_compare(pair, 5, targets=DEFAULT_TARGETS[:1]).sections[0].ratios
        claims += sum(ratio.is_clear for ratio in ratios)
        total += len(ratios)
    assert total == 120
    assert claims <= total / 8


def test_a_drift_that_meets_both_arms_alike_is_no_difference():
    class Drifting(PaperServer):
        blocks = 0

        def __call__(self, settings, label):
            Drifting.blocks += 1
            self.speed = 1.0 - 0.03 * Drifting.blocks
            return super().__call__(settings, label)

    report = compare(Drifting(), Drifting(), rounds=8)
    assert not any(ratio.is_clear for ratio in report.sections[0].ratios)


def test_three_arms_are_each_compared_with_the_first():
    arms = [Arm(name, SETTINGS, PaperServer(speed=speed)) for name, speed in (("a", 1.0), ("b", 1.5), ("c", 3.0))]
    report = run_compare(arms, 3)
    section = report.sections[0]
    assert {(ratio.subject, ratio.baseline) for ratio in section.ratios} == {("b", "a"), ("c", "a")}
    assert [result.label for result in section.results] == ["a", "b", "c"]
    assert len(section.runs) == 9
    assert "3 pairs of blocks: intervals are wide" in texts(report, VerdictKind.WARNING)


def test_answers_of_other_lengths_are_said_to_be_unlike():
    other = msgspec.structs.replace(SETTINGS, output_tokens=10)
    assert "answers differ in length" in texts(compare(PaperServer(), PaperServer(), 5, other), VerdictKind.WARNING)
    assert "answers differ" not in texts(compare(PaperServer(), PaperServer(), 5))


def test_lost_requests_are_loud():
    open_loop = msgspec.structs.replace(SETTINGS, arrival="poisson", rate=20.0, num_clients=None, duration_seconds=10.0)
    arms = [Arm("bounded", open_loop, PaperServer(max_queued=3)), Arm("unbounded", open_loop, PaperServer())]
    report = run_compare(arms, 2)
    assert "bounded: " in texts(report, VerdictKind.PROBLEM)
    assert "unbounded: " not in texts(report, VerdictKind.PROBLEM)


def test_one_round_makes_no_claim():
    report = compare(PaperServer(), PaperServer(speed=2), rounds=1)
    assert all(ratio.low is None and not ratio.is_clear for ratio in report.sections[0].ratios)
    assert "no ground for a claim" in texts(report, VerdictKind.WARNING)


@pytest.mark.parametrize("names", [("a", "a"), ("a",)])
def test_arms_need_different_names_and_company(names):
    with pytest.raises(ValueError, match="two or more"):
        run_compare([Arm(name, SETTINGS, PaperServer()) for name in names], 2)


@pytest.mark.parametrize(
    ("value", "low", "high", "is_lower_better", "expected"),
    [
        (0.8, 0.7, 0.9, True, "new is better"),
        (0.8, 0.7, 0.9, False, "old is better"),
        (1.2, 1.1, 1.3, True, "old is better"),
        (1.2, 0.9, 1.5, True, "no difference can be claimed"),
    ],
)
def test_a_claim_needs_an_interval_without_one(value, low, high, is_lower_better, expected):
    ratio = Ratio(
        subject="new", baseline="old", figure="ttft_seconds/p50", value=value, low=low, high=high, num_pairs=9,
        is_lower_better=is_lower_better,
    )  # fmt: skip
    assert expected in ratio_verdict(ratio).text


def test_a_figure_without_samples_has_no_ratio():
    report = run_stream(SETTINGS, PaperServer(), 3)
    whole = report.sections[0].results[0]
    assert figure_of(whole, "tbt_seconds/mean") is None
    assert not any(ratio.figure.startswith("tbt") for ratio in report.sections[0].ratios)


def test_stream_tells_perceived_from_real_speed():
    """20 tokens every 20 ms after 100 ms: first text after 100 ms instead of 480 ms, the same total time."""
    report = run_stream(SETTINGS, PaperServer(), 6)
    assert report.kind == "stream"
    ratios = {ratio.figure: ratio for ratio in report.sections[0].ratios}
    assert ratios["ttft_seconds/p50"].value == pytest.approx(100 / 480, rel=0.01)
    assert ratios["e2e_seconds/p50"].value == pytest.approx(1.0, rel=0.01)
    said = texts(report)
    assert "first text came after 100 ms (p50) instead of 480 ms" in said
    assert "perceived speed" in said
    assert "no cost and no gain" in said


def test_stream_names_a_cost():
    class Costly(PaperServer):
        def __call__(self, settings, label):
            self.speed = 0.9 if settings.is_stream else 1.0
            return super().__call__(settings, label)

    report = run_stream(SETTINGS, Costly(noise=0.01), 6)
    assert "this is what streaming costs" in texts(report, VerdictKind.WARNING)


def test_a_stream_that_is_held_back_is_named():
    """Everything arrives at the end, in a burst."""
    report = run_stream(SETTINGS, PaperServer(prefill_seconds=1.0, gap_seconds=0.0001, max_tokens_per_second=1e6), 5)
    assert "holds the stream back" in texts(report, VerdictKind.PROBLEM)

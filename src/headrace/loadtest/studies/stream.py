"""Stream: the same requests with streaming on and off, so that perceived and real speed are told apart.

Owns: the two arms, what streaming gains and costs in words. Runs in: load tool. Must not know: HTTP, how figures are made.
"""

from collections.abc import Callable, Sequence

import msgspec

from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget
from headrace.loadtest.records import RunSettings
from headrace.loadtest.report.model import Ratio, Report, Verdict, VerdictKind
from headrace.loadtest.report.tables import seconds
from headrace.loadtest.results import RunResult
from headrace.loadtest.studies.alternation import Arm, Block, Measure
from headrace.loadtest.studies.paired import interval_text, measure_arms

ON, OFF = "streaming", "whole answers"
HELD_BACK_SHARE = 0.8  # first text after so much of the total time: the stream does not stream


def run_stream(
    settings: RunSettings,
    measure: Measure,
    num_rounds: int,
    *,
    targets: Sequence[GoodputTarget] = DEFAULT_TARGETS,
    is_first_discarded: bool = True,
    on_block: Callable[[Block, int, int], None] | None = None,
) -> Report:
    """Both ways in alternation. Whole answers are the baseline: ratios say what streaming changes."""
    arms = [
        Arm(OFF, msgspec.structs.replace(settings, is_stream=False), measure),
        Arm(ON, msgspec.structs.replace(settings, is_stream=True), measure),
    ]
    section, figures = measure_arms(arms, num_rounds, targets, is_first_discarded=is_first_discarded, on_block=on_block)
    section.title = "Streaming on and off"
    section.intro = (
        "The same requests both ways, block by block in alternation. Without streaming the first text is the whole answer, so "
        "TTFT equals E2E there. A gain in TTFT is perceived speed; E2E and throughput are real speed."
    )
    whole, streamed = section.results
    section.verdicts = stream_verdicts(streamed, whole, section.ratios) + section.verdicts
    return Report(kind="stream", title="What streaming gains and costs", figures=figures, sections=[section])


def stream_verdicts(streamed: RunResult, whole: RunResult, ratios: Sequence[Ratio]) -> list[Verdict]:
    """What streaming gains (the wait for the first text) and costs (total time, throughput), each with its interval."""
    by_figure = {ratio.figure: ratio for ratio in ratios}
    verdicts = []
    first = by_figure.get("ttft_seconds/p50")
    if first is not None:
        verdicts.append(_gain(first, streamed, whole))
    for figure, name in (
        ("e2e_seconds/p50", "Total time (E2E p50)"),
        ("output_tokens_per_second", "Throughput (output tokens/s)"),
    ):
        if (ratio := by_figure.get(figure)) is not None:
            verdicts.append(_cost(ratio, name))
    return verdicts


def _gain(ratio: Ratio, streamed: RunResult, whole: RunResult) -> Verdict:
    ttft, total = streamed.ttft_seconds.p50, streamed.e2e_seconds.p50
    if ttft is not None and total and ttft >= HELD_BACK_SHARE * total:
        return Verdict(
            VerdictKind.PROBLEM,
            f"Streaming gains little here: the first text came after {seconds(ttft)}, {ttft / total:.0%} of the total time. "
            f"The server, or something between, holds the stream back, or answers are very short.",
        )
    said = (
        f"With streaming the first text came after {seconds(ttft)} (p50) instead of {seconds(whole.ttft_seconds.p50)}, when "
        f"the whole answer came: {interval_text(ratio)} times the wait"
    )
    if not ratio.is_clear:
        return Verdict(VerdictKind.INFO, f"{said}; no difference can be claimed.")
    if not ratio.is_win:
        return Verdict(VerdictKind.WARNING, f"{said}: streaming made the first text later.")
    return Verdict(VerdictKind.OK, f"{said}. This is perceived speed.")


def _cost(ratio: Ratio, name: str) -> Verdict:
    said = f"{name} with streaming is {interval_text(ratio)} times that without"
    if not ratio.is_clear:
        return Verdict(VerdictKind.INFO, f"{said}: no cost and no gain can be claimed.")
    if ratio.is_win:
        return Verdict(VerdictKind.INFO, f"{said}: real speed is better with streaming.")
    return Verdict(VerdictKind.WARNING, f"{said}: this is what streaming costs.")

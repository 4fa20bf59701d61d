"""Compare: arms measured in alternation, and what their pairs of blocks allow to be claimed.

Owns: ratios of paired blocks, the sentences on them, the report. Runs in: load tool. Must not know: HTTP, how figures are made.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget, summarize
from headrace.loadtest.report.model import Ratio, Report, ReportSection, Verdict, VerdictKind
from headrace.loadtest.report.tables import figure_name
from headrace.loadtest.results import Distribution, RunResult
from headrace.loadtest.statistics import paired_ratio
from headrace.loadtest.studies.alternation import Arm, Block, alternate, summarize_pooled

# Compared block by block: a tail percentile beyond p90 has too few samples in a block.
FIGURES: tuple[tuple[str, bool], ...] = (
    ("ttft_seconds/p50", True),
    ("ttft_seconds/p90", True),
    ("tbt_seconds/mean", True),
    ("worst_tbt_seconds/p50", True),
    ("e2e_seconds/p50", True),
    ("output_tokens_per_second", False),
)
MAX_LENGTH_DIFFERENCE = 0.02  # of output tokens per completed request; beyond it E2E and throughput compare unlike answers
MIN_PAIRS = 5  # below, an interval of Student's t is so wide that a win is nearly out of reach


def figure_of(result: RunResult, figure: str) -> float | None:
    """A figure by its path ("ttft_seconds/p50"); None when it has no samples or is not above 0, and so has no ratio."""
    name, _, part = figure.partition("/")
    item: Distribution | float = getattr(result, name)
    value = getattr(item, part) if isinstance(item, Distribution) else item
    return value if value is not None and math.isfinite(value) and value > 0 else None


def block_results(blocks: Sequence[Block], targets: Sequence[GoodputTarget]) -> dict[str, dict[int, RunResult]]:
    """Figures of each block: arm -> round -> result."""
    found: dict[str, dict[int, RunResult]] = {}
    for block in blocks:
        found.setdefault(block.arm, {})[block.round_number] = summarize(block.run, targets)
    return found


def ratios(subject: str, baseline: str, results: dict[str, dict[int, RunResult]]) -> list[Ratio]:
    """Subject over baseline in each figure, over the rounds in which both have it. A figure that no round has is left out."""
    found = []
    for figure, is_lower_better in FIGURES:
        pairs = []
        for round_number in sorted(results[baseline].keys() & results[subject].keys()):
            below, above = (figure_of(results[name][round_number], figure) for name in (baseline, subject))
            if below is not None and above is not None:
                pairs.append((below, above))
        if not pairs:
            continue
        ratio = Ratio(
            subject=subject,
            baseline=baseline,
            figure=figure,
            value=math.exp(sum(math.log(above / below) for below, above in pairs) / len(pairs)),
            num_pairs=len(pairs),
            is_lower_better=is_lower_better,
        )
        if len(pairs) > 1:
            estimate = paired_ratio([below for below, _ in pairs], [above for _, above in pairs])
            ratio.value, ratio.low, ratio.high = estimate.ratio, estimate.low, estimate.high
        found.append(ratio)
    return found


def interval_text(ratio: Ratio) -> str:
    """0.872 [0.851, 0.896]; without an interval that is said."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f} [no interval]"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def ratio_verdict(ratio: Ratio) -> Verdict:
    """One sentence: a win or a loss only when the interval excludes 1. Neither is good or bad news in itself."""
    name = figure_name(ratio.figure)
    said = f"{name} of {ratio.subject} is {interval_text(ratio)} times that of {ratio.baseline}"
    if ratio.low is None:
        return Verdict(VerdictKind.WARNING, f"{said}: one pair of blocks is no ground for a claim.")
    if not ratio.is_clear:
        return Verdict(VerdictKind.INFO, f"{said}: no difference can be claimed.")
    return Verdict(VerdictKind.INFO, f"{said}: {ratio.subject if ratio.is_win else ratio.baseline} is better.")


def fairness_verdicts(pooled: Sequence[RunResult]) -> list[Verdict]:
    """What makes arms unlike: answers of other lengths, requests that one of them lost, another model."""
    verdicts = []
    for result in pooled:
        counts = result.requests
        lost = counts.refused + counts.failed
        if counts.offered and lost:
            verdicts.append(
                Verdict(
                    VerdictKind.PROBLEM if lost > counts.offered // 10 else VerdictKind.WARNING,
                    f"{result.label}: {lost} of {counts.offered} requests were refused or failed; "
                    f"its latencies are of the others alone.",
                )
            )
    lengths = {item.label: item.output_tokens / item.requests.completed for item in pooled if item.requests.completed}
    if lengths and max(lengths.values()) > min(lengths.values()) * (1 + MAX_LENGTH_DIFFERENCE):
        shown = ", ".join(f"{name} {length:.1f}" for name, length in lengths.items())
        verdicts.append(
            Verdict(
                VerdictKind.WARNING,
                f"The answers differ in length (output tokens a request: {shown}): E2E and throughput compare unlike work; "
                f"TTFT and TBT still compare.",
            )
        )
    models = {item.settings.model for item in pooled}
    if len(models) > 1:
        shown = ", ".join(f"{item.label} {item.settings.model}" for item in pooled)
        verdicts.append(
            Verdict(VerdictKind.INFO, f"The model ids differ: {shown}. Is it the same model in the same precision?")
        )
    return verdicts


def measure_arms(
    arms: Sequence[Arm],
    num_rounds: int,
    targets: Sequence[GoodputTarget],
    *,
    is_first_discarded: bool = True,
    on_block: Callable[[Block, int, int], None] | None = None,
) -> tuple[ReportSection, dict[str, float | str | None]]:
    """Alternate, and lay out what came back: pooled figures of each arm, ratios to the first arm, what makes them unlike.

    Returns the section and figures for the report's JSON.
    """
    if len({arm.name for arm in arms}) != len(arms) or len(arms) < 2:
        raise ValueError("a comparison needs two or more arms with different names")
    if num_rounds < 1:
        raise ValueError("a comparison needs a round")
    blocks, ending = alternate(arms, num_rounds, is_first_discarded=is_first_discarded, on_block=on_block)
    results = block_results(blocks, targets)
    runs = {arm.name: [block.run for block in blocks if block.arm == arm.name] for arm in arms}
    pooled = [summarize_pooled(runs[arm.name], arm.name, targets) for arm in arms]
    # A pooled arm is shown with the settings that were asked for: the seed of one block would mislead.
    pooled = [msgspec.structs.replace(item, settings=arm.settings) for item, arm in zip(pooled, arms, strict=True)]
    verdicts = fairness_verdicts(pooled)
    measured = len(blocks) // len(arms)
    if ending.by:
        text = ending.sentence(f"{measured} of {num_rounds} rounds were measured.")
        verdicts.append(Verdict(VerdictKind.PROBLEM, text))
    if measured < MIN_PAIRS:
        verdicts.append(
            Verdict(
                VerdictKind.WARNING,
                f"{measured} pairs of blocks: intervals are wide. {MIN_PAIRS} or more tell more (--rounds).",
            )
        )
    section = ReportSection(
        title="Side by side",
        results=pooled,
        runs=[run for arm in arms for run in runs[arm.name]],
        ratios=[ratio for arm in arms[1:] for ratio in ratios(arm.name, arms[0].name, results)],
        verdicts=verdicts,
    )
    return section, {"num_rounds": float(measured), **ending.figures()}


def run_compare(
    arms: Sequence[Arm],
    num_rounds: int,
    *,
    targets: Sequence[GoodputTarget] = DEFAULT_TARGETS,
    is_first_discarded: bool = True,
    on_block: Callable[[Block, int, int], None] | None = None,
) -> Report:
    """Two or more arms against the first, in blocks A B B A ... within one run. KeyboardInterrupt before the first whole round.

    Every interval is of 95 % for itself: of twenty figures without a difference, one shows one.
    """
    section, figures = measure_arms(arms, num_rounds, targets, is_first_discarded=is_first_discarded, on_block=on_block)
    names = [arm.name for arm in arms]
    discarded = "A round ahead of these was thrown away. " if is_first_discarded else ""
    section.intro = (
        f"Measured in alternation, forwards and backwards ({' '.join(names)} {' '.join(reversed(names))} ...), each block with "
        f"the same requests for all. {discarded}Ratios are of pairs of blocks; each 95 % interval stands for itself: of twenty "
        f"figures without a difference, one will seem to have one."
    )
    section.verdicts = [ratio_verdict(ratio) for ratio in section.ratios] + section.verdicts
    return Report(kind="compare", title=f"Comparison: {' against '.join(reversed(names))}", figures=figures, sections=[section])

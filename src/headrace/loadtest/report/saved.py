"""Saved reports laid side by side.

Owns: compare_saved. Runs in: load tool. Must not know: files, forms of reports.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.loadtest.report.model import Curve, Ratio, Report, ReportSection, Verdict, VerdictKind
from headrace.loadtest.report.tables import differing_settings
from headrace.loadtest.results import RunResult

# What two runs may differ in and still be comparable: it is what is compared, or how much of it there was.
_MAY_DIFFER = frozenset({"url", "model", "seed", "num_requests", "duration_seconds", "num_processes", "timeout_seconds"})
_Z95 = 1.959964
_RATIO_FIGURES = (
    ("ttft_seconds", "p50"), ("ttft_seconds", "p99"), ("tbt_seconds", "p50"), ("tbt_seconds", "p99"),
    ("worst_tbt_seconds", "p50"), ("e2e_seconds", "p50"),
)  # fmt: skip
_APART = Verdict(
    VerdictKind.WARNING,
    "These runs were made apart. The intervals of their ratios know the spread within each run, not what changed on the "
    "machine between them: headrace bench compare alternates servers within one run, and only that supports a claim.",
)


def compare_saved(reports: Sequence[tuple[str, Report]]) -> Report:
    """One report of several, each under its name. Ratios are to the first one, where results can be told to belong together:
    each report holds one, or they have the same label.

    Raises: ValueError without a report, or for equal names.
    """
    names = [name for name, _ in reports]
    if not reports or len(set(names)) < len(names):
        raise ValueError("saved reports need different names, and at least one")
    if len(reports) == 1:
        return reports[0][1]
    named = [(name, len(list(report.results())) == 1, report) for name, report in reports]
    pairs = _pairs(named)
    section = ReportSection(
        title="Side by side",
        results=[
            msgspec.structs.replace(result, label=_label(name, result.label, is_only))
            for name, is_only, report in named
            for result in report.results()
        ],
        runs=[
            msgspec.structs.replace(run, label=_label(name, run.label, is_only))
            for name, is_only, report in named
            for part in report.sections
            for run in part.runs
        ],
        curves=_merged_curves(reports),
        ratios=[ratio for pair in pairs for ratio in _ratios(pair)],
        verdicts=[_APART, *_settings_verdicts(pairs)],
    )
    return Report(kind="saved", title=" / ".join(names), sections=[section])


class _Pair(NamedTuple):
    """Two results that may be compared, under the labels they are shown with."""

    baseline: RunResult
    subject: RunResult
    baseline_label: str
    subject_label: str


def _label(name: str, own: str, is_only: bool) -> str:
    return name if is_only or not own else f"{name} {own}"


def _pairs(named: Sequence[tuple[str, bool, Report]]) -> list[_Pair]:
    """The first report's results with those of each other one."""
    name, is_only, first = named[0]
    found = []
    for other_name, other_is_only, other in named[1:]:
        own = {result.label: result for result in other.results()}
        for result in first.results():
            subject = next(iter(own.values())) if is_only and other_is_only else own.get(result.label)
            if subject is not None:
                labels = _label(name, result.label, is_only), _label(other_name, subject.label, other_is_only)
                found.append(_Pair(result, subject, *labels))
    return found


def _ratios(pair: _Pair) -> list[Ratio]:
    """Latencies with intervals where both have one, then throughput (no interval: one window each)."""
    ratios = []
    for key, name in _RATIO_FIGURES:
        ours, theirs = getattr(pair.subject, key), getattr(pair.baseline, key)
        value, base = getattr(ours, name), getattr(theirs, name)
        if value and base:
            low, high = _ratio_interval(value / base, ours.ci95.get(name), theirs.ci95.get(name))
            ratios.append(_ratio(pair, f"{key}/{name}", value / base, low, high))
    value, base = pair.subject.output_tokens_per_second, pair.baseline.output_tokens_per_second
    if value and base:
        ratios.append(_ratio(pair, "output_tokens_per_second", value / base, None, None, is_lower_better=False))
    return ratios


def _ratio(
    pair: _Pair, figure: str, value: float, low: float | None, high: float | None, is_lower_better: bool = True
) -> Ratio:
    return Ratio(
        subject=pair.subject_label,
        baseline=pair.baseline_label,
        figure=figure,
        value=value,
        low=low,
        high=high,
        is_lower_better=is_lower_better,
    )


def _ratio_interval(
    ratio: float, ours: tuple[float, float] | None, theirs: tuple[float, float] | None
) -> tuple[float | None, float | None]:
    """Of a ratio of two independent estimates: their errors, taken from the intervals on a log scale, add in squares."""
    if ours is None or theirs is None or min(*ours, *theirs) <= 0:
        return None, None
    errors = [math.log(high / low) / (2 * _Z95) for low, high in (ours, theirs)]
    reach = math.exp(_Z95 * math.hypot(*errors))
    return ratio / reach, ratio * reach


def _settings_verdicts(pairs: Sequence[_Pair]) -> list[Verdict]:
    """What else differed than the server."""
    differing = {name for pair in pairs for name in differing_settings([pair.baseline, pair.subject], _MAY_DIFFER)}
    if not differing:
        return []
    names = ", ".join(sorted(name.replace("_", " ") for name in differing))
    return [Verdict(VerdictKind.WARNING, f"The runs differ in more than the server: {names}.")]


def _merged_curves(reports: Sequence[tuple[str, Report]]) -> list[Curve]:
    """Curves with the same title and axes become one, each line under its report's name."""
    merged: dict[tuple[str, str, str], Curve] = {}
    for name, report in reports:
        for curve in (curve for section in report.sections for curve in section.curves):
            key = (curve.title, curve.x_label, curve.y_label)
            target = merged.setdefault(key, msgspec.structs.replace(curve, series={}, bands={}, marks=[]))
            target.series |= {f"{name} {line}": points for line, points in curve.series.items()}
            target.bands |= {f"{name} {line}": band for line, band in curve.bands.items()}
            target.marks += [msgspec.structs.replace(mark, label=f"{mark.label}, {name}") for mark in curve.marks]
    return list(merged.values())

"""Which charts a section gets.

Owns: the choice and captions of charts. Runs in: load tool. Must not know: how they are drawn, HTML.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from headrace.loadtest.records import Run
from headrace.loadtest.report import charts
from headrace.loadtest.report.charts import Panel, PanelRow
from headrace.loadtest.report.clean_text import plain
from headrace.loadtest.report.model import ReportSection
from headrace.loadtest.report.samples import gap_samples, ttft_samples
from headrace.loadtest.report.tables import labels, number, percent, seconds
from headrace.loadtest.results import Distribution, RunResult

MAX_LINES = 6  # of a distribution chart: one for each colour
MAX_TIMELINES = 3
MAX_COMPARED = 8
Item = TypeVar("Item")


class Chart(NamedTuple):
    """An <svg> with its caption. A wide one takes the whole row."""

    title: str
    svg: str
    note: str = ""
    is_wide: bool = False


def section_charts(section: ReportSection) -> list[Chart]:
    """Curves first, then comparison, distributions and timelines. Raises: ChartsUnavailableError without matplotlib."""
    shown = [
        Chart(curve.title, charts.curve_chart(curve), curve.note) for curve in section.curves if any(curve.series.values())
    ]
    if section.ratios:
        note = "Bars: 95 % intervals. Green: better, red: worse, grey: no clear difference."
        shown.append(Chart("Ratios", charts.ratio_chart("Ratios", section.ratios), note, is_wide=True))
    if 2 <= len(section.results) <= MAX_COMPARED and not section.curves:
        shown += _comparison(section.results)
    shown += _distributions(section.runs)
    shown += _timelines(section.runs)
    return shown


def _comparison(results: Sequence[RunResult]) -> list[Chart]:
    panels = [
        *(_latency_panel(results, *entry) for entry in (
            ("TTFT p50", "ttft_seconds", "p50"), ("TTFT p99", "ttft_seconds", "p99"),
            ("TBT p50", "tbt_seconds", "p50"), ("TBT p99", "tbt_seconds", "p99"),
        )),
        _panel("Output tokens/s", number, results, lambda result: result.output_tokens_per_second),
        _panel("Goodput", percent, results, lambda result: result.goodput),
    ]  # fmt: skip
    kept = [panel for panel in panels if panel.rows]
    if not kept:
        return []
    svg = charts.comparison_chart("Side by side", kept)
    return [Chart("Side by side", svg, "Whiskers: 95 % intervals.", is_wide=True)]


def _latency_panel(results: Sequence[RunResult], title: str, key: str, name: str) -> Panel:
    rows = []
    for label, result in zip(_labels(results), results, strict=True):
        item: Distribution = getattr(result, key)
        value: float | None = getattr(item, name)
        if value is not None:
            rows.append(PanelRow(label, value, item.ci95.get(name)))
    return Panel(title, seconds, rows)


def _panel(
    title: str, text: Callable[[float | None], str], results: Sequence[RunResult], value: Callable[[RunResult], float]
) -> Panel:
    return Panel(title, text, [PanelRow(label, value(result)) for label, result in zip(_labels(results), results, strict=True)])


def _labels(results: Sequence[RunResult]) -> list[str]:
    return [plain(label) for label in labels(results)]


def _distributions(runs: Sequence[Run]) -> list[Chart]:
    by_label: dict[str, list[Run]] = {}
    for run in runs:
        by_label.setdefault(plain(run.label) or "this run", []).append(run)
    names = list(by_label)
    note = f"{MAX_LINES} of {len(names)} are drawn." if len(names) > MAX_LINES else ""
    names = _spread(names, MAX_LINES)
    ttft = {name: ttft_samples(by_label[name]) for name in names}
    gaps = {name: gap_samples(by_label[name]) for name in names}
    shown = []
    if any(values.size for values in ttft.values()):
        title = "Time to first token (TTFT)"
        shown.append(Chart(title, charts.ecdf_chart(title, ttft, "TTFT"), note))
    if any(values.size for values in gaps.values()):
        title = "Time between tokens (TBT, ITL), per chunk"
        shown.append(Chart(title, charts.ecdf_chart(title, gaps, "TBT per chunk"), note))
        title = "Tail of TBT, per chunk"
        shown.append(Chart(title, charts.tail_chart(title, gaps, "TBT per chunk"), note))
    if any(values.size for values in ttft.values()):
        title = "Tail of TTFT"
        shown.append(Chart(title, charts.tail_chart(title, ttft, "TTFT"), note))
    return shown


def _timelines(runs: Sequence[Run]) -> list[Chart]:
    """The first run of each label, at most three, spread over the labels."""
    first = list({run.label: run for run in reversed(runs) if run.requests}.values())[::-1]
    shown = []
    for run in _spread(first, MAX_TIMELINES):
        title = f"Timeline: {plain(run.label)}" if run.label else "Timeline"
        shaded = run.window_begin > 0 or run.window_end < run.wall_seconds
        note = "Shaded: warm-up and cool-down, not measured." if shaded else ""
        shown.append(Chart(title, charts.timeline_chart(title, run), note, is_wide=True))
    return shown


def _spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` of them, both ends kept."""
    if len(items) <= limit:
        return list(items)
    return [items[round(place * (len(items) - 1) / (limit - 1))] for place in range(limit)]

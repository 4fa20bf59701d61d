"""Charts of load tests as SVG that follows the page's light or dark theme.

Owns: what each chart shows. Runs in: load tool. Must not know: HTML pages, files, how SVG is made (svg.py).
Every function returns one <svg> element, text kept as text, with a title and description for screen readers.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.loadtest.records import Outcome, Run
from headrace.loadtest.report.model import Curve, Ratio
from headrace.loadtest.report.palette import series_colour, stand_in
from headrace.loadtest.report.samples import Array, concurrency, end_of, nice_bin_seconds, tokens_over_time
from headrace.loadtest.report.svg import WIDE_INCHES, draw_svg
from headrace.loadtest.report.tables import figure_name, number, seconds

MAX_ECDF_POINTS = 300
MAX_TIMELINE_BARS = 1500
MARKERS = ("o", "s", "^", "D", "v", "P")
_NAN = float("nan")


def ecdf_chart(title: str, samples: Mapping[str, Array], x_label: str) -> str:
    """Share of samples at or below a latency, log x. A label without samples keeps its colour, so that charts match."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        positive = [values[values > 0] for values in samples.values() if np.any(values > 0)]
        lines = {}
        for place, (label, values) in enumerate(samples.items()):
            x, y = _ecdf(values)
            if x.size:
                (lines[label],) = axes.plot(x, y, drawstyle="steps-post", **_line_style(place))
        for share in (0.5, 0.9, 0.99):
            axes.axhline(share, color=stand_in("shade"), linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25", "p50", "75", "p90", "p99"])
        axes.set_ylim(0, 1.04)
        axes.set_ylabel("% of samples at or below")
        axes.set_xlabel(x_label)
        if positive:
            _log_seconds(
                axes,
                "x",
                min(float(np.quantile(item, 0.005)) for item in positive),
                max(float(item.max()) for item in positive),
            )
        if len(samples) > 1:
            _legend_above(axes, lines)

    described = "; ".join(f"{label}: {_median_and_tail(values)}" for label, values in samples.items())
    return draw_svg(title, f"Cumulative distribution. {described}", draw, 2.9)


def tail_chart(title: str, samples: Mapping[str, Array], y_label: str) -> str:
    """Latency against percentile, the tail stretched: each step right is a tenth of the requests or gaps that remain."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lows, highs, longest, lines = [], [], 10, {}
        for place, (label, values) in enumerate(samples.items()):
            ordered = np.sort(values[values > 0])
            if ordered.size:
                longest = max(longest, ordered.size)
                rest = np.geomspace(1.0, 1.0 / ordered.size, MAX_ECDF_POINTS)
                places = np.minimum((ordered.size * (1.0 - rest)).astype(int), ordered.size - 1)
                (lines[label],) = axes.plot(rest, ordered[places], **_line_style(place))
                lows.append(float(np.quantile(ordered, 0.05)))  # the fast end would squeeze the tail
                highs.append(float(ordered[-1]))
        axes.set_xscale("log")
        axes.set_xlim(1.0, 1.0 / longest)
        names = {1.0: "p0", 0.5: "p50", 0.1: "p90", 0.01: "p99", 0.001: "p99.9", 1e-4: "p99.99", 1e-5: "p99.999"}
        shown = {rest: name for rest, name in names.items() if rest >= 0.9 / longest}
        axes.set_xticks(list(shown), list(shown.values()))
        axes.minorticks_off()
        axes.set_xlabel("percentile")
        axes.set_ylabel(y_label)
        if lows:
            _log_seconds(axes, "y", min(lows), max(highs))
        if len(samples) > 1:
            _legend_above(axes, lines)

    described = "; ".join(f"{label}: {_median_and_tail(values)}" for label, values in samples.items())
    return draw_svg(title, f"Latency by percentile. {described}", draw, 2.9)


def timeline_chart(title: str, run: Run) -> str:
    """Requests as bars (waiting, streaming), requests running, and output tokens per second over the run's time."""

    def draw(figure: Any) -> None:
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.2, 1.2))
        _draw_request_bars(top, run)
        state = concurrency(run)
        filled: Any = {"step": "post", "alpha": 0.75, "linewidth": 0}
        middle.fill_between(state.times, state.streaming, color=series_colour(0), **filled)
        middle.fill_between(state.times, state.streaming, state.streaming + state.waiting, color=series_colour(1), **filled)
        middle.set_ylabel("running")
        width = nice_bin_seconds(run.wall_seconds)
        starts, rates = tokens_over_time(run, width)
        bottom.fill_between(starts, rates, color=series_colour(2), **filled)
        bottom.set_ylabel("tokens/s")
        bottom.set_xlabel(f"seconds since the start (tokens in bins of {seconds(width)})")
        for axes in (top, middle, bottom):
            axes.set_xlim(0, run.wall_seconds)
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
            for begin, end in ((0.0, run.window_begin), (run.window_end, run.wall_seconds)):
                if end > begin:
                    axes.axvspan(begin, end, color=stand_in("shade"), alpha=0.25, linewidth=0, zorder=0)
        middle.set_ylim(bottom=0)
        bottom.set_ylim(bottom=0)
        figure.align_ylabels()

    failed = sum(record.outcome is not Outcome.COMPLETED for record in run.requests)
    text = f"{len(run.requests)} requests over {run.wall_seconds:.1f} s, {failed} not completed."
    return draw_svg(title, text, draw, 4.8, WIDE_INCHES)


def _draw_request_bars(axes: Any, run: Run) -> None:
    """One path for each kind of bar: thousands of requests stay a small file."""
    records = sorted(run.requests, key=lambda record: record.sent)
    if len(records) > MAX_TIMELINE_BARS:
        kept = np.linspace(0, len(records) - 1, MAX_TIMELINE_BARS).astype(int)
        records = [records[place] for place in kept]
        axes.set_title(f"an even sample of {MAX_TIMELINE_BARS:,} of {len(run.requests):,} requests", fontsize=8.5)
    waits: list[tuple[float, float, int]] = []
    streams: list[tuple[float, float, int]] = []
    lost: list[tuple[float, int]] = []
    for row, record in enumerate(records):
        end = end_of(record, run)
        first = record.chunk_times[0] if record.chunk_times else end
        waits.append((record.sent, first, row))
        streams.append((first, end, row))
        if record.outcome is not Outcome.COMPLETED:
            lost.append((end, row))
    width = min(max(150.0 / max(len(records), 1), 0.35), 5.0)
    lines = {}
    for spans, place, label in ((waits, 1, "waiting for the first token"), (streams, 0, "streaming")):
        x = [value for begin, end, _ in spans for value in (begin, end, _NAN)]
        y = [value for _, _, row in spans for value in (row, row, _NAN)]
        (lines[label],) = axes.plot(x, y, color=series_colour(place), linewidth=width, solid_capstyle="butt")
    if lost:
        x_lost, y_lost = zip(*lost, strict=True)
        (cross,) = axes.plot(x_lost, y_lost, "x", color=stand_in("bad"), markersize=5, markeredgewidth=1.4)
        lines["refused, failed, unfinished"] = cross
    axes.set_ylabel("request")
    axes.set_ylim(max(len(records), 5) - 0.3, -0.7)
    _legend_above(axes, lines, line_width=4)
    axes.grid(visible=False, axis="y")


def curve_chart(curve: Curve) -> str:
    """Lines over a common x, with bands (95 %) and marks (the knee)."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        lines = {}
        for place, (label, points) in enumerate(curve.series.items()):
            kept = sorted(point for point in points if all(map(math.isfinite, point)))
            if not kept:
                continue
            x, y = zip(*kept, strict=True)
            (lines[label],) = axes.plot(x, y, marker=MARKERS[place % len(MARKERS)], markersize=4.5, **_line_style(place))
            band = sorted(item for item in curve.bands.get(label, []) if all(map(math.isfinite, item)))
            if band:
                bx, low, high = zip(*band, strict=True)
                axes.fill_between(bx, low, high, color=series_colour(place), alpha=0.18, linewidth=0)
        _curve_scales(axes, curve)
        axes.set_xlabel(curve.x_label)
        axes.set_ylabel(curve.y_label)
        for mark in curve.marks:
            if math.isfinite(mark.x):
                axes.axvline(mark.x, color=stand_in("bad"), linewidth=1.2, linestyle=(0, (4, 3)))
                axes.annotate(
                    mark.label, (mark.x, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -3), textcoords="offset points",
                    va="top", color=stand_in("bad"), fontsize=9,
                )  # fmt: skip
        if len(curve.series) > 1:
            _legend_above(axes, lines)

    marks = "; ".join(f"{mark.label} at {number(mark.x)}" for mark in curve.marks)
    text = f"{curve.y_label} against {curve.x_label}: {', '.join(curve.series)}. {marks}"
    return draw_svg(curve.title, text, draw, 2.9)


def _curve_scales(axes: Any, curve: Curve) -> None:
    values = [point for points in curve.series.values() for point in points if all(map(math.isfinite, point))]
    if curve.is_x_log and values and min(x for x, _ in values) > 0:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for x, _ in values})
        axes.set_xticks(ticks[:: max(1, len(ticks) // 10)], [number(x) for x in ticks[:: max(1, len(ticks) // 10)]])
        axes.minorticks_off()
    elif values:
        axes.set_xlim(left=0)
    positive = [y for _, y in values if y > 0]
    if curve.is_y_log and positive:
        if "seconds" in curve.y_label:
            _log_seconds(axes, "y", min(positive), max(positive))
        else:
            axes.set_yscale("log")
    elif values and min(y for _, y in values) >= 0:
        axes.set_ylim(bottom=0)


class PanelRow(NamedTuple):
    """One result's value and its 95 % interval."""

    label: str
    value: float
    bounds: tuple[float, float] | None = None


class Panel(NamedTuple):
    """One figure of a comparison; `text` formats its values."""

    name: str
    text: Callable[[float | None], str]
    rows: list[PanelRow]


def comparison_chart(title: str, panels: Sequence[Panel]) -> str:
    """Small multiples: in each panel one figure, a row for each result, whiskers are 95 % intervals."""
    num_columns = min(3, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    labels = list(dict.fromkeys(row.label for panel in panels for row in panel.rows))

    def draw(figure: Any) -> None:
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
        for axes, panel in itertools.zip_longest(grid.flat, panels):
            if panel is None:
                axes.set_visible(False)
                continue
            name, text, entries = panel
            axes.set_title(name)
            for label, value, bounds in entries:
                row = labels.index(label)
                colour = series_colour(row)
                if bounds:
                    axes.plot(bounds, (row, row), color=colour, linewidth=2, solid_capstyle="butt")
                axes.plot(value, row, marker=MARKERS[row % len(MARKERS)], color=colour, markersize=6)
                axes.annotate(text(value), (value, row), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8.5)
            axes.set_yticks(range(len(labels)), [_shorten(label) for label in labels])
            axes.set_ylim(len(labels) - 0.5, -0.75)
            reach = max([value for row in entries for value in (row.value, *(row.bounds or ()))])
            axes.set_xlim(0, reach * 1.12 or 1.0)  # from zero: a small difference looks small
            axes.tick_params(axis="y", labelcolor=stand_in("ink"))
            axes.xaxis.get_major_locator().set_params(nbins=4)
            axes.xaxis.set_major_formatter(lambda value, _, text=text: re.sub(r"\.0+(?=\D|$)", "", text(value)))
            axes.grid(visible=False, axis="y")

    described = "; ".join(
        f"{name}: " + ", ".join(f"{label} {text(value)}" for label, value, _ in rows) for name, text, rows in panels
    )
    return draw_svg(title, described, draw, num_rows * (0.75 + 0.34 * len(labels)) + 0.2, WIDE_INCHES)


def ratio_chart(title: str, ratios: Sequence[Ratio]) -> str:
    """Ratios with their intervals around the line of no difference, log x; green is better, red worse, grey not clear."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        several = len({ratio.subject for ratio in ratios}) > 1
        bounds = [
            value for ratio in ratios for value in (ratio.value, ratio.low, ratio.high) if value is not None and value > 0
        ]
        for row, ratio in enumerate(ratios):
            colour = stand_in(("good" if ratio.is_win else "bad") if ratio.is_clear else "muted")
            if ratio.low is not None and ratio.high is not None:
                axes.plot((ratio.low, ratio.high), (row, row), color=colour, linewidth=2.2, solid_capstyle="butt")
            axes.plot(ratio.value, row, marker="o", color=colour, markersize=6)
            axes.annotate(
                f"{ratio.value:.3f}", (ratio.value, row), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8.5
            )
        axes.axvline(1.0, color=stand_in("ink"), linewidth=1)
        names = [figure_name(ratio.figure) + (f", {_shorten(ratio.subject)}" if several else "") for ratio in ratios]
        axes.set_yticks(range(len(ratios)), names)
        axes.tick_params(axis="y", labelcolor=stand_in("ink"))
        axes.set_ylim(len(ratios) - 0.5, -0.8)
        axes.set_xscale("log")
        spread = max([1.05, *(max(value, 1 / value) for value in bounds)]) ** 1.1
        axes.set_xlim(1 / spread, spread)
        steps = [0.1, 0.2, 0.33, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10]
        ticks = [step for step in steps if 1 / spread <= step <= spread]
        ticks = [tick for tick in ticks if tick == 1 or abs(math.log(tick)) > math.log(spread) / 4]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"{', '.join(sorted({ratio.subject for ratio in ratios}))} / {ratios[0].baseline} (1 = no difference)")
        axes.grid(visible=False, axis="y")

    text = "; ".join(f"{figure_name(ratio.figure)} {ratio.value:.3f}" for ratio in ratios)
    return draw_svg(title, text, draw, 0.9 + 0.36 * len(ratios), WIDE_INCHES)


def _line_style(place: int) -> dict[str, Any]:
    return {"color": series_colour(place), "linestyle": ("-", (0, (5, 2)), (0, (1, 1.5)))[place // 6 % 3]}


def _legend_above(axes: Any, lines: Mapping[str, Any], line_width: float | None = None) -> None:
    """A legend over the plot. Names are set afterwards: matplotlib would hide some and read markup in others."""
    if not lines:
        return
    placeholders = [f"line {place}" for place in range(len(lines))]
    legend = axes.legend(
        list(lines.values()),
        placeholders,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(len(lines), 3),
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )
    for text, label in zip(legend.get_texts(), lines, strict=True):
        text.set_text(_shorten(label))
    for line in legend.get_lines() if line_width else ():
        if line.get_linestyle() != "None":
            line.set_linewidth(line_width)


def _log_seconds(axes: Any, which: str, low: float, high: float) -> None:
    """A log axis of seconds with ticks at 1, 2, 5 in readable units, and room at both ends."""
    low, high = max(low, 1e-6) / 1.15, max(high, 2e-6) * 1.15
    span = math.log10(high / low)
    steps = (1, 2, 5) if span < 2.2 else (1, 3) if span < 3.2 else (1,)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) < 2:
        ticks = [float(tick) for tick in np.geomspace(low * 1.05, high / 1.05, 3)]
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_ticks(ticks, [_tick(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _tick(value: float) -> str:
    text = seconds(value)
    amount, _, unit = text.partition(" ")
    return f"{float(amount):g} {unit}"


def _ecdf(values: Array) -> tuple[Array, Array]:
    """Points of the ECDF at evenly spaced ranks, the tail and both ends kept; zeros are left out but counted."""
    ordered = np.sort(values)
    if not ordered.size:
        return ordered, ordered
    ranks = np.unique(
        np.concatenate(
            [
                np.linspace(0, ordered.size - 1, MAX_ECDF_POINTS),
                ordered.size - np.geomspace(1, ordered.size, MAX_ECDF_POINTS // 3),
            ]
        ).astype(int)
    )
    x, y = ordered[ranks], (ranks + 1) / ordered.size
    keep = x > 0
    return x[keep], y[keep]


def _median_and_tail(values: Array) -> str:
    if not values.size:
        return "no samples"
    return f"median {seconds(float(np.median(values)))}, largest {seconds(float(values.max()))}, {values.size} samples"


def _shorten(label: str, limit: int = 30) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"

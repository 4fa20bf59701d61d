"""One picture that compares policies: goodput, tails of TTFT and TBT, fairness.

Owns: save_picture. Runs in: simulator. Must not know: how figures are computed, matplotlib (the load tool's svg.py does).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.loadtest.report.palette import COLOURS, NUM_SERIES
from headrace.loadtest.report.svg import save_figure
from headrace.loadtest.report.tables import number, percent, seconds
from headrace.simulation.figures import PolicyResult, Served
from headrace.simulation.study import SimulationReport

MAX_CLASSES_SHOWN = 4
_WIDTH_INCHES, _HEIGHT_INCHES = 10.0, 6.4
_LOG_FROM_RATIO = 20.0  # bars that differ by more are drawn on a log axis


class _Group(NamedTuple):
    """Bars of one label; None: there is no such figure."""

    label: str
    values: list[float | None]


def save_picture(report: SimulationReport, path: Path) -> None:
    """Write .svg or .png. Raises ChartsUnavailableError without matplotlib, ValueError for another ending, OSError."""

    def draw(figure: Any) -> None:
        results = report.results
        panels = figure.subplots(2, 2)
        _bars(panels[0][0], "Goodput, share of offered requests", results, _by_class(results, "goodput"), percent)
        _bars(panels[0][1], "TTFT p99", results, _by_class(results, "ttft"), seconds)
        _bars(panels[1][0], "TBT p99", results, _by_class(results, "tbt"), seconds)
        _bars(panels[1][1], "Fairness among tenants (Jain index)", results, _fairness(results), _index)
        panels[0][0].set_ylim(0, 1.3)
        panels[1][1].set_ylim(0, 1.15)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=11)

    save_figure(path, draw, width_inches=_WIDTH_INCHES, height_inches=_HEIGHT_INCHES)


def _title(report: SimulationReport) -> str:
    traffic = report.settings.traffic
    load = f", {traffic.load:g} times capacity" if traffic.load is not None else ""
    return f"{traffic.workload}: {report.traffic.num_requests:,} requests at {number(report.traffic.rate)}/s{load}"


def _index(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _by_class(results: Sequence[PolicyResult], key: str) -> list[_Group]:
    """All requests, and each class where there are several."""

    def of(served: Served) -> float | None:
        if key == "goodput":
            return served.goodput
        return (served.ttft_seconds if key == "ttft" else served.tbt_seconds).p99

    groups = [_Group("all", [of(result.total) for result in results])]
    classes = list(results[0].by_class)
    if len(classes) > 1:
        groups += [_Group(name, [of(result.by_class[name]) for result in results]) for name in classes[:MAX_CLASSES_SHOWN]]
    return groups


def _fairness(results: Sequence[PolicyResult]) -> list[_Group]:
    return [
        _Group("mean window", [result.fairness.jain_mean for result in results]),
        _Group("worst window", [result.fairness.jain_least for result in results]),
    ]


def _bars(
    axes: Any, title: str, results: Sequence[PolicyResult], groups: Sequence[_Group], show: Callable[[float | None], str]
) -> None:
    width = 0.8 / len(results)
    for place, result in enumerate(results):
        offset = (place - (len(results) - 1) / 2) * width
        x = [index + offset for index in range(len(groups))]
        values = [group.values[place] for group in groups]
        drawn = axes.bar(
            x,
            [value or 0.0 for value in values],
            width * 0.92,
            label=result.policy,
            color=COLOURS[f"s{place % NUM_SERIES}"].light,
        )
        rotation = 90 if len(groups) * len(results) > 8 else 0
        axes.bar_label(drawn, [show(value) for value in values], padding=2, fontsize=7, rotation=rotation)
    known = [value for group in groups for value in group.values if value]
    if known and max(known) > _LOG_FROM_RATIO * min(known) and show is seconds:
        axes.set_yscale("log")
        axes.set_ylim(min(known) / 3, max(known) * 8)
    elif known:
        axes.set_ylim(0, max(known) * 1.35)
    if not known:
        axes.text(0.5, 0.5, "no window with two backlogged tenants", ha="center", transform=axes.transAxes)
    axes.set_xticks(range(len(groups)), [group.label for group in groups])
    axes.set_title(title)
    axes.grid(visible=False, axis="x")
    if show is percent:
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif show is seconds:
        axes.yaxis.set_major_formatter(lambda value, _: seconds(value))

"""Results as tables on a terminal.

Owns: print_study, print_validation. Runs in: simulator. Must not know: how figures are computed.
"""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.loadtest.report.tables import number, percent, seconds
from headrace.simulation.figures import PolicyResult, Served, Tail
from headrace.simulation.policies import POLICIES
from headrace.simulation.settings import SimulationSettings
from headrace.simulation.step_model import StepFit, StepModel
from headrace.simulation.study import SimulationReport
from headrace.simulation.validation import ValidationReport

_TAILS = (("TTFT", "ttft_seconds"), ("TBT", "tbt_seconds"), ("TPOT", "tpot_seconds"), ("queue", "queue_seconds"))


def print_study(report: SimulationReport, console: Console) -> None:
    """Everything that people compare, a column for each policy."""
    _say(console, *_heading(report))
    results = report.results
    table = _table("", [result.policy for result in results])
    for name, cells in _rows(results):
        table.add_row(name, *cells)
    console.print(table)
    for title, groups in (("By class", [result.by_class for result in results]), ("By tenant", [r.by_tenant for r in results])):
        if len(groups[0]) > 1:
            console.print(_group_table(title, [result.policy for result in results], groups))
    _say(
        console, *(f"{result.policy}: {POLICIES[result.policy].description}" for result in results if result.policy in POLICIES)
    )


def print_validation(report: ValidationReport, console: Console) -> None:
    """Recorded beside simulated."""
    _say(
        console,
        f"{report.record}: {report.num_compared} of {report.num_requests} requests compared",
        *_left_out_lines(report),
        *([f"{report.num_cut_lines} cut lines were passed over"] if report.num_cut_lines else []),
        *step_lines(report.step_model, report.fit),
    )
    table = _table("", ["recorded", "simulated", "error"])
    for item in report.comparisons:
        show = seconds if item.unit == "seconds" else number
        name = item.name if item.unit == "seconds" else f"{item.name}, {item.unit}"
        table.add_row(name, show(item.recorded), show(item.simulated), "-" if item.error is None else f"{item.error:+.1%}")
    console.print(table)


def _left_out_lines(report: ValidationReport) -> list[str]:
    if not report.left_out:
        return []
    parts = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items())
    return [f"not compared: {parts}; those that did not complete were load and are not compared"]


def step_lines(model: StepModel, fit: StepFit | None) -> list[str]:
    """The step model, and how well it fits."""
    text = ",".join(f"{name}={getattr(model, name):.6g}" for name in model.__struct_fields__)
    lines = [f"step model: {text}"]
    if fit is not None:
        lines.append(
            f"fitted to {number(fit.num_steps)} steps: error of a step {percent(fit.mean_error)} in the mean, median "
            f"{percent(fit.p50_error)}, p90 {percent(fit.p90_error)}; all steps together {fit.total_ratio:.3f} of the recorded "
            f"time; R2 {fit.r_squared:.3f}"
        )
        lines += fit.warnings
    return lines


def _heading(report: SimulationReport) -> list[str]:
    settings, traffic = report.settings, report.traffic
    first = (
        f"{settings.traffic.workload}, {settings.traffic.arrival}: {number(traffic.num_requests)} requests at "
        f"{number(traffic.rate)}/s, prompts of {number(traffic.mean_prompt_tokens)} tokens in the mean, answers of "
        f"{number(traffic.mean_output_tokens)}, seed {settings.traffic.seed}"
    )
    lines = [first, *traffic.notes]
    if settings.traffic.length_scale != 1.0 and settings.traffic.arrival != "trace":
        lines.append(f"lengths are {settings.traffic.length_scale:g} times those of the workload")
    if report.capacity_per_second is not None and settings.traffic.load is not None:
        capacity, load = number(report.capacity_per_second), settings.traffic.load
        lines.append(f"capacity, measured with a full queue: {capacity} requests/s; load {load:g}")
    return [*lines, *step_lines(settings.step_model, report.fit), *_target_lines(settings)]


def _target_lines(settings: SimulationSettings) -> list[str]:
    if settings.ttft_ms is not None and settings.tbt_ms is not None:
        return [f"good: TTFT within {settings.ttft_ms:g} ms and worst-10% TBT within {settings.tbt_ms:g} ms"]
    parts = []
    for entry in settings.policy.classes:
        ttft_ms = settings.ttft_ms if settings.ttft_ms is not None else entry.ttft_target_ms
        tbt_ms = settings.tbt_ms if settings.tbt_ms is not None else entry.tbt_target_ms
        parts.append(f"{entry.name} {ttft_ms:g}/{f'{tbt_ms:g}' if tbt_ms else '-'}")
    return [f"good: TTFT/worst-10% TBT within, in ms: {', '.join(parts)}"]


def _rows(results: Sequence[PolicyResult]) -> list[tuple[str, list[str]]]:
    def row(name: str, cells: Sequence[str]) -> tuple[str, list[str]]:
        return name, list(cells)

    rows = [
        row("goodput", [percent(result.total.goodput) for result in results]),
        row("completed / offered", [f"{number(r.total.completed)} / {number(r.total.offered)}" for r in results]),
        row("refused, failed", [f"{number(r.total.refused)}, {number(r.total.failed)}" for r in results]),
        row("refused tries", [number(result.scheduler.num_refusals) for result in results]),
        row(
            "let in when they came again",
            [f"{number(r.scheduler.num_returns_admitted)} of {number(r.scheduler.num_returns)}" for r in results],
        ),
    ]
    for title, key in _TAILS:
        tails: list[Tail] = [getattr(result.total, key) for result in results]
        for name, shown in (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p999", "p99.9")):
            rows.append(row(f"{title} {shown}", [seconds(getattr(item, name)) for item in tails]))
    return [
        *rows,
        row("worst-10% TBT p99", [seconds(result.total.worst_tbt_seconds.p99) for result in results]),
        row("output tokens/s", [number(result.output_tokens_per_second) for result in results]),
        row("completed requests/s", [number(result.requests_per_second) for result in results]),
        row("busy", [percent(result.scheduler.busy_share) for result in results]),
        row("queue, mean / most", [f"{number(result.mean_queue)} / {number(result.max_queue)}" for result in results]),
        row("preemptions", [number(result.scheduler.preemptions) for result in results]),
        row("recomputed tokens", [number(result.scheduler.recomputed_tokens) for result in results]),
        row("prompt tokens from cache", [percent(result.scheduler.prefix_hit_share) for result in results]),
        row("fairness, mean / least", [_fairness(result) for result in results]),
    ]


def _fairness(result: PolicyResult) -> str:
    fairness = result.fairness
    if fairness.jain_mean is None or fairness.jain_least is None:
        return "-"
    return f"{fairness.jain_mean:.3f} / {fairness.jain_least:.3f}"


def _group_table(title: str, policies: Sequence[str], groups: Sequence[Mapping[str, Served]]) -> Table:
    table = _table(title, policies)
    for name in groups[0]:
        for key, show in (("goodput", percent), ("TTFT p99", seconds), ("TBT p99", seconds)):
            cells = [_group_figure(group[name], key) for group in groups]
            table.add_row(f"{name}: {key}" if key == "goodput" else f"  {key}", *(show(cell) for cell in cells))
    return table


def _group_figure(served: Served, key: str) -> float | None:
    if key == "goodput":
        return served.goodput
    return served.ttft_seconds.p99 if key.startswith("TTFT") else served.tbt_seconds.p99


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", min_width=len(name))
    return table


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)

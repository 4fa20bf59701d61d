"""Figures as text in rows and columns, the same for terminal and HTML.

Owns: formats of numbers, tables of results, ratios, errors, settings and the client. Runs in: load tool.
Must not know: rich, HTML.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.loadtest.definitions import BY_KEY
from headrace.loadtest.records import RunSettings
from headrace.loadtest.report.model import Ratio, Table
from headrace.loadtest.results import Distribution, RunResult
from headrace.loadtest.run_warnings import MIN_SAMPLES

MAX_SIDE_BY_SIDE = 5  # more results than this get a line each instead of a column
DISTRIBUTION_KEYS = (
    "ttft_seconds", "ttft_from_due_seconds", "first_event_seconds", "tbt_seconds", "tbt_chunk_seconds", "tpot_seconds",
    "worst_tbt_seconds", "e2e_seconds", "connect_seconds",
)  # fmt: skip
_EMPTY = "-"
_WEAK = "* Few samples: next to the maximum."
_MIN_SAMPLES = {"p90": MIN_SAMPLES["p90"], "p99": MIN_SAMPLES["p99"], "p999": MIN_SAMPLES["p99.9"]}


class FigureRow(NamedTuple):
    """`key` is that of its definition."""

    key: str
    name: str
    cells: list[str]


class FigureTable(NamedTuple):
    """Like Table, but each row knows its definition."""

    title: str
    header: list[str]
    rows: list[FigureRow]
    note: str = ""

    def plain(self) -> Table:
        """Without the keys."""
        return Table(title=self.title, header=self.header, rows=[[row.name, *row.cells] for row in self.rows], note=self.note)


def seconds(value: float | None) -> str:
    """Three significant digits in ms or s."""
    if value is None or not math.isfinite(value):
        return _EMPTY
    if value == 0:
        return "0 ms"
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f} s"
    if size >= 0.9995:
        return f"{value:.{2 if size < 9.995 else 1}f} s"
    milliseconds = value * 1e3
    return f"{milliseconds:.{2 if size < 0.009995 else 1 if size < 0.09995 else 0}f} ms"


def number(value: float | None) -> str:
    """Three significant digits, whole numbers from 100 up with thousands separated."""
    if value is None or not math.isfinite(value):
        return _EMPTY
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3}f}"


def percent(share: float | None) -> str:
    """A share as a percentage; never rounded up to 100 or down to 0."""
    if share is None or not math.isfinite(share):
        return _EMPTY
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.1f} %" if share not in (0.0, 1.0) else f"{share:.0%}".replace("%", " %")


def interval(bounds: tuple[float, float] | None) -> str:
    """Of seconds: `low to high`, the unit once where both share it; empty when there is none."""
    if bounds is None:
        return ""
    low, high = (seconds(bound) for bound in bounds)
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(' ' + unit)} to {high}"


def distribution_of(result: RunResult, key: str) -> Distribution:
    """An empty one where the run has no such figure."""
    found: Distribution | None = getattr(result, key)
    return found if found is not None else Distribution(count=0)


def percentile(distribution: Distribution, name: str) -> str:
    """One percentile with a mark when there are too few samples behind it."""
    value: float | None = getattr(distribution, name)
    weak = value is not None and distribution.count < _MIN_SAMPLES.get(name, 0)
    return seconds(value) + ("*" if weak else "")


def latency_table(result: RunResult) -> FigureTable:
    """The distributions of one result, a line each."""
    rows = []
    for key in DISTRIBUTION_KEYS:
        item = distribution_of(result, key)
        if item.count:
            shown = [seconds(item.mean), *(percentile(item, name) for name in ("p50", "p90", "p99", "p999"))]
            intervals = [interval(item.ci95.get(name)) or _EMPTY for name in ("p50", "p99")]
            rows.append(FigureRow(key, BY_KEY[key].name, [*shown, seconds(item.max), f"{item.count:,}", *intervals]))
    weak = any("*" in cell for row in rows for cell in row.cells)
    header = ["", "mean", "p50", "p90", "p99", "p99.9", "max", "samples", "95 % of p50", "95 % of p99"]
    return FigureTable("Latency", header, rows, _WEAK if weak else "")


def totals_table(results: Sequence[RunResult]) -> FigureTable:
    """Counts, throughput, goodput: a column for each result."""
    rows = [
        FigureRow("requests", "Requests offered", [f"{item.requests.offered:,}" for item in results]),
        FigureRow("requests", "completed", [f"{item.requests.completed:,}" for item in results]),
        FigureRow("requests", "refused", [f"{item.requests.refused:,}" for item in results]),
        FigureRow("requests", "failed", [f"{item.requests.failed:,}" for item in results]),
        FigureRow("requests_per_second", "Offered/s", [number(item.offered_per_second) for item in results]),
        FigureRow("requests_per_second", "Completed/s", [number(item.requests_per_second) for item in results]),
        FigureRow("output_tokens_per_second", "Output tokens/s", [number(item.output_tokens_per_second) for item in results]),
        FigureRow("output_tokens_per_second", "Output tokens", [f"{item.output_tokens:,}" for item in results]),
        FigureRow("output_tokens_per_second", "Prompt tokens", [f"{item.prompt_tokens:,}" for item in results]),
    ]
    names = list(dict.fromkeys(target.name for item in results for target in item.goodput_targets))
    for name in names:
        found = [next((target for target in item.goodput_targets if target.name == name), None) for item in results]
        limits = next(target for target in found if target)
        title = f"Goodput {name} ({seconds(limits.ttft_seconds)} / {seconds(limits.tbt_seconds)})"
        cells = [f"{percent(item.share)}, {number(item.per_second)}/s" if item else _EMPTY for item in found]
        rows.append(FigureRow("goodput", title, cells))
    return FigureTable("Requests and throughput", ["", *labels(results)], rows)


def side_by_side_table(results: Sequence[RunResult]) -> FigureTable:
    """Latency percentiles, a column for each result."""
    rows = []
    for key in DISTRIBUTION_KEYS:
        items = [distribution_of(result, key) for result in results]
        if any(item.count for item in items):
            names = ("p50", "p99") if key != "e2e_seconds" else ("p50", "p90", "p99")
            rows += [FigureRow(key, f"{BY_KEY[key].name} {name}", [percentile(item, name) for item in items]) for name in names]
    weak = any("*" in cell for row in rows for cell in row.cells)
    return FigureTable("Latency", ["", *labels(results)], rows, _WEAK if weak else "")


def overview_table(results: Sequence[RunResult]) -> Table:
    """The figures that matter most, a line for each result: for sweeps."""
    rows = [
        [
            label,
            number(result.offered_per_second),
            number(result.output_tokens_per_second),
            percent(result.goodput),
            percentile(result.ttft_seconds, "p50"),
            percentile(result.ttft_seconds, "p99"),
            percentile(result.tbt_seconds, "p50"),
            percentile(result.tbt_seconds, "p99"),
            percentile(result.worst_tbt_seconds, "p50"),
            f"{result.requests.completed:,}",
            f"{result.requests.refused + result.requests.failed:,}",
        ]
        for label, result in zip(labels(results), results, strict=True)
    ]
    header = [
        "", "offered/s", "tokens/s", "goodput", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99", "worst-10% TBT p50", "completed",
        "refused or failed",
    ]  # fmt: skip
    target = next((item.goodput_targets[0].name for item in results if item.goodput_targets), "")
    notes = [f"Goodput at {target}." if target else "", _WEAK if any("*" in c for r in rows for c in r) else ""]
    return Table(title="Overview", header=header, rows=rows, note=" ".join(filter(None, notes)))


def group_tables(result: RunResult) -> list[Table]:
    """Of a mix: an overview by class or tenant; empty when there is one kind."""
    if not result.groups:
        return []
    groups = [msgspec.structs.replace(group, label=group.label or name) for name, group in result.groups.items()]
    table = overview_table(groups)
    return [msgspec.structs.replace(table, title="By class or tenant")]


def ratio_table(ratios: Sequence[Ratio]) -> Table:
    """Ratios with their intervals, and what may be said of them."""
    rows = [
        [
            f"{ratio.subject} / {ratio.baseline}",
            figure_name(ratio.figure),
            f"{ratio.value:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio.low is not None and ratio.high is not None else _EMPTY,
            f"{ratio.num_pairs}" if ratio.num_pairs else _EMPTY,
            ratio_meaning(ratio),
        ]
        for ratio in ratios
    ]
    header = ["", "figure", "ratio", "95 % interval", "pairs", "reading"]
    return Table(title="Ratios", header=header, rows=rows, note="A difference is claimed only when the interval excludes 1.")


def ratio_meaning(ratio: Ratio) -> str:
    """`better`, `worse`, or that nothing may be claimed. Without pairs (runs made apart) it only looks so."""
    if ratio.low is None or ratio.high is None:
        return "no interval: nothing can be said"
    if not ratio.is_clear:
        return "no clear difference"
    return f"{ratio.subject} {'is' if ratio.num_pairs else 'looks'} {'better' if ratio.is_win else 'worse'}"


def figure_name(key: str) -> str:
    """`ttft_seconds/p50` -> `TTFT p50`."""
    name, _, part = key.partition("/")
    shown = BY_KEY[name].name if name in BY_KEY else name
    return f"{shown} {part.replace('p999', 'p99.9')}".strip()


def error_table(results: Sequence[RunResult]) -> Table | None:
    """By kind, a column for each result (many results: one for all), and what the first was; None when there are none."""
    kinds = sorted({kind for result in results for kind in result.errors})
    if not kinds:
        return None
    counts = [[result.errors.get(kind, 0) for result in results] for kind in kinds]
    header = labels(results)
    if len(results) > MAX_SIDE_BY_SIDE:
        counts, header = [[sum(row)] for row in counts], ["all"]
    said = [next((result.first_errors[kind] for result in results if kind in result.first_errors), "") for kind in kinds]
    rows = [[kind, *(f"{count:,}" for count in row), first] for kind, row, first in zip(kinds, counts, said, strict=True)]
    return Table(title="Errors by kind", header=["", *header, "the first"], rows=rows, ends_in_text=True)


def client_table(results: Sequence[RunResult]) -> FigureTable:
    """How busy and how late the client itself was."""
    clients = [result.client for result in results]
    rows = [
        FigureRow("send_lag", "Client processes", [f"{client.num_processes}" for client in clients]),
        FigureRow("send_lag", "CPU cores used, all", [number(client.cpu_cores_used) for client in clients]),
        FigureRow("send_lag", "Busiest process", [percent(client.max_process_cpu_share) + " of a core" for client in clients]),
        FigureRow("send_lag", "Send lag p50", [seconds(client.send_lag_p50_seconds) for client in clients]),
        FigureRow("send_lag", "Send lag p99", [seconds(client.send_lag_p99_seconds) for client in clients]),
        FigureRow("send_lag", "Event loop lag p99", [seconds(client.loop_lag_p99_seconds) for client in clients]),
        FigureRow("send_lag", "Was the bottleneck", ["YES" if client.was_bottleneck else "no" for client in clients]),
        FigureRow("output_tokens_per_second", "Token counts", [result.token_counts for result in results]),
    ]
    return FigureTable("The client itself", ["", *labels(results)], rows)


def settings_table(results: Sequence[RunResult]) -> Table:
    """What repeats each result; settings that equal their default in all are left out."""
    rows = []
    for field in msgspec.structs.fields(RunSettings):
        values = [_setting(getattr(result.settings, field.name)) for result in results]
        default = _setting(field.default) if field.default is not msgspec.NODEFAULT else None
        if any(value not in ("", default) for value in values):
            rows.append([field.name.replace("_", " "), *values])
    return Table(title="Settings", header=["", *labels(results)], rows=rows, note="What is not listed has its default.")


def differing_settings(results: Sequence[RunResult], ignored: frozenset[str] = frozenset()) -> list[str]:
    """Names of settings that are not the same in all results."""
    fields = [field.name for field in msgspec.structs.fields(RunSettings) if field.name not in ignored]
    return [name for name in fields if len({_setting(getattr(result.settings, name)) for result in results}) > 1]


def labels(results: Sequence[RunResult]) -> list[str]:
    """The results' labels, a number where one has none."""
    return [result.label or (f"run {place}" if len(results) > 1 else "") for place, result in enumerate(results, start=1)]


def _setting(value: object) -> str:
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)

"""A report as one HTML page: warnings first, then figures with their definitions, charts, and what repeats it.

Owns: render_html, save_html. Runs in: load tool. Must not know: how charts are drawn or pages styled.
"""

from collections.abc import Sequence
from pathlib import Path

from headrace.loadtest.definitions import BY_KEY, DEFINITIONS
from headrace.loadtest.report import tables
from headrace.loadtest.report.figures_on_page import section_charts
from headrace.loadtest.report.files import ReportFileError
from headrace.loadtest.report.model import Report, ReportSection, Table, Verdict, VerdictKind, section_verdicts
from headrace.loadtest.report.page import Html, element, join, page
from headrace.loadtest.report.tables import FigureTable, number, percent, seconds
from headrace.loadtest.results import RunResult

MAX_OPEN_WARNINGS = 6  # more are folded; problems never are
_LOUD = (VerdictKind.PROBLEM, VerdictKind.WARNING)
_WORDS = {VerdictKind.PROBLEM: "Problem", VerdictKind.WARNING: "Warning", VerdictKind.INFO: "Note", VerdictKind.OK: "OK"}


def save_html(report: Report, path: Path) -> None:
    """Write the page. Raises: ReportFileError when it cannot be written, ChartsUnavailableError without matplotlib."""
    text = render_html(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportFileError(f"{path} cannot be written: {error.strerror}") from None


def render_html(report: Report) -> str:
    """The page as text. Raises: ChartsUnavailableError without matplotlib."""
    results = list(report.results())
    body = [
        element("h1", report.title),
        element("p", _meta(report, results), class_="meta"),
        _loud_verdicts(report),
        _tiles(results[0]) if len(results) == 1 else Html(""),
        *(_section(section, has_heading=len(report.sections) > 1) for section in report.sections),
        _repeat(report, results),
        _definitions(),
    ]
    return page(report.title, element("main", *body))


def _meta(report: Report, results: Sequence[RunResult]) -> str:
    models = list(dict.fromkeys(result.settings.model for result in results))
    urls = list(dict.fromkeys(result.settings.url for result in results))
    parts = [report.created_at, "model " + ", ".join(models) if models else "", ", ".join(urls)]
    return " · ".join(part for part in parts if part)


def _loud_verdicts(report: Report) -> Html:
    found: list[tuple[str, Verdict]] = []
    for section in report.sections:
        prefix = f"{section.title}: " if len(report.sections) > 1 else ""
        found += [(prefix, verdict) for verdict in section_verdicts(section) if verdict.kind in _LOUD]
    found.sort(key=lambda item: _LOUD.index(item[1].kind))
    items = [_verdict(verdict, prefix) for prefix, verdict in found]
    num_problems = sum(verdict.kind is VerdictKind.PROBLEM for _, verdict in found)
    num_open = len(items) if len(items) <= MAX_OPEN_WARNINGS else max(num_problems, MAX_OPEN_WARNINGS - 1)
    shown = element("ul", *items[:num_open], class_="verdicts") if items else Html("")
    if num_open == len(items):
        return shown
    rest = element("ul", *items[num_open:], class_="verdicts")
    return join(shown, element("details", element("summary", f"{len(items) - num_open} more warnings"), rest, class_="card"))


def _verdict(verdict: Verdict, prefix: str = "") -> Html:
    return element("li", element("b", _WORDS[verdict.kind]), prefix + verdict.text, class_=verdict.kind.value)


def _tiles(result: RunResult) -> Html:
    counts = result.requests
    lost = counts.refused + counts.failed
    shown = [
        (number(result.output_tokens_per_second), "output tokens/s", "output_tokens_per_second"),
        (seconds(result.ttft_seconds.p50), "TTFT p50", "ttft_seconds"),
        (seconds(result.ttft_seconds.p99), "TTFT p99", "ttft_seconds"),
        (seconds(result.tpot_seconds.p50), "TPOT p50", "tpot_seconds"),
        (seconds(result.tbt_seconds.p99), "TBT (ITL) p99", "tbt_seconds"),
        (
            percent(result.goodput),
            f"goodput, {result.goodput_targets[0].name}" if result.goodput_targets else "goodput",
            "goodput",
        ),
        (f"{counts.completed:,} of {counts.offered:,}", "requests completed", "requests"),
        (f"{lost:,}", "refused or failed", "requests"),
    ]
    tiles = [
        element(
            "div",
            element("b", value, class_="bad" if name == "refused or failed" and lost else None),
            element("span", _defined(key, name)),
            class_="tile",
        )
        for value, name, key in shown
    ]
    return element("div", *tiles, class_="tiles")


def _section(section: ReportSection, has_heading: bool) -> Html:
    quiet = [_verdict(verdict) for verdict in section_verdicts(section) if verdict.kind not in _LOUD]
    charts = [
        element(
            "figure",
            element("figcaption", chart.title),
            element("div", Html(chart.svg), class_="scroll"),
            element("p", chart.note, class_="note") if chart.note else Html(""),
            class_="card wide" if chart.is_wide else "card",
        )
        for chart in section_charts(section)
    ]
    shown_tables = _tables(section)
    return element(
        "section",
        element("h2", section.title) if has_heading else Html(""),
        element("p", section.intro) if section.intro else Html(""),
        element("ul", *quiet, class_="verdicts") if quiet else Html(""),
        element("div", *shown_tables, class_="tables") if shown_tables else Html(""),
        element("div", *charts, class_="charts") if charts else Html(""),
    )


def _tables(section: ReportSection) -> list[Html]:
    results = section.results
    errors = tables.error_table(results)
    shown_errors = [_table(errors)] if errors else []
    shown = []
    if len(results) > tables.MAX_SIDE_BY_SIDE:
        shown += [_table(tables.overview_table(results)), *shown_errors]
    elif results:
        latency = tables.latency_table(results[0]) if len(results) == 1 else tables.side_by_side_table(results)
        shown += [_figure_table(tables.totals_table(results)), *shown_errors, _figure_table(latency)]
    if section.ratios:
        shown.append(_table(tables.ratio_table(section.ratios)))
    shown += [_table(table) for table in section.tables]
    return shown + [_table(table) for result in results for table in tables.group_tables(result)]


def _figure_table(table: FigureTable) -> Html:
    rows = [
        element("tr", element("td", _defined(row.key, row.name)), *(_cell(cell) for cell in row.cells)) for row in table.rows
    ]
    return _framed(table.title, table.header, rows, table.note)


def _table(table: Table, class_: str | None = None) -> Html:
    rows = [element("tr", *(_cell(cell) for cell in row)) for row in table.rows]
    return _framed(table.title, table.header, rows, table.note, class_ or ("ends-in-text" if table.ends_in_text else None))


def _cell(text: str) -> Html:
    return element("td", text, class_="bad" if text == "YES" else None)


def _framed(title: str, header: Sequence[str], rows: Sequence[Html], note: str, class_: str | None = None) -> Html:
    names = element("tr", *(element("th", name, scope="col") for name in header))
    head = element("thead", names) if any(header) else Html("")
    return element(
        "div",
        element("h3", title) if title else Html(""),
        element("div", element("table", head, element("tbody", *rows), class_=class_), class_="scroll"),
        element("p", note, class_="note") if note else Html(""),
        class_="card",
    )


def _defined(key: str, name: str) -> Html:
    """The name with its definition as a tooltip and a link to the full one."""
    if key not in BY_KEY:
        return join(name)
    return element(
        "a", element("abbr", name, title=BY_KEY[key].definition), href=f"#def-{key}", style="color:inherit;text-decoration:none"
    )


def _repeat(report: Report, results: Sequence[RunResult]) -> Html:
    parts = [element("h2", "To repeat it")]
    if report.command_line:
        parts.append(element("pre", report.command_line))
    distinct = results[: tables.MAX_SIDE_BY_SIDE]
    if distinct:
        table = tables.settings_table(distinct)
        note = f" Settings of the first {len(distinct)} of {len(results)} results." if len(results) > len(distinct) else ""
        settings = _table(Table(title="", header=table.header, rows=table.rows, note=table.note + note), "text")
        client = _figure_table(tables.client_table(distinct))
        parts.append(
            element(
                "details", element("summary", "Settings, server and client"), settings, client, *_facts(report), class_="card"
            )
        )
    return element("section", *parts)


def _facts(report: Report) -> list[Html]:
    """What servers and the client machine said of themselves, each distinct answer once."""
    rows: dict[tuple[str, str, str], None] = {}
    for run in (run for section in report.sections for run in section.runs):
        rows |= {("server " + run.label, name, value): None for name, value in run.server.items()}
        rows |= {("client", name, value): None for name, value in run.environment.items()}
    if not rows:
        return []
    return [_table(Table(title="Server and client", header=["", "", ""], rows=[list(row) for row in rows]), "text")]


def _definitions() -> Html:
    entries = [
        join(
            element("dt", f"{item.name}{f' ({item.unit})' if item.unit else ''}", id=f"def-{item.key}"),
            element("dd", item.definition),
            element("dd", element("span", f"Trap: {item.trap}", class_="note")),
        )
        for item in DEFINITIONS
    ]
    return element("details", element("summary", "Definitions of all figures"), element("dl", *entries), class_="card")

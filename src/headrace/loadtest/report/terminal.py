"""A report in the terminal: warnings first, then tables.

Owns: print_report. Runs in: load tool. Must not know: charts, files.
Text that may come from a server is never read as markup, and its control characters never reach the terminal.
"""

from collections.abc import Sequence

import rich.table
from rich.console import Console
from rich.text import Text

from headrace.loadtest.report import tables
from headrace.loadtest.report.clean_text import plain
from headrace.loadtest.report.model import Report, ReportSection, Table, Verdict, VerdictKind, section_verdicts
from headrace.loadtest.results import RunResult

STYLES = {
    VerdictKind.PROBLEM: ("bold white on red", " PROBLEM "),
    VerdictKind.WARNING: ("bold black on yellow", " WARNING "),
    VerdictKind.INFO: ("bold cyan", "note"),
    VerdictKind.OK: ("bold green", "ok"),
}
_LOUDNESS = tuple(STYLES)


def print_report(report: Report, console: Console) -> None:
    """Print the whole report. The console decides on colour and width."""
    console.print(_text(report.title, "bold"))
    for section in report.sections:
        _print_section(section, console, has_rule=len(report.sections) > 1)
    if report.command_line:
        console.print(_text(f"Repeat with: {report.command_line}", "dim"), soft_wrap=True)


def print_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    """The sentences, loudest first."""
    for verdict in sorted(verdicts, key=lambda item: _LOUDNESS.index(item.kind)):
        style, word = STYLES[verdict.kind]
        console.print(Text.assemble((word, style), " ", _text(verdict.text)))


def _print_section(section: ReportSection, console: Console, has_rule: bool) -> None:
    if has_rule:
        console.rule(_text(section.title, "bold"), align="left")
    if section.intro:
        console.print(_text(section.intro))
    print_verdicts(section_verdicts(section), console)
    for table in section_tables(section):
        _print_table(table, console)


def section_tables(section: ReportSection) -> list[Table]:
    """All tables of a section in order of display."""
    shown = result_tables(section.results)
    if section.ratios:
        shown.append(tables.ratio_table(section.ratios))
    shown += section.tables
    for result in section.results:
        shown += tables.group_tables(result)
    errors = tables.error_table(section.results)
    return [*shown, errors] if errors else shown


def result_tables(results: Sequence[RunResult]) -> list[Table]:
    """One result in full, a few side by side, many with a line each."""
    if not results:
        return []
    if len(results) > tables.MAX_SIDE_BY_SIDE:
        return [tables.overview_table(results)]
    totals, client = tables.totals_table(results).plain(), tables.client_table(results).plain()
    latency = tables.latency_table(results[0]) if len(results) == 1 else tables.side_by_side_table(results)
    return [totals, latency.plain(), client]


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        console.print(_text(table.title, "bold"))
    shown = rich.table.Table(box=None, show_header=any(table.header))
    for place, name in enumerate(table.header):
        is_text = place == 0 or (table.ends_in_text and place == len(table.header) - 1)
        shown.add_column(_text(name, "dim"), justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(_text(cell, _cell_style(cell)) for cell in row))
    console.print(shown)
    if table.note:
        console.print(_text(f"  {table.note}", "dim"))
    console.print()


def _cell_style(cell: str) -> str:
    return "bold red" if cell == "YES" else ""


def _text(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style)

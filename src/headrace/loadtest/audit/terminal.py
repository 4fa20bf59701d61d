"""The report as a table in a terminal.

Owns: print_report. Runs in: CLI. Must not know: HTTP, how anything was judged.
"""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.loadtest.audit.findings import AuditReport, CheckResult, Outcome

MARKS = {Outcome.PASS: ("pass", "green"), Outcome.FAIL: ("FAIL", "bold red"), Outcome.SKIP: ("skip", "dim")}


def mark(line: CheckResult) -> tuple[str, str]:
    """Word and style. Half credit and unscored lines look different."""
    if line.weight == 0 and line.outcome is Outcome.FAIL:
        return "note", "yellow"
    if line.verdict == "refused":
        return "half", "yellow"
    return MARKS[line.outcome]


def score_words(report: AuditReport) -> tuple[str, str]:
    """The score, "" for none, and what it counts."""
    counts = f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped"
    if report.score is None:
        return "", f"no score: {counts}"
    scope = " for what was checked" if report.skipped else ""
    return f"{report.score:g}", f"of 100{scope}: {counts}"


def print_report(report: AuditReport, console: Console) -> None:
    """All lines by group, then the score. Everything from the server is shown as plain text."""
    facts = ", ".join(f"{name} {value}" for name, value in report.server.items())
    console.print(Text(f"{report.url}  model {report.model}  {facts}"))
    for group, lines in groupby(report.checks, key=lambda line: line.group):
        table = Table(title=group, title_justify="left", title_style="bold", expand=True, pad_edge=False)
        table.add_column("", width=4)
        table.add_column("check", ratio=3)
        table.add_column("evidence", ratio=5, overflow="fold")
        for line in lines:
            word, style = mark(line)
            evidence = Text(line.evidence)
            if line.hint:
                evidence.append(f"\n→ {line.hint}", style="italic")
            table.add_row(Text(word, style=style), Text(f"{line.title}\n").append(line.id, style="dim"), evidence)
        console.print(table)
    console.print(Text(" ".join(score_words(report)).strip(), style="bold"))
    console.print(Text(f"{report.num_requests} requests in {report.seconds:g} s"))

"""What a report says, before it has a form: sections of figures, curves, ratios, tables and verdicts.

Owns: Report and its parts, built by studies, drawn and saved by the rest of this package. Runs in: load tool.
Must not know: terminals, HTML, charts, files.
"""

import enum
from collections.abc import Iterator

import msgspec

from headrace.loadtest.records import Run
from headrace.loadtest.results import RunResult

REPORT_KINDS = ("run", "stream", "sweep", "compare", "capacity", "saved")  # "saved": saved runs laid side by side


class VerdictKind(enum.Enum):
    """How loud a sentence is."""

    PROBLEM = "problem"  # the figures do not mean what they seem to (client too slow), or the server misbehaved
    WARNING = "warning"  # read the figures with care
    INFO = "info"
    OK = "ok"  # a sign was looked for and is absent; a target was met


class Verdict(msgspec.Struct, frozen=True):
    """One sentence for people, complete in itself."""

    kind: VerdictKind
    text: str


class Mark(msgspec.Struct, frozen=True):
    """A named vertical line in a curve, such as the knee."""

    x: float
    label: str


class Curve(msgspec.Struct, kw_only=True):
    """Lines over a common x. Points are (x, y), bands (x, low, high) by the name of their line: 95 % intervals."""

    title: str
    x_label: str  # with the unit: "clients", "offered requests/s"
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    bands: dict[str, list[tuple[float, float, float]]] = {}
    marks: list[Mark] = []
    is_x_log: bool = False
    is_y_log: bool = False
    note: str = ""  # one sentence under the chart


class Ratio(msgspec.Struct, kw_only=True):
    """`subject` over `baseline` in one figure, with its paired 95 % interval (None: not enough blocks for one)."""

    subject: str
    baseline: str
    figure: str  # a key of definitions.DEFINITIONS where there is one, "/p50" and the like behind it: "ttft_seconds/p50"
    value: float
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    is_lower_better: bool = True

    @property
    def is_clear(self) -> bool:
        """The interval excludes 1: only then one may speak of a win or a loss."""
        return self.low is not None and self.high is not None and (self.low > 1.0 or self.high < 1.0)

    @property
    def is_win(self) -> bool:
        """Clear, and in the subject's favour."""
        return self.is_clear and (self.value < 1.0) == self.is_lower_better


class Table(msgspec.Struct, kw_only=True):
    """Ready text; the first column names the row. Every row has as many cells as the header."""

    title: str = ""
    header: list[str]
    rows: list[list[str]]
    note: str = ""


class ReportSection(msgspec.Struct, kw_only=True):
    """A part of a report. `runs` are the raw records behind `results`, joined by label.

    A label may stand on several runs (the blocks of a comparison): charts pool them. Results without runs are drawn from
    their percentiles alone. Order of display: verdicts, figures of `results`, ratios, tables, curves, charts of `runs`.
    """

    title: str
    intro: str = ""
    results: list[RunResult] = []
    runs: list[Run] = []
    curves: list[Curve] = []
    ratios: list[Ratio] = []
    verdicts: list[Verdict] = []
    tables: list[Table] = []


class Report(msgspec.Struct, kw_only=True):
    """One report. `figures` are a study's own findings, for scripts: they go to the top of its JSON.

    For kind "run" the first result of the first section is *the* run: its figures go to the top of the JSON as well.
    """

    kind: str  # of REPORT_KINDS
    title: str
    command_line: str = ""  # repeats it; never holds a key
    created_at: str = ""  # ISO 8601
    figures: dict[str, float | str | None] = {}  # "knee_clients", "capacity_low_per_second" ...
    sections: list[ReportSection]

    def results(self) -> Iterator[RunResult]:
        """All results, in order of their sections."""
        for section in self.sections:
            yield from section.results


def result_verdicts(result: RunResult) -> list[Verdict]:
    """A result's own warnings as verdicts: a client that was the bottleneck is a problem, the others are warnings."""
    prefix = f"{result.label}: " if result.label else ""
    verdicts = []
    if result.client.was_bottleneck:
        why = result.client.why or "the client could not keep up"
        verdicts.append(
            Verdict(VerdictKind.PROBLEM, f"{prefix}The client was the bottleneck, its latencies are not the server's: {why}")
        )
    warnings = [text for text in result.warnings if not (result.client.was_bottleneck and result.client.why in text)]
    return verdicts + [Verdict(VerdictKind.WARNING, prefix + text) for text in warnings]

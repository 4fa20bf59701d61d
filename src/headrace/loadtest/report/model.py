"""What a report says, before it has a form: sections of figures, curves, ratios, tables and verdicts.

Owns: Report and its parts, built by studies, drawn and saved by the rest of this package. Runs in: load tool.
Must not know: terminals, HTML, charts, files.
"""

import enum
import re
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
    ends_in_text: bool = False  # the last column holds sentences, not figures


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
    """A result's own warnings, without its label: a client that was the bottleneck is a problem, the others are warnings."""
    is_slow, why = result.client.was_bottleneck, result.client.why
    told = [text for text in result.warnings if is_slow and ("bottleneck" in text or (why and why in text))]
    verdicts = [Verdict(VerdictKind.WARNING, text) for text in result.warnings if text not in told]
    if is_slow:
        text = told[0] if told else f"The client was the bottleneck, so that these are not figures of the server: {why}"
        verdicts.insert(0, Verdict(VerdictKind.PROBLEM, text))
    return verdicts


def section_verdicts(section: ReportSection) -> list[Verdict]:
    """All of a section, each sentence once: its own, those of its results, and the load's own warnings from its runs.

    Sentences of many results that differ in numbers only become the first of them, with the labels of the others.
    """
    verdicts = list(section.verdicts)
    told = {text for result in section.results for text in result.warnings}
    labelled = [(result.label, verdict) for result in section.results for verdict in result_verdicts(result)]
    for run in section.runs:
        labelled += [(run.label, Verdict(VerdictKind.WARNING, text)) for text in run.warnings if text not in told]
        if run.was_interrupted:
            text = "The run was interrupted: it holds what there was by then."
            labelled.append((run.label, Verdict(VerdictKind.WARNING, text)))
    return list(dict.fromkeys([*verdicts, *_merged(labelled)]))


def _merged(labelled: list[tuple[str, Verdict]]) -> Iterator[Verdict]:
    alike: dict[tuple[VerdictKind, str], list[tuple[str, Verdict]]] = {}
    for label, verdict in dict.fromkeys(labelled):
        shape = re.sub(r"\d[\d.,]*", "0", verdict.text)
        alike.setdefault((verdict.kind, shape), []).append((label, verdict))
    for (label, first), *others in alike.values():
        names = list(dict.fromkeys(other for other, _ in others if other and other != label))
        also = f" (Likewise, with other numbers: {', '.join(names)}.)" if names else ""
        yield Verdict(first.kind, f"{label}: {first.text}{also}" if label else first.text + also)

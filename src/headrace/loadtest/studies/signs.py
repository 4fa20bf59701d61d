"""The signs in single runs as verdicts of a report: over-saturation and head-of-line blocking.

Owns: which finding is good news and which is not. Runs in: load tool. Must not know: how signs are found.
"""

from collections.abc import Sequence

from headrace.loadtest.detection import find_head_of_line, find_over_saturation
from headrace.loadtest.records import Run
from headrace.loadtest.report.model import Verdict, VerdictKind


def is_growing(run: Run) -> bool | None:
    """Whether the queue grew all along; None when it cannot be told (closed loop, too short a run)."""
    finding = find_over_saturation(run)
    return finding.found if finding.is_judged else None


def saturation_verdict(run: Run, label: str = "") -> Verdict | None:
    """Of an open loop: over-saturated, not, or that it cannot be told. None for a closed loop, which cannot be."""
    if run.settings.arrival == "closed":
        return None
    finding = find_over_saturation(run)
    prefix = f"{label}: " if label else ""
    kind = VerdictKind.INFO if not finding.is_judged else VerdictKind.WARNING if finding.found else VerdictKind.OK
    return Verdict(kind, prefix + finding.sentence)


def blocking_verdict(run: Run) -> Verdict:
    """Head-of-line blocking in one run: named when it is there, named when it is not, and said when it cannot be told."""
    found = find_head_of_line(run)
    kind = VerdictKind.WARNING if found.found else VerdictKind.OK if found.is_judged else VerdictKind.INFO
    return Verdict(kind, found.sentence)


def blocking_verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Head-of-line blocking over the runs of a sweep: where it is seen, with the words of the highest load that shows it."""
    found = [(run, find_head_of_line(run)) for run in runs]
    blocked = [(run, verdict) for run, verdict in found if verdict.found]
    judged = [(run, verdict) for run, verdict in found if verdict.is_judged]
    if blocked:
        run, verdict = blocked[-1]
        where = ", ".join(item.label for item, _ in blocked)
        text = f"Signs of head-of-line blocking at {where} ({len(judged)} of {len(found)} loads could be judged)."
        return [Verdict(VerdictKind.WARNING, f"{text} At {run.label}: {verdict.sentence}")]
    if judged:
        run, verdict = judged[-1]
        text = f"No sign of head-of-line blocking at the {len(judged)} of {len(found)} loads that could be judged."
        return [Verdict(VerdictKind.OK, f"{text} At {run.label}: {verdict.sentence}")]
    if not found:
        return []
    run, verdict = found[-1]
    return [Verdict(VerdictKind.INFO, f"At {run.label}: {verdict.sentence}")]

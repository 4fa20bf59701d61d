"""What an audit says: one finding for each check, and the score over all of them.

Owns: outcomes, credits, the score, the saved report. Runs in: audit. Must not know: HTTP, how anything was found out.
"""

import enum

import msgspec

REPORT_FORMAT = "headrace-audit"
REPORT_VERSION = 1
MAX_EVIDENCE_CHARS = 320
REFUSED_CREDIT = 0.5  # an optional feature that the server clearly refuses: nobody is misled, but nobody has it either
REFUSED_HINT = "A clear refusal of an optional field counts half; the rest is for implementing it."


class Outcome(enum.Enum):
    """How a check ended. SKIP: it could not be judged; it does not count."""

    PASS = "pass"  # noqa: S105 - a word, not a secret
    FAIL = "fail"
    SKIP = "skip"


class Finding(msgspec.Struct, frozen=True):
    """What one check saw. `verdict` (honoured, refused, ignored) is set by checks of one request field only."""

    outcome: Outcome
    evidence: str
    verdict: str = ""
    credit: float = 0.0  # 0..1 of the check's weight
    hint: str = ""  # wins over the check's own hint


class CheckResult(msgspec.Struct, kw_only=True):
    """One line of the report. `hint` is empty for what passed with full credit."""

    id: str
    title: str
    outcome: Outcome
    evidence: str
    hint: str
    group: str
    weight: int
    verdict: str = ""
    credit: float = 0.0
    num_requests: int = 0
    seconds: float = 0.0


class AuditReport(msgspec.Struct, kw_only=True):
    """A whole audit, as it is saved. `score` is None when no check could be judged. Keys never stand here."""

    format: str = REPORT_FORMAT
    version: int = REPORT_VERSION
    url: str
    model: str
    started_at: str  # ISO 8601
    seconds: float
    score: float | None  # 0..100
    passed: int
    failed: int
    skipped: int
    num_requests: int
    max_requests: int
    is_quick: bool
    server: dict[str, str]
    checks: list[CheckResult]


class CannotJudge(Exception):  # noqa: N818 - a result, not a fault of the audit
    """A check cannot be judged on this server; the text says why. It becomes SKIP."""


class WrongAnswer(Exception):  # noqa: N818 - a result, not a fault of the audit
    """The server's answer is not what the API promises; the text is the evidence. It becomes FAIL."""


def clip(text: str, max_chars: int = MAX_EVIDENCE_CHARS) -> str:
    """Text from a server made safe to show: bounded, on one line, control characters replaced (a terminal would obey them)."""
    short = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else "�" for c in short)


def quote(text: str, max_chars: int = 60) -> str:
    """A piece of a server's text within an evidence line."""
    short = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return repr(short)


def passed(evidence: str) -> Finding:
    """The server does it right."""
    return Finding(Outcome.PASS, clip(evidence), credit=1.0)


def failed(evidence: str, hint: str = "") -> Finding:
    """The server does it wrong."""
    return Finding(Outcome.FAIL, clip(evidence), hint=hint)


def skipped(reason: str) -> Finding:
    """Could not be judged."""
    return Finding(Outcome.SKIP, clip(reason))


def honoured(evidence: str) -> Finding:
    """The field does what it says."""
    return Finding(Outcome.PASS, clip(f"honoured: {evidence}"), "honoured", 1.0)


def refused(evidence: str) -> Finding:
    """The field is clearly refused. A pass with half the credit: an application knows where it stands."""
    return Finding(Outcome.PASS, clip(f"refused: {evidence}"), "refused", REFUSED_CREDIT, REFUSED_HINT)


def ignored(evidence: str) -> Finding:
    """The field is accepted and does nothing, or not what it says: the worst of the three."""
    return Finding(Outcome.FAIL, clip(f"ignored: {evidence}"), "ignored")


def score_of(results: list[CheckResult]) -> float | None:
    """100 * (sum of weight * credit) / (sum of weight), over what was judged. None when nothing with a weight was."""
    judged = [result for result in results if result.outcome is not Outcome.SKIP]
    total = sum(result.weight for result in judged)
    if not total:
        return None
    return round(100 * sum(result.weight * result.credit for result in judged) / total, 1)

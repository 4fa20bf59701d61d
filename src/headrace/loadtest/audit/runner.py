"""Run all checks one after another, within the limit of requests, and make the report.

Owns: run_audit, load_checks. Runs in: audit. Must not know: what a check does, how a report is shown.
"""

import datetime
import importlib
from collections.abc import Callable

from headrace.loadtest.audit.checks.errors import journal_checks_last
from headrace.loadtest.audit.discovery import discover
from headrace.loadtest.audit.findings import (
    AuditReport,
    CannotJudge,
    CheckResult,
    Finding,
    Outcome,
    WrongAnswer,
    failed,
    score_of,
    skipped,
)
from headrace.loadtest.audit.registry import Check, registered
from headrace.loadtest.audit.session import Session

MODULES = (
    "fields",
    "structured",
    "answers_right",
    "streaming",
    "errors",
    "cancelling",
    "overload",
    "operations",
    "connections",
)
SETTLE_TIMES = 2  # of the time-out of ordinary requests
OnProgress = Callable[[int, int, str], None]  # number of the check from 0, how many, its title


def load_checks() -> list[Check]:
    """Every check, in the order of the report."""
    for name in MODULES:
        importlib.import_module(f"headrace.loadtest.audit.checks.{name}")
    return registered()


async def run_audit(
    session: Session, url: str, *, on_progress: OnProgress | None = None, checks: list[Check] | None = None
) -> AuditReport:
    """Audit the session's server. Raise AuditError when nobody answers or nothing generates.

    A check that would pass its own limit, or the audit's, is skipped with that reason. `checks`: other than all.
    """
    started = datetime.datetime.now(datetime.UTC)
    begin = session.clock.now()
    wanted = checks if checks is not None else load_checks()
    session.allowance = session.max_requests
    await discover(session)
    results: dict[str, CheckResult] = {}
    for number, check in enumerate(journal_checks_last(wanted)):
        if on_progress is not None:
            on_progress(number, len(wanted), check.title)
        results[check.id] = await run_check(session, check)
        await _settle(session, check)
    lines = [results[check.id] for check in wanted]
    outcomes = [line.outcome for line in lines]
    return AuditReport(
        url=url,
        model=session.model,
        started_at=started.isoformat(timespec="seconds"),
        seconds=round(session.clock.now() - begin, 1),
        score=score_of(lines),
        passed=outcomes.count(Outcome.PASS),
        failed=outcomes.count(Outcome.FAIL),
        skipped=outcomes.count(Outcome.SKIP),
        num_requests=session.num_requests,
        max_requests=session.max_requests,
        is_quick=session.is_quick,
        server=session.facts.server,
        checks=lines,
    )


async def run_check(session: Session, check: Check) -> CheckResult:
    """One line of the report."""
    before, begin = session.num_requests, session.clock.now()
    session.allowance = before + check.max_requests
    finding = await _finding(session, check)
    session.allowance = session.max_requests
    is_perfect = finding.outcome is Outcome.PASS and finding.credit == 1.0
    return CheckResult(
        id=check.id,
        title=check.title,
        outcome=finding.outcome,
        evidence=finding.evidence,
        hint="" if is_perfect or finding.outcome is Outcome.SKIP else finding.hint or check.hint,
        group=check.group.value,
        weight=check.weight,
        verdict=finding.verdict,
        credit=finding.credit,
        num_requests=session.num_requests - before,
        seconds=round(session.clock.now() - begin, 2),
    )


async def _settle(session: Session, check: Check) -> None:
    """After a time-out the server may still be at work on what was asked: let it finish, so that checks stay apart."""
    if not session.has_timed_out or session.num_requests >= session.max_requests or not session.facts.references:
        return
    surface = session.main_surface()
    body = session.body(surface, max_tokens=1)
    reply = await session.post(surface.path, body, timeout_seconds=SETTLE_TIMES * session.timeout_seconds)
    if reply.fault:
        session.facts.server["still busy after"] = check.id
    session.has_timed_out = False


async def _finding(session: Session, check: Check) -> Finding:
    if check.is_heavy and session.is_quick:
        return skipped("left out of a quick audit")
    left = session.max_requests - session.num_requests
    if check.max_requests > left:
        return skipped(f"needs up to {check.max_requests} requests, {left} of {session.max_requests} are left (--max-requests)")
    try:
        return await check.run(session)
    except CannotJudge as reason:
        return skipped(str(reason))
    except WrongAnswer as evidence:
        return failed(str(evidence))

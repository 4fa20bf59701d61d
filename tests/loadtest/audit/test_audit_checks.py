"""Every check passes on a perfect server and fails on one with its fault: a check that cannot fail would be worth nothing."""

import asyncio
import pathlib
from typing import Any

import pytest

from headrace.loadtest.audit.discovery import AuditError
from headrace.loadtest.audit.findings import AuditReport, CheckResult, Outcome
from headrace.loadtest.audit.runner import load_checks, run_audit
from headrace.loadtest.audit.session import Session
from tests.loadtest.audit import scripted_server as scripted

INPUT_CHECKS = [name for name in scripted.RULES if name != "logprobs-limit"]
# fault of the server -> checks that must fail because of it
FAULTS: dict[str, tuple[str, ...]] = {
    "ignores-max_tokens": ("field.max_tokens",),
    "ignores-max_completion_tokens": ("field.max_completion_tokens",),
    "ignores-temperature": ("field.temperature",),
    "ignores-seed": ("field.seed",),
    "ignores-top_p": ("field.top_p",),
    "ignores-n": ("field.n", "stream.n"),
    "ignores-logit_bias": ("field.logit_bias",),
    "ignores-frequency_penalty": ("field.frequency_penalty",),
    "refuses-audit_unknown_field": ("field.unknown",),
    "refuses-user": ("field.user",),
    "no-parts": ("field.content-parts", "error.no-5xx"),
    "ignores-echo": ("field.echo",),
    "ignores-suffix": ("field.suffix",),
    "ignores-lists": ("field.list-prompt",),
    "no-token-prompts": ("field.token-prompt", "error.no-5xx", "error.shape"),
    "null-logprobs": ("field.logprobs-chat", "field.logprobs-text"),
    "legacy-logprobs": ("field.logprobs-chat",),
    "accepts-logprobs-limit": ("field.logprobs-limit",),
    "ignores-json_object": ("field.json_object",),
    "ignores-json_schema": ("field.json_schema",),
    "ignores-tools": ("field.tools",),
    "wrong-order": ("field.n", "field.list-prompt"),
    "wrong-object": ("answer.shape", "stream.identity"),
    "no-usage": ("answer.shape", "answer.usage"),
    "usage-adds-wrong": ("answer.usage",),
    "always-says-stop": ("answer.finish-length",),
    "unstable-later": ("answer.greedy-repeats",),
    "unstable-under-load": ("answer.greedy-under-load",),
    "ignores-stop": ("answer.stop", "answer.stop-stream"),
    "inexact-stop": ("answer.stop", "answer.stop-stream"),
    "leaks-stop": ("answer.stop-stream",),
    "stop-loses-tail": ("answer.stop-absent",),
    "broken-utf8": ("answer.utf8-stream", "answer.utf8-cut"),
    "stream-as-json": ("stream.type",),
    "bad-framing": ("stream.framing",),
    "no-done": ("stream.done",),
    "two-done": ("stream.done",),
    "two-finishes": ("stream.finish",),
    "role-everywhere": ("stream.role",),
    "ids-change": ("stream.identity",),
    "no-stream-usage": ("stream.usage",),
    "stream-usage-differs": ("stream.usage",),
    "usage-unasked": ("stream.usage-unasked",),
    "stream-drops-token": ("stream.same-text",),
    "buffers": ("stream.early",),
    "late-headers": ("stream.headers-early",),
    "gzip": ("stream.uncompressed",),
    "closes-after-answer": ("stream.connection", "connection.keep-alive"),
    "stream-error-cut": ("stream.early-error",),
    "role-chunk": ("stream.role-chunk",),
    "no-cache-control": ("stream.no-cache",),
    "accepts-broken-json": ("error.broken-json",),
    "accepts-empty-body": ("error.empty-body",),
    "accepts-array-body": ("error.array-body",),
    **{f"accepts-{name}": (f"error.{name}",) for name in INPUT_CHECKS},
    "500-wrong-type": ("error.wrong-type", "error.no-5xx"),
    "stop-empty-ends": ("error.stop-empty",),
    "any-model": ("error.unknown-model",),
    "model-400": ("error.unknown-model",),
    "model-code": ("error.unknown-model",),
    "unknown-path-200": ("error.unknown-path",),
    "get-200": ("error.wrong-method",),
    "cuts-prompts": ("error.context-length",),
    "vague-length": ("error.context-length",),
    "detail-errors": ("error.shape", "error.broken-json"),
    "html-404": ("error.unknown-path", "error.shape", "error.no-traces"),
    "trace-on-broken-json": ("error.broken-json", "error.no-traces", "error.no-5xx"),
    "long-errors": ("error.short",),
    "burst-500": ("overload.burst", "error.no-5xx"),
    "burst-cut": ("overload.burst", "error.no-5xx"),
    "no-retry-after": ("overload.retry-after",),
    "vague-retry-after": ("overload.retry-after",),
    "slow-health": ("overload.health",),
    "slow-after-burst": ("overload.recovery",),
    "interrupts-streams": ("overload.streams",),
    "no-health": ("health.probe",),
    "one-probe": ("health.live-ready",),
    "no-models-one": ("models.one",),
    "no-models": ("models.list",),
    "no-context-length": ("models.context",),
    "needs-no-key": ("key.required",),
    "no-metrics": ("metrics.exposed", "metrics.ttft", "metrics.kv"),
    "metrics-nan": ("metrics.exposed",),
    "metrics-broken": ("metrics.exposed",),
    "metrics-twice": ("metrics.exposed",),
    "metrics-html": ("metrics.exposed",),
    **{f"no-metric-{thing}": (f"metrics.{thing}",) for thing in scripted.FAMILIES},
    "ttft-uncounted": ("metrics.count",),
    "closes-idle": ("connection.keep-alive",),
    "head-500": ("connection.head",),
    "options-500": ("connection.options",),
    "no-chunked-requests": ("connection.chunked-request",),
    "half-sent-blocks": ("connection.half-sent",),
    "no-http2": ("connection.http2",),
    "never-cancels": ("cancel.stream", "cancel.whole", "cancel.storm"),
}
# Checks that cannot pass when nothing else is wrong, and those whose fault is shown by hand below.
NEVER_FAIL = {"field.presence_penalty"}  # a penalty that changes nothing has an innocent explanation too: skip
SHOWN_ELSEWHERE = {"connection.close"}


def audit(*faults: str, **settings: Any) -> tuple[AuditReport, Any]:
    clock = scripted.ManualClock()
    server = scripted.ScriptedServer(clock, *faults, key=scripted.KEY)

    async def http2_probe(path: str, headers: Any) -> tuple[str, str]:
        return ("HTTP/1.1" if "no-http2" in faults else "HTTP/2"), path

    options: dict[str, Any] = {"max_requests": 400, "key": scripted.KEY, "http2_probe": http2_probe} | settings
    session = Session(server, clock, **options)
    return asyncio.run(run_audit(session, "http://scripted")), server


def by_id(report: AuditReport) -> dict[str, CheckResult]:
    return {line.id: line for line in report.checks}


@pytest.fixture(scope="module")
def perfect() -> AuditReport:
    return audit()[0]


def test_a_perfect_server_gets_full_marks(perfect: AuditReport) -> None:
    assert [f"{line.id}: {line.evidence}" for line in perfect.checks if line.outcome is not Outcome.PASS] == []
    assert perfect.score == 100
    assert perfect.passed == len(load_checks())


def test_no_more_requests_than_the_default_limit(perfect: AuditReport) -> None:
    assert perfect.num_requests <= 300
    assert sum(check.max_requests for check in load_checks()) + 7 <= 310


def test_each_check_keeps_its_own_limit(perfect: AuditReport) -> None:
    limits = {check.id: check.max_requests for check in load_checks()}
    assert {line.id for line in perfect.checks if line.num_requests > limits[line.id]} == set()


@pytest.mark.parametrize(("fault", "broken"), FAULTS.items(), ids=FAULTS.keys())
def test_a_fault_is_found(fault: str, broken: tuple[str, ...], perfect: AuditReport) -> None:
    report, _ = audit(fault)
    lines = by_id(report)
    assert {check_id: lines[check_id].outcome for check_id in broken} == dict.fromkeys(broken, Outcome.FAIL), [
        (check_id, lines[check_id].evidence) for check_id in broken
    ]
    scored = [check_id for check_id in broken if lines[check_id].weight]
    assert not scored or (report.score or 0) < (perfect.score or 0)
    assert all(lines[check_id].hint and lines[check_id].evidence for check_id in broken)


def test_every_check_has_a_fault_that_it_finds() -> None:
    found = {check_id for broken in FAULTS.values() for check_id in broken}
    assert {check.id for check in load_checks()} - found == NEVER_FAIL | SHOWN_ELSEWHERE


@pytest.mark.parametrize("field", ["seed", "n", "logit_bias", "logprobs", "tools", "response_format", "suffix", "echo"])
def test_a_clear_refusal_counts_half(field: str) -> None:
    report, _ = audit(f"refuses-{field}")
    refused = [line for line in report.checks if line.verdict == "refused"]
    assert refused
    assert {line.outcome for line in refused} == {Outcome.PASS}
    assert {line.credit for line in refused} == {0.5}
    assert all(field in line.evidence for line in refused)


def test_a_refusal_of_what_every_application_needs_fails() -> None:
    lines = by_id(audit("refuses-stop")[0])
    assert (lines["answer.stop"].outcome, lines["answer.stop-stream"].outcome) == (Outcome.FAIL, Outcome.FAIL)


def test_where_nothing_generates_there_is_no_report() -> None:
    with pytest.raises(AuditError, match=r"Nothing generates.*temperature is not implemented"):
        audit("refuses-temperature")  # every request of the audit has one
    with pytest.raises(AuditError, match="another key"):
        audit(key="wrong")


def test_cancellation_is_seen_by_timing_without_metrics() -> None:
    lines = by_id(audit("no-metrics")[0])
    assert (lines["cancel.stream"].outcome, lines["cancel.whole"].outcome) == (Outcome.PASS, Outcome.PASS)
    assert lines["cancel.storm"].outcome is Outcome.SKIP
    lines = by_id(audit("no-metrics", "never-cancels")[0])
    assert (lines["cancel.stream"].outcome, lines["cancel.whole"].outcome) == (Outcome.FAIL, Outcome.FAIL)


@pytest.mark.parametrize("limit", [10, 11, 40, 120])
def test_max_requests_is_a_hard_limit(limit: int) -> None:
    report, server = audit(max_requests=limit)
    assert report.num_requests <= limit
    assert server.num_asked <= limit
    assert any("--max-requests" in line.evidence for line in report.checks if line.outcome is Outcome.SKIP)


def test_quick_leaves_out_the_storm_and_sends_less() -> None:
    quick, _ = audit(is_quick=True)
    assert by_id(quick)["cancel.storm"].outcome is Outcome.SKIP
    assert quick.failed == 0
    assert quick.num_requests < 220


def test_keys_stay_out_of_the_report(perfect: AuditReport) -> None:
    import msgspec

    assert scripted.KEY.encode() not in msgspec.json.encode(perfect)


def test_connection_close_needs_a_whole_answer() -> None:
    from headrace.loadtest.audit.checks.connections import close

    clock = scripted.ManualClock()
    session = Session(scripted.ScriptedServer(clock, "cut-answers"), clock)
    assert asyncio.run(close(session)).outcome is Outcome.FAIL


def test_hints_name_what_to_do_and_ids_are_stable() -> None:
    checks = load_checks()
    assert all(check.hint and check.title and check.weight in (0, 1, 2, 3) for check in checks)
    assert len({check.id for check in checks}) == len(checks)


def test_the_document_lists_every_check_and_its_weight() -> None:
    text = (pathlib.Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split(" |")[:2] for row in rows] == [
        [f"| `{check.id}`", f" {check.weight or 'note'}"] for check in load_checks()
    ]

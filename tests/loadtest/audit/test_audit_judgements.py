"""Judgements, scores, exposition and reports, each on its own."""

import io
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.loadtest.audit.checks.answers_right import judge_stop, judge_utf8, stop_and_rest
from headrace.loadtest.audit.checks.cancelling import judge_timing
from headrace.loadtest.audit.checks.fields import is_repeated, judge_seeds
from headrace.loadtest.audit.checks.overload import judge_burst, judge_retry_after, judge_streams
from headrace.loadtest.audit.exposition import read_exposition
from headrace.loadtest.audit.findings import AuditReport, CannotJudge, CheckResult, Outcome, clip, score_of
from headrace.loadtest.audit.html_page import render_report
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.terminal import print_report
from headrace.loadtest.audit.wire import Reply, Target


def line(outcome: Outcome, weight: int = 2, credit: float = 0.0, **more: str) -> CheckResult:
    fields = {"id": "x.y", "title": "a title", "evidence": "seen", "hint": "", "group": "Fields"} | more
    return CheckResult(outcome=outcome, weight=weight, credit=credit, **fields)


def test_score_counts_weights_and_leaves_out_skips() -> None:
    lines = [line(Outcome.PASS, 3, 1.0), line(Outcome.PASS, 2, 0.5), line(Outcome.FAIL, 1), line(Outcome.SKIP, 3)]
    assert score_of(lines) == round(100 * 4 / 6, 1)
    assert score_of([line(Outcome.SKIP)]) is None
    assert score_of([line(Outcome.FAIL, 0), line(Outcome.PASS, 1, 1.0)]) == 100


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.integers(0, 3)), max_size=20))
def test_score_stays_within_its_bounds(pairs: list[tuple[Outcome, int]]) -> None:
    score = score_of([line(outcome, weight, float(outcome is Outcome.PASS)) for outcome, weight in pairs])
    assert score is None or 0 <= score <= 100


@given(st.text())
def test_text_of_a_server_is_made_safe(text: str) -> None:
    """No escape sequence reaches the terminal, and evidence is bounded."""
    shown = clip(text, 50)
    assert len(shown) <= 50
    assert shown.isprintable()


@given(st.text(alphabet="abc ", min_size=1, max_size=5), st.booleans())
def test_a_forced_token_is_recognised(piece: str, strips: bool) -> None:
    text = piece * 6
    assert is_repeated(text[1:] if strips and text.startswith(" ") and piece != " " else text, 6)


@pytest.mark.parametrize("text", ["", "1, 2, 3, 4,", "aaaaab", "abcabd"])
def test_ordinary_text_is_not_taken_for_a_forced_token(text: str) -> None:
    assert not is_repeated(text, 6)


def test_stop_string_comes_from_the_middle_of_a_text() -> None:
    """STP-04."""
    text = "Once upon a time there was a wide river"
    stop, rest = stop_and_rest(text)
    assert rest + stop == text[: len(rest) + len(stop)]
    assert text.index(stop) == len(rest)
    with pytest.raises(CannotJudge):
        stop_and_rest("ababababababab")


@pytest.mark.parametrize(
    ("text", "reason", "outcome"),
    [
        ("Once upon", "stop", Outcome.PASS),
        ("Once upon", "length", Outcome.FAIL),
        ("Once upon a", "stop", Outcome.FAIL),
        ("Once upo", "stop", Outcome.FAIL),
        ("Once upon a time", "stop", Outcome.FAIL),
    ],
)
def test_stop_is_exact(text: str, reason: str, outcome: Outcome) -> None:
    assert judge_stop(text, reason, " a", "Once upon", "Once upon a time").outcome is outcome


@pytest.mark.parametrize(
    ("deltas", "whole", "outcome"),
    [
        (["🎉", "龜"], "🎉龜", Outcome.PASS),
        (["🎉", "�"], "🎉", Outcome.PASS),  # UTF-02: the limit cut the last character
        (["�", "�", "龜"], "🎉龜", Outcome.FAIL),
        (["🎉"], "🎉龜", Outcome.FAIL),
    ],
)
def test_utf8(deltas: list[str], whole: str, outcome: Outcome) -> None:
    """UTF-01."""
    assert judge_utf8(deltas, whole).outcome is outcome


def test_seeds() -> None:
    assert judge_seeds(["a", "a", "b"]).verdict == "honoured"
    assert judge_seeds(["a", "b", "c"]).verdict == "ignored"
    assert judge_seeds(["a", "a", "a"]).outcome is Outcome.SKIP


@pytest.mark.parametrize(
    ("alone", "busy", "after", "dropped", "outcome"),
    [
        (0.1, 1.0, 0.12, 4, Outcome.PASS),
        (0.1, 1.0, 0.9, 4, Outcome.FAIL),
        (0.1, 0.11, 0.1, 4, Outcome.SKIP),
        (0.1, 1.0, 0.1, 0, Outcome.SKIP),
    ],
)
def test_timing(alone: float, busy: float, after: float, dropped: int, outcome: Outcome) -> None:
    assert judge_timing(alone, busy, after, dropped).outcome is outcome


def served(status: int | None, *, retry_after: str | None = None, fault: str = "", body: bytes = b"") -> Reply:
    headers = [("content-type", "application/json")] + ([("retry-after", retry_after)] if retry_after is not None else [])
    return Reply("POST /x", 0.0, status, headers=headers, fault=fault, pieces=[(0.0, body)], ended_at=1.0)


def test_burst() -> None:
    """RAT-08."""
    assert judge_burst([served(200), served(429), served(503)]).outcome is Outcome.PASS
    for bad in (served(500), served(None, fault="cut: x"), served(400)):
        assert judge_burst([served(200), bad]).outcome is Outcome.FAIL
    assert judge_burst([served(503)] * 3).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("value", "outcome"),
    [("1", Outcome.PASS), ("0", Outcome.FAIL), ("1.5", Outcome.FAIL), (None, Outcome.FAIL), ("soon", Outcome.FAIL)],
)
def test_retry_after(value: str | None, outcome: Outcome) -> None:
    """RAT-01."""
    assert judge_retry_after([served(429, retry_after=value, body=b'{"error": {"message": "m"}}')]).outcome is outcome
    assert judge_retry_after([]).outcome is Outcome.SKIP


def test_all_streams_refused_are_no_broken_streams() -> None:
    assert judge_streams([served(429)]).outcome is Outcome.PASS
    assert judge_streams([served(500)]).outcome is Outcome.FAIL


def test_exposition_of_several_servers() -> None:
    """MET-10."""
    text = "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 3\n"
    assert read_exposition(text).gauge("running") == 3
    text = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{e="0"} 2\nvllm:num_requests_running{e="1"} 1\n'
    found = read_exposition(text)
    assert (found.gauge("running"), found.gauge("waiting"), found.find("ttft"), found.faults) == (3, None, None, [])
    assert "NaN" in read_exposition("# TYPE a gauge\na NaN\n").faults[0]


@given(st.text(max_size=80))
def test_no_text_makes_the_exposition_reader_fall(text: str) -> None:
    assert not any(math.isnan(value) for value in read_exposition(text).values.values()) or read_exposition(text).faults


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://h.example/api/v1", "https://h.example/api"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert Target.parse(url).url == shown


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://u:p@x", "http://x/?a=1", "http://x#y", "http://x:99999"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are for people
        Target.parse(url)


def report(evidence: str) -> AuditReport:
    lines = [
        line(Outcome.PASS, 3, 1.0, evidence=evidence),
        line(Outcome.PASS, 2, 0.5, verdict="refused", hint="do it"),
        line(Outcome.FAIL, 0, hint="note"),
        line(Outcome.SKIP),
        line(Outcome.FAIL, 1, hint="mend it", group="Errors"),
    ]
    return AuditReport(
        url="http://x",
        model="m<b>",
        started_at="2026-01-01T00:00:00+00:00",
        seconds=1.5,
        score=score_of(lines),
        passed=2,
        failed=2,
        skipped=1,
        num_requests=7,
        max_requests=300,
        is_quick=False,
        server={"server": "<script>"},
        checks=lines,
    )


def test_the_page_needs_nothing_and_escapes_all() -> None:
    page = render_report(report('<script>alert("x")</script>'))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http://" not in page.replace("http://x", "")
    assert "prefers-color-scheme: dark" in page
    assert "66.7" in page
    assert "mend it" in page


def test_the_terminal_shows_plain_text() -> None:
    out = io.StringIO()
    print_report(report("[red]not markup[/red]"), Console(file=out, width=120, no_color=True))
    text = out.getvalue()
    assert "[red]not markup[/red]" in text
    assert "66.7 of 100 for what was checked: 2 passed, 2 failed, 1 skipped" in text
    for word in ("pass", "half", "note", "skip", "FAIL", "mend it"):
        assert word in text


def test_the_saved_report_has_the_names_that_scripts_use() -> None:
    saved = msgspec.json.decode(msgspec.json.encode(report("seen")))
    assert {"id", "title", "outcome", "evidence", "hint"} <= set(saved["checks"][0])
    assert {entry["outcome"] for entry in saved["checks"]} == {"pass", "fail", "skip"}
    assert isinstance(saved["score"], float)


def test_two_checks_of_one_name_are_a_mistake() -> None:
    async def nothing(session: object) -> None: ...

    add = check("field.seed", "again", Group.FIELDS, weight=1, requests=0, hint="h")
    with pytest.raises(ValueError, match=r"field\.seed"):  # checks.fields has the first one
        add(nothing)  # type: ignore[arg-type]

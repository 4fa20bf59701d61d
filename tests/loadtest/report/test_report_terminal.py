"""The terminal: warnings before tables, and nothing a server says reaches it as a command."""

import io

from rich.console import Console

from headrace.loadtest.report.clean_text import plain, valid_text
from headrace.loadtest.report.model import Report, ReportSection, Verdict, VerdictKind, section_verdicts
from headrace.loadtest.report.terminal import print_report
from tests.loadtest.report.made_up_runs import compare_report, make_client, make_run, result_of, run_report, sweep_report


def printed(report, width=140, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    print_report(report, console)
    return console.file.getvalue()


def test_a_run_shows_problem_then_figures_then_how_to_repeat():
    text = printed(run_report(make_run(num_refused=2, client=make_client(was_bottleneck=True, why="the loop woke 40 ms late"))))
    words = ("PROBLEM", "40 ms late", "WARNING", "Requests offered", "Latency", "Errors by kind", "Repeat with")
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert text.count("40 ms late") == 1


def test_each_kind_of_report_fits_a_narrow_terminal():
    for report in (run_report(make_run()), compare_report(), sweep_report()):
        assert max(map(len, printed(report, width=80).splitlines())) <= 80


def test_control_characters_and_markup_of_a_server_do_nothing():
    label = "evil\x1b[2J\x07[red]x[/red]\u202e"
    run = make_run(num_failed=1, label=label)
    run.requests[-1].error_kind = "[bold]kind\x1b]0;title\x07"
    text = printed(
        Report(kind="run", title=label, command_line=label, sections=[ReportSection(title=label, results=[result_of(run)])])
    )
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x[/red]" in text
    assert "[bold]kind" in text


def test_plain_and_valid_text():
    assert plain("a\tb\nc\x00\u202e\ud800é🙂") == "a b c\ufffd\ufffd\ufffdé🙂"
    assert valid_text("a\ud800b🙂") == "a?b🙂"


def test_alike_warnings_of_many_results_become_one():
    runs = [make_run(f"{n} clients", seed=n) for n in (1, 2, 4)]
    verdicts = section_verdicts(ReportSection(title="s", results=[result_of(run) for run in runs]))
    assert len(verdicts) == 1
    assert verdicts[0].text.startswith("1 clients: ")
    assert "2 clients, 4 clients" in verdicts[0].text


def test_the_loads_own_warnings_and_an_interruption_are_told_once():
    run = make_run(num_requests=400, rate=100.0, num_tokens=4)
    run.warnings = ["the bound on outstanding requests was hit"]
    run.was_interrupted = True
    own = Verdict(VerdictKind.OK, "fine")
    section = ReportSection(title="s", results=[result_of(run)], runs=[run, run], verdicts=[own, own])
    texts = [verdict.text for verdict in section_verdicts(section)]
    assert texts.count("fine") == 1
    assert texts.count("the bound on outstanding requests was hit") == 1
    assert sum("interrupted" in text for text in texts) == 1

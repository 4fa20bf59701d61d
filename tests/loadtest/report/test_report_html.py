"""The page: self-contained, escaped, loud about problems, each figure linked to its definition."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import msgspec
import pytest

from headrace.loadtest.report.files import ReportFileError
from headrace.loadtest.report.html import render_html, save_html
from headrace.loadtest.report.model import Report, ReportSection, Table, Verdict, VerdictKind
from headrace.loadtest.report.page import Html, element, join
from tests.loadtest.report.made_up_runs import compare_report, make_client, make_run, result_of, run_report, sweep_report

EVIL = "<script>alert('x')</script><img src=http://evil/x onerror=y>\x00\x1b[2J\ud83d"


class Reader(HTMLParser):
    """Collects tags, attributes, ids and visible text; checks nesting."""

    VOID = frozenset({"meta", "br", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.open, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("make", [lambda: run_report(make_run(num_failed=1)), sweep_report])
def test_the_page_is_whole_and_needs_nothing_from_elsewhere(make):
    page = Reader(render_html(make()))
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not {"link", "img", "iframe", "object", "embed", "form"} & {tag for tag, _ in page.tags}


def test_the_policy_allows_this_script_only():
    text = render_html(run_report(make_run(num_requests=20)))
    policy = next(attrs["content"] for tag, attrs in Reader(text).tags if attrs.get("http-equiv"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_text_of_a_server_is_never_markup():
    run = make_run(num_requests=20, num_failed=1, label=EVIL, model=EVIL)
    run.server = {EVIL: EVIL}
    run.warnings = [EVIL]
    run.requests[-1].error_kind = EVIL
    result = result_of(run)
    result.groups = {EVIL: result_of(run)}
    result.warnings.append(EVIL)
    table = Table(title=EVIL, header=["", EVIL], rows=[[EVIL, EVIL]], note=EVIL)
    section = ReportSection(
        title=EVIL, intro=EVIL, results=[result, result], runs=[run], tables=[table], verdicts=[Verdict(VerdictKind.INFO, EVIL)]
    )
    text = render_html(Report(kind="compare", title=EVIL, command_line=EVIL, sections=[section, ReportSection(title=EVIL)]))
    page = Reader(text)
    assert text.count("<script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert "<script>alert('x')</script>" in "".join(page.text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    text.encode("utf-8")


def test_problems_stand_first_then_warnings():
    client = make_client(was_bottleneck=True, why="process 1 used 97 % of a core")
    text = render_html(run_report(make_run(client=client, num_refused=3)))
    first = re.search(r'<li class="(\w+)"', text)
    assert first.group(1) == "problem"
    assert text.index("bottleneck") < text.index("3 refused") < text.index('class="tiles"') < text.index("<table")
    assert 'class="problem"' not in render_html(run_report(make_run(num_refused=3)))


def test_many_warnings_are_folded_but_no_problem_is():
    verdicts = [Verdict(VerdictKind.WARNING, f"warning {'x' * n}") for n in range(20)]
    verdicts += [Verdict(VerdictKind.PROBLEM, f"problem {'y' * n}") for n in range(9)]
    text = render_html(Report(kind="sweep", title="t", sections=[ReportSection(title="s", verdicts=verdicts)]))
    folded = text[text.index("<details") :]
    assert "20 more warnings" in folded
    assert 'class="problem"' not in folded
    assert text.count('class="warning"') == 20


def test_figures_link_to_their_definitions():
    page = Reader(render_html(run_report(make_run())))
    assert {"#def-ttft_seconds", "#def-tbt_seconds", "#def-goodput", "#def-send_lag"} <= set(page.links)


def test_both_themes_are_there_and_equal_in_names():
    text = render_html(run_report(make_run(num_requests=20)))
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)
    blocks = [set(re.findall(r"(--\w+):", block)) for block in re.findall(r"color-scheme:(?:light|dark);([^}]*)", style)]
    assert len(blocks) == 3
    assert blocks[0] == blocks[1] == blocks[2]
    assert set(re.findall(r"var\((--\w+)", text)) <= blocks[0]


def test_saved_results_without_records_still_make_a_page():
    report = compare_report()
    bare = msgspec.structs.replace(report, sections=[msgspec.structs.replace(report.sections[0], runs=[])])
    assert "Side by side" in render_html(bare)
    assert render_html(Report(kind="run", title="empty", sections=[]))


def test_elements_escape_what_is_not_markup(tmp_path):
    assert element("p", "a<b", Html("<i>c</i>"), title='"q"') == '<p title="&quot;q&quot;">a&lt;b<i>c</i></p>'
    assert element("p", class_="x", id=None) == '<p class="x"></p>'
    assert isinstance(join("a", "b"), Html)
    with pytest.raises(ReportFileError, match="cannot be written"):
        save_html(Report(kind="run", title="t", sections=[]), tmp_path / "no" / "x.html")

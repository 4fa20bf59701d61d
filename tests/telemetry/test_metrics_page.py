"""docs/metrics.md says what the table of metrics says."""

import importlib.util
import pathlib
import re

import pytest

from headrace.protocol.stalls import StallCause
from headrace.telemetry.catalog import BY_NAME, METRICS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "tools" / "metrics_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tool):
    return tool.PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date(tool, text):
    assert tool.page(text) == text, "docs/metrics.md is stale: run python tools/metrics_page.py"


def test_every_family_stands_in_it_once(text):
    for metric in METRICS:
        assert len(re.findall(rf"^\| `{re.escape(metric.name)}` \|", text, re.MULTILINE)) == 1


def test_every_name_in_its_queries_is_a_family(text):
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for name in re.findall(r"headrace_\w+", block):
            family = name if name in BY_NAME else re.sub(r"_(bucket|sum|count)$", "", name)
            assert family in BY_NAME, name


def test_every_cause_of_a_stall_is_explained(text):
    for cause in StallCause:
        assert re.search(rf"^\| `{cause.value}` \| \w", text, re.MULTILINE)


def test_a_stale_page_is_seen(tool, text, tmp_path, monkeypatch, capsys):
    page = tmp_path / "metrics.md"
    page.write_text(text.replace("histogram (latency)", "histogram"), encoding="utf-8")
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    assert page.read_text(encoding="utf-8") == text
    with pytest.raises(ValueError, match="must stand in the page"):
        tool.page("no place")

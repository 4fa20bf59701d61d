"""`bench report FILE...`."""

import click.testing
import pytest

from headrace.cli.bench_report import report as command
from headrace.loadtest.report.files import save_json
from tests.loadtest.report.made_up_runs import make_run, run_report


def invoke(*arguments):
    return click.testing.CliRunner().invoke(command, [str(argument) for argument in arguments])


@pytest.fixture
def saved(tmp_path):
    paths = [tmp_path / "before.json", tmp_path / "after.json.gz"]
    for seed, path in enumerate(paths):
        save_json(run_report(make_run(seed=seed, num_requests=30)), path)
    return paths


def test_one_file_is_shown_again(saved):
    result = invoke(saved[0])
    assert result.exit_code == 0
    assert "Requests offered" in result.output


def test_two_files_are_compared_and_drawn(saved, tmp_path):
    html, table, requests = tmp_path / "r.html", tmp_path / "r.csv", tmp_path / "q.csv"
    result = invoke(*saved, "--html", html, "--csv", table, "--requests-csv", requests, "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert "<svg" in html.read_text(encoding="utf-8")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 3
    assert len(requests.read_text(encoding="utf-8").splitlines()) == 61
    assert "after / before" in invoke(*saved).output


def test_files_with_the_same_stem_go_by_their_paths(saved, tmp_path):
    other = tmp_path / "other" / "before.json"
    other.parent.mkdir()
    other.write_bytes(saved[0].read_bytes())
    result = invoke(saved[0], other, "--csv", tmp_path / "r.csv", "--quiet")
    assert result.exit_code == 0
    assert str(other) in (tmp_path / "r.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument"),
        (["before.json", "before.json"], 2, "given twice"),
        (["before.json", "--quiet"], 2, "would do nothing"),
        (["broken.json"], 1, "not a whole report"),
        (["before.json", "--html", "no/folder.html"], 1, "cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(saved, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"format": "headrace-bench",', encoding="utf-8")
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output

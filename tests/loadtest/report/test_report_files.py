"""Saved reports: whole, compact, honest about damage, harmless in a spreadsheet."""

import csv
import gzip
import json

import msgspec
import pytest

from headrace.loadtest.figures import summarize
from headrace.loadtest.report import files
from headrace.loadtest.report.files import ReportFileError, load_report
from headrace.loadtest.report.model import Curve, Report, ReportSection
from tests.loadtest.report.made_up_runs import compare_report, make_run, result_of, run_report, sweep_report


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_saved_run_can_be_drawn_and_computed_anew(tmp_path, name):
    report = run_report(make_run(num_refused=2, num_failed=1))
    files.save_json(report, tmp_path / name)
    loaded = load_report(tmp_path / name)
    assert list(loaded.results()) == list(report.results())
    ours, saved = report.sections[0].runs[0], loaded.sections[0].runs[0]
    for before, after in zip(ours.requests, saved.requests, strict=True):
        assert after.chunk_times == pytest.approx(before.chunk_times, abs=6e-7)
        assert (after.outcome, after.error_kind, after.output_tokens) == (
            before.outcome,
            before.error_kind,
            before.output_tokens,
        )
    again, first = summarize(saved), summarize(ours)
    assert again.requests == first.requests
    assert again.tbt_seconds.p99 == pytest.approx(first.tbt_seconds.p99, abs=2e-6)


@pytest.mark.parametrize("make", [compare_report, sweep_report])
def test_studies_survive_saving(tmp_path, make):
    report = make()
    files.save_json(report, tmp_path / "study.json")
    loaded = load_report(tmp_path / "study.json")
    assert msgspec.structs.replace(loaded, sections=[]) == msgspec.structs.replace(report, sections=[])
    for before, after in zip(report.sections, loaded.sections, strict=True):
        assert msgspec.structs.replace(after, runs=[]) == msgspec.structs.replace(before, runs=[])


def test_the_top_of_a_run_holds_what_scripts_rely_on():
    top = files.document(run_report(make_run(num_refused=2)))
    assert (top["format"], top["kind"]) == ("headrace-bench", "run")
    assert set(top["requests"]) == {"offered", "completed", "refused", "failed"}
    assert top["requests"]["refused"] == 2
    assert 0 <= top["goodput"] <= 1
    assert top["output_tokens_per_second"] > 0
    for name in ("ttft_seconds", "tbt_seconds", "tpot_seconds", "e2e_seconds"):
        assert {"mean", "p50", "p90", "p99", "max", "count"} <= set(top[name])
    json.dumps(top, allow_nan=False)


def test_figures_of_a_study_stand_on_top_and_cannot_hide_others():
    assert files.document(sweep_report())["knee_clients"] == 14.0
    with pytest.raises(ValueError, match="kind"):
        files.document(msgspec.structs.replace(sweep_report(), figures={"kind": "x"}))


def test_without_records_the_file_is_small_and_says_so_when_asked_for_them(tmp_path):
    report = run_report(make_run())
    files.save_json(report, tmp_path / "whole.json")
    files.save_json(report, tmp_path / "small.json", with_records=False)
    assert (tmp_path / "small.json").stat().st_size < (tmp_path / "whole.json").stat().st_size / 2
    loaded = load_report(tmp_path / "small.json")
    assert list(loaded.results()) == list(report.results())
    with pytest.raises(ReportFileError, match="no raw records"):
        files.save_requests_csv(loaded, tmp_path / "requests.csv")
    assert not (tmp_path / "requests.csv").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole report"),
        (b"[1, 2]", "not a whole report"),
        (b'{"a": 1}', "not a report of headrace bench"),
        (b'{"format": "headrace-bench", "version": 99}', "version 99"),
        (b'{"format": "headrace-bench", "version": 1, "report": {"kind": "run"', "not a whole report"),
        (b'{"format": "headrace-bench", "version": 1}', "not a whole report"),
        (
            b'{"format": "headrace-bench", "version": 1, "report": {"kind": "dance", "title": "", "sections": []}}',
            "unknown kind",
        ),
        (gzip.compress(b'{"format": "headrace-bench"}')[:-9], "cannot be read"),
        (b"\x1f\x8bnonsense", "cannot be read"),
    ],
)
def test_damaged_or_foreign_files_are_refused_with_the_reason(tmp_path, content, message):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(ReportFileError, match=message):
        load_report(tmp_path / "file.json")


def test_missing_and_unwritable_paths_are_named(tmp_path):
    with pytest.raises(ReportFileError, match=r"gone\.json cannot be read"):
        load_report(tmp_path / "gone.json")
    for save in (files.save_json, files.save_csv, files.save_requests_csv):
        with pytest.raises(ReportFileError, match="cannot be written"):
            save(run_report(make_run(num_requests=12)), tmp_path / "no" / "folder")


def test_numbers_that_are_not_finite_and_lone_surrogates_can_be_saved(tmp_path):
    run = make_run(num_requests=12, num_failed=1)
    run.requests[-1].error_detail = "half a pair \ud83d"
    curve = Curve(title="c", x_label="x", y_label="y", series={"s": [(1.0, 2.0), (2.0, float("nan")), (float("inf"), 1.0)]})
    section = ReportSection(title="t", results=[result_of(run)], runs=[run], curves=[curve])
    files.save_json(Report(kind="run", title="t", sections=[section]), tmp_path / "r.json")
    loaded = load_report(tmp_path / "r.json").sections[0]
    assert loaded.curves[0].series == {"s": [(1.0, 2.0)]}
    assert loaded.runs[0].requests[-1].error_detail == "half a pair ?"


def test_csv_has_a_line_for_each_result(tmp_path):
    report = sweep_report()
    files.save_csv(report, tmp_path / "sweep.csv")
    with (tmp_path / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [result.label for result in report.results()]
    for row, result in zip(rows, report.results(), strict=True):
        assert float(row["ttft_seconds_p99"]) == pytest.approx(result.ttft_seconds.p99, abs=1e-8)
        assert int(row["completed"]) == result.requests.completed
        assert row["ttft_from_due_seconds_p50"] == ""  # closed loop: there is none
        assert row["ttft_from_due_seconds_count"] == "0"


def test_requests_csv_has_a_line_for_each_request_and_no_formulas(tmp_path):
    run = make_run(num_requests=12, num_failed=1)
    run.requests[-1].error_detail = '=HYPERLINK("http://evil")'
    files.save_requests_csv(run_report(run), tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert rows[-1]["error_detail"] == '\'=HYPERLINK("http://evil")'
    first = run.requests[0]
    assert float(rows[0]["ttft_seconds"]) == pytest.approx(first.chunk_times[0] - first.sent, abs=1e-8)
    assert rows[0]["is_measured"] in ("0", "1")

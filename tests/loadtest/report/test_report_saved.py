"""Saved reports side by side: right ratios, no claims beyond the data."""

import copy
import math

import msgspec
import pytest

from headrace.loadtest.report.model import VerdictKind
from headrace.loadtest.report.saved import compare_saved
from tests.loadtest.report.made_up_runs import make_run, run_report, sweep_report


def test_one_report_comes_back_as_it_was():
    report = run_report(make_run())
    assert compare_saved([("a", report)]) is report


def test_ratios_are_to_the_first_and_their_intervals_hold_them():
    before, after = run_report(make_run(seed=1)), run_report(make_run(seed=2, ttft=0.36))
    report = compare_saved([("before", before), ("after", after)])
    assert [result.label for result in report.results()] == ["before", "after"]
    assert {run.label for run in report.sections[0].runs} == {"before", "after"}
    found = {ratio.figure: ratio for ratio in report.sections[0].ratios}
    ttft = found["ttft_seconds/p50"]
    medians = [next(item.results()).ttft_seconds.p50 for item in (before, after)]
    assert ttft.value == pytest.approx(medians[1] / medians[0])
    assert 1 < ttft.low < ttft.value < ttft.high
    assert (ttft.subject, ttft.baseline) == ("after", "before")
    assert found["output_tokens_per_second"].low is None


def test_the_interval_of_a_ratio_adds_errors_in_squares():
    one, other = run_report(make_run(seed=1)), run_report(make_run(seed=1))
    for report, bounds in ((one, (0.1, 0.1 * math.e**0.3)), (other, (0.1, 0.1 * math.e**0.4))):
        next(report.results()).ttft_seconds.ci95["p50"] = bounds
    ratio = compare_saved([("a", one), ("b", other)]).sections[0].ratios[0]
    assert math.log(ratio.high / ratio.low) == pytest.approx(0.5)  # 3, 4, 5


def test_what_else_differed_is_said_and_that_they_were_made_apart():
    report = compare_saved([("a", run_report(make_run())), ("b", run_report(make_run(num_tokens=10, url="http://other")))])
    warnings = [verdict.text for verdict in report.sections[0].verdicts if verdict.kind is VerdictKind.WARNING]
    assert "made apart" in warnings[0]
    assert "output tokens" in warnings[1]
    assert "url" not in warnings[1]
    same = compare_saved([("a", run_report(make_run())), ("b", run_report(make_run()))])
    assert len(same.sections[0].verdicts) == 1


def test_sweeps_share_curves_and_pair_results_by_label():
    one = sweep_report()
    other = copy.deepcopy(one)
    del other.sections[0].results[3]
    section = compare_saved([("one", one), ("other", other)]).sections[0]
    assert len(section.results) == 13
    assert [curve.title for curve in section.curves] == ["Throughput", "TTFT", "TBT (ITL)"]
    assert set(section.curves[0].series) == {"one output tokens/s", "other output tokens/s"}
    assert [mark.label for mark in section.curves[0].marks] == ["knee, one", "knee, other"]
    assert {ratio.subject for ratio in section.ratios} == {f"other {n} clients" for n in (1, 2, 4, 16, 32, 64)}
    assert all(ratio.value == 1 for ratio in section.ratios)


def test_names_must_differ():
    report = run_report(make_run(num_requests=12))
    for reports in ([], [("a", report), ("a", msgspec.structs.replace(report))]):
        with pytest.raises(ValueError, match="different names"):
            compare_saved(reports)

"""Charts: well-formed, in the page's colours, without anything from elsewhere, whatever the data."""

import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from headrace.loadtest.report import charts, svg
from headrace.loadtest.report.figures_on_page import section_charts
from headrace.loadtest.report.model import Curve, Mark, Ratio
from headrace.loadtest.report.palette import COLOURS
from tests.loadtest.report.made_up_runs import compare_report, make_run

SVG = "{http://www.w3.org/2000/svg}"


def checked(text):
    """Parse it; no stand-in colour, foreign address or style sheet is left."""
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text
    assert root.find(f"{SVG}desc").text
    assert not re.search(r"#0101[0-9a-f]{2}", text)
    addresses = set(re.findall(r"https?://[^\"' <)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    return root


def texts(root):
    return ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]


def test_all_charts_of_a_report_are_well_formed_and_share_no_id():
    shown = [chart for section in compare_report().sections for chart in section_charts(section)]
    assert len(shown) >= 5
    ids = [value for chart in shown for node in checked(chart.svg).iter() if (value := node.get("id"))]
    assert len(ids) == len(set(ids))


def test_references_inside_a_chart_resolve():
    text = charts.timeline_chart("t", make_run())
    ids = {node.get("id") for node in checked(text).iter()}
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used
    assert used <= ids


def test_colours_follow_the_theme():
    text = charts.ecdf_chart("t", {"a": np.array([0.1, 0.2]), "b": np.array([0.3])}, "TTFT")
    for name in ("s0", "s1", "muted", "grid"):
        assert f"var(--{name}, {COLOURS[name].light})" in text


def test_drawing_is_repeatable():
    run = make_run()
    assert charts.timeline_chart("t", run) == charts.timeline_chart("t", run)


@pytest.mark.parametrize(
    "label", ["$x_1^2$", "<script>alert(1)</script>", "日本語 🙂", 'id="a" url(#b) font-family: x', "a & b", "_hidden"]
)
def test_labels_are_text(label):
    root = checked(charts.ecdf_chart("t", {label: np.array([0.1, 0.2]), "other": np.array([0.1])}, "TTFT"))
    assert root.find(f".//{SVG}script") is None
    assert label in texts(root)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [0.1], [0.1] * 50, [0.0, 0.0, 5.0], [1e-7, 3e3]])
@pytest.mark.parametrize("draw", [charts.ecdf_chart, charts.tail_chart])
def test_distributions_of_any_samples_are_drawn(draw, values):
    checked(draw("t", {"a": np.array(values), **({"b": np.array([0.02, 0.03])} if len(values) > 2 else {})}, "TTFT"))


def test_ecdf_counts_zeros_and_keeps_the_maximum():
    x, y = charts._ecdf(np.array([0.0] * 60 + list(np.linspace(0.1, 0.2, 40))))
    assert (x[0], y[0]) == (0.1, 0.61)
    assert (x[-1], y[-1]) == (0.2, 1.0)


def test_a_large_run_stays_a_small_chart():
    run = make_run(num_requests=2500, rate=400.0, num_tokens=4, num_failed=40)
    root = checked(charts.timeline_chart("t", run))
    assert sum(1 for _ in root.iter(f"{SVG}path")) < 300
    assert any("1,500 of 2,500" in text for text in texts(root))


def test_a_run_without_requests_is_drawn():
    run = make_run(num_requests=3)
    run.requests = []
    checked(charts.timeline_chart("t", run))


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1.0)], [(0.0, 0.0), (1.0, 0.0)], [(1.0, float("nan")), (2.0, 3.0)], [(1.0, -2.0), (8.0, 4.0)]]
)
@pytest.mark.parametrize("is_log", [False, True])
def test_curves_of_any_points_are_drawn(points, is_log):
    curve = Curve(
        title="c", x_label="clients", y_label="TTFT, seconds", series={"p50": points, "p99": points}, marks=[Mark(1.0, "knee")],
        bands={"p50": [(1.0, 0.5, 1.5), (2.0, 0.5, 2.0)]}, is_x_log=is_log, is_y_log=is_log,
    )  # fmt: skip
    checked(charts.curve_chart(curve))


def test_ratios_without_intervals_or_far_from_one_are_drawn():
    ratios = [
        Ratio(subject="a", baseline="b", figure="ttft_seconds/p50", value=40.0, low=30.0, high=50.0, num_pairs=3),
        Ratio(subject="c", baseline="b", figure="e2e_seconds/p50", value=1.0),
    ]
    checked(charts.ratio_chart("t", ratios))
    checked(charts.ratio_chart("t", ratios[1:]))


def test_a_missing_library_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        svg.ChartsUnavailableError, match=re.escape("install the extra bench (in a checkout: pip install -e '.[bench]')")
    ):
        svg.require_charts()

"""Numbers as text, and tables of results."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.report import tables
from headrace.loadtest.report.model import Ratio
from headrace.loadtest.results import Distribution
from tests.loadtest.report.made_up_runs import make_run, result_of


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_seconds_keep_three_digits(value):
    amount, unit = tables.seconds(value).split(" ")
    shown = float(amount) / (1000 if unit == "ms" else 1)
    assert abs(shown - value) <= max(0.0051 * value, 0.00000501)
    assert len(amount) <= 7


@given(st.floats() | st.none())
def test_no_number_breaks_a_format(value):
    for text in (tables.seconds, tables.number, tables.percent):
        assert text(value) if value is None or math.isfinite(value) else text(value) == "-"


@pytest.mark.parametrize(
    ("share", "shown"), [(1.0, "100 %"), (0.0, "0 %"), (0.99999, "> 99.9 %"), (1e-6, "< 0.1 %"), (0.5, "50.0 %")]
)
def test_percent_never_rounds_to_all_or_nothing(share, shown):
    assert tables.percent(share) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 ms"), (0.00042, "0.42 ms"), (0.0999, "99.9 ms"), (0.09999, "100 ms"), (0.9996, "1.00 s"), (125.0, "125 s")],
)
def test_seconds_at_the_borders_of_units(value, shown):
    assert tables.seconds(value) == shown


def test_interval_shares_its_unit():
    assert tables.interval((0.159, 0.178)) == "159 to 178 ms"
    assert tables.interval((0.9, 1.2)) == "900 ms to 1.20 s"
    assert tables.interval(None) == ""


def test_a_percentile_with_few_samples_is_starred():
    few, many = Distribution(count=199, p99=0.1), Distribution(count=200, p99=0.1)
    assert (tables.percentile(few, "p99"), tables.percentile(many, "p99")) == ("100 ms*", "100 ms")
    assert tables.percentile(Distribution(count=0), "p99") == "-"


def test_tables_have_a_cell_for_each_column():
    results = [result_of(make_run(name, seed=place)) for place, name in enumerate("abc")]
    figure_tables = [
        tables.latency_table(results[0]),
        *(make(results) for make in (tables.totals_table, tables.side_by_side_table, tables.client_table)),
    ]
    for table in [item.plain() for item in figure_tables] + [tables.overview_table(results), tables.settings_table(results)]:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_errors_of_many_results_are_added_up():
    results = [result_of(make_run(f"{place}", seed=place, num_refused=2)) for place in range(6)]
    table = tables.error_table(results)
    assert table.header == ["", "all", "the first"]
    assert table.rows == [["http_503", "12", ""]]
    results[1].first_errors = {"http_503": "The queue is full."}
    assert tables.error_table(results[:2]).rows == [["http_503", "2", "2", "The queue is full."]]
    assert tables.error_table([result_of(make_run())]) is None


def test_settings_name_what_differs_only():
    one, other = (result_of(make_run(prompt_tokens=count)) for count in (128, 256))
    assert tables.differing_settings([one, other]) == ["prompt_tokens"]
    names = [row[0] for row in tables.settings_table([one, other]).rows]
    assert "prompt tokens" in names
    assert "length scale" not in names


def ratio(value, low=None, high=None, is_lower_better=True, num_pairs=9):
    return Ratio(
        subject="a", baseline="b", figure="ttft_seconds/p50", value=value, low=low, high=high, num_pairs=num_pairs,
        is_lower_better=is_lower_better,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "reading"),
    [
        (ratio(0.8, 0.7, 0.9), "a is better"),
        (ratio(0.8, 0.7, 1.0), "no clear difference"),
        (ratio(1.2, 1.1, 1.3), "a is worse"),
        (ratio(1.2, 1.1, 1.3, is_lower_better=False), "a is better"),
        (ratio(0.8, 0.7, 0.9, is_lower_better=False), "a is worse"),
        (ratio(0.1), "no interval: nothing can be said"),
        (ratio(0.8, 0.7, 0.9, num_pairs=0), "a looks better"),
    ],
)
def test_a_win_is_claimed_only_when_the_interval_excludes_one(found, reading):
    assert tables.ratio_meaning(found) == reading

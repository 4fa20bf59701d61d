"""Reading /metrics."""

import pytest

from headrace.monitor import exposition
from headrace.monitor.exposition import ExpositionError, read_exposition
from headrace.monitor.percentiles import Distribution
from tests.monitor.expositions import histogram

TEXT = """# TYPE headrace_stalls counter
headrace_stalls_total{cause="prefill",model_name="m"} 3
headrace_stalls_total{cause="no_slot",model_name="m"} 4
headrace_stalls_total{cause="prefill",model_name="n"} 5
# TYPE headrace_odd gauge
headrace_odd NaN
headrace_odd{cause="x"} +Inf
"""


def test_sums_over_all_labels_and_by_one() -> None:
    found = read_exposition(TEXT)
    assert found.total("headrace_stalls_total") == 12
    assert found.by_label("headrace_stalls_total", "cause") == {"prefill": 8, "no_slot": 4}
    assert found.by_label("headrace_stalls_total", "class") == {}


def test_what_is_absent_or_no_number_is_not_known() -> None:
    found = read_exposition(TEXT)
    assert found.total("headrace_nothing") is None
    assert found.total("headrace_odd") is None
    assert found.by_label("headrace_odd", "cause") == {}
    assert found.distribution("headrace_nothing") is None


def test_histograms_by_a_label_and_over_all() -> None:
    one = histogram("h", {"0.1": 2, "+Inf": 3}, 1.5, 'class="a"')
    other = "\n".join(histogram("h", {"0.1": 1, "+Inf": 1}, 0.5, 'class="b"').splitlines()[1:])
    found = read_exposition(one + other + "\n")
    assert found.distribution("h") == Distribution((0.1,), (3.0, 1.0), 2.0)
    assert found.distributions("h", "class") == {
        "a": Distribution((0.1,), (2.0, 1.0), 1.5),
        "b": Distribution((0.1,), (1.0, 0.0), 0.5),
    }


@pytest.mark.parametrize("text", ['a{b="c" 1\n', "a b c d\n", "a{} x\n", '# TYPE a wrong\na 1\na{"} 3'])
def test_what_does_not_parse_says_so(text: str) -> None:
    with pytest.raises(ExpositionError, match="do not parse"):
        read_exposition(text)


def test_lines_are_bounded_in_number_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the parser sees them: its time grows with the square of a line of quotes."""
    monkeypatch.setattr(exposition, "MAX_LINES", 3)
    monkeypatch.setattr(exposition, "MAX_LINE_CHARS", 20)
    monkeypatch.setattr(exposition, "text_string_to_metric_families", lambda text: parsed.append(text) or ())
    parsed: list[str] = []
    allowed = ("a 1\nb 1\nc 1\n", "a" * 20)
    for text in allowed:
        read_exposition(text)
    with pytest.raises(ExpositionError, match="more than 3 lines"):
        read_exposition("a 1\n\n# \nd 1\n")
    with pytest.raises(ExpositionError, match="more than 20 characters"):
        read_exposition("a 1\n" + "b" * 21)
    assert parsed == list(allowed)

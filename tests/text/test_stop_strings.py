from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


def _naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule, on the whole text: first complete, then longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def _run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include_stop)
    shown, stop = [], None
    for piece in pieces:
        update = matcher.push(piece)
        shown.append(update.text)
        stop = update.stop
    return [*shown, matcher.finish()], stop


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=10), include_stop=st.booleans())
def test_any_split_gives_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int], include_stop: bool) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    shown, stop = _run(pieces, stops, include_stop)
    assert ("".join(shown), stop) == _naive(text, stops, include_stop)


@given(text=LETTERS, stops=STOPS)
def test_only_what_could_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    seen = shown = ""
    for character in text:
        seen += character
        update = matcher.push(character)
        if update.stop is not None:
            return
        shown += update.text
        held = max(
            (n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) and n < len(s) for s in stops)),
            default=0,
        )
        assert shown == seen[: len(seen) - held]


def test_stp_01_nothing_of_a_long_stop_string_is_shown() -> None:
    shown, stop = _run([*"1, 2, 3, 4, 5, 6, 7, 8"], ["5, 6, 7"])
    assert (stop, "".join(shown)) == ("5, 6, 7", "1, 2, 3, 4, ")


def test_stp_02_a_marker_spelled_out_is_never_visible() -> None:
    shown, stop = _run(["Hi.", "<", "|im", "_e", "nd|", ">", "\n"], ["<|im_end|>"])
    assert stop == "<|im_end|>"
    assert shown == ["Hi.", "", "", "", "", "", "", ""]


def test_stp_04_cut_at_the_exact_character() -> None:
    shown, stop = _run(["The ", "quickest", " fox"], ["quic"])
    assert ("".join(shown), stop) == ("The ", "quic")
    shown, stop = _run(["The ", "quickest", " fox"], ["quic"], include_stop=True)
    assert ("".join(shown), stop) == ("The quic", "quic")


def test_stp_05_a_stop_string_that_begins_in_the_piece_before() -> None:
    shown, stop = _run(["<a>", "<b>", "c"], ["><"])
    assert (shown, stop) == (["<a", "", "", ""], "><")


def test_stp_08_a_stop_string_that_never_comes_changes_nothing() -> None:
    pieces = ["aab", "aa", "ab", "aab", "aa"]
    shown, stop = _run(pieces, ["aabaaab!"])
    assert ("".join(shown), stop) == ("".join(pieces), None)


@pytest.mark.parametrize("stop", ["。", "🎉", "é", "e\u0301"])
def test_stp_10_code_points_only_without_normalization(stop: str) -> None:
    shown, found = _run([*f"你好{stop}x"], [stop])
    assert ("".join(shown), found) == ("你好", stop)
    other = {"é": "e\u0301", "e\u0301": "é"}.get(stop)
    if other:
        shown, found = _run([f"a{other}b"], [stop])
        assert ("".join(shown), found) == (f"a{other}b", None)


def test_the_stop_string_complete_first_wins_and_the_longest_there() -> None:
    assert _run(["xabcd"], ["abcd", "bc"]) == (["xa", ""], "bc")
    assert _run(["xabcd"], ["bc", "abc"]) == (["x", ""], "abc")


def test_nothing_after_the_stop_string() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.finish() == ""


def test_no_stop_strings_pass_a_text_through() -> None:
    matcher = StopStringMatcher(())
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""


def test_stp_07_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])

"""Frames as lines."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from headrace.monitor.frame import frame_of
from headrace.monitor.model import ClassLoad, Frame
from headrace.monitor.render import History, draw
from headrace.monitor.scrape import Scrape
from headrace.monitor.wording import bar, number, percent, plain, seconds, spark
from tests.monitor.expositions import histogram, live, report, scrape, stall
from tests.monitor.test_frame import EARLIER, LATER

EVIL = "\x1b[2J\x9b31m\u202eevil\r\n\x07"


def full_frame(num_requests: int = 40) -> Frame:
    reports = [report(f"request-{index}", 1000.0 + index, stalls=[stall("prefill", 300.0)]) for index in range(num_requests)]
    reports.append(report("stuck", 9e6, state="preempted", waiting_for="preempted", tenant="acme"))
    latencies = ""
    for name in ("headrace_time_to_first_token_seconds", "headrace_inter_token_latency_seconds"):
        parts = [histogram(name, {"0.1": 9, "+Inf": 9}, 0.5, f'class="{each}"') for each in ("batch", "interactive")]
        latencies += parts[0] + "\n".join(parts[1].splitlines()[1:]) + "\n"
    earlier, later = scrape(EARLIER), scrape(LATER + latencies, 2.0, model="sim", version="1.0", requests=live(*reports))
    return frame_of("http://127.0.0.1:8000", earlier, later, 100)


def lines_of(frame: Frame, width: int, height: int | None = None, history: History | None = None) -> list[str]:
    return draw(frame, history or History(), width, height).plain.split("\n")


def test_all_that_is_known_is_shown() -> None:
    text = "\n".join(lines_of(full_frame(), 120))
    for part in ("READY", "worker restarts 2", "output 200 tok/s", "75 %", "stop 3/s", "blocked by no_slot", "43 %", "acme"):
        assert part in text
    for part in (
        "prefill 2 (1.25 s)",
        "batch 2 + 7",
        "event ring 25 %",
        "12 us",
        "preempted",
        "(prefill 300 ms)",
        "2h30m",
    ):
        assert part in text


def test_80_by_24_keeps_what_matters() -> None:
    lines = lines_of(full_frame(), 80, 24)
    assert len(lines) == 24
    assert lines[-1].strip()
    starts = [line.split()[0] for line in lines if line.strip()]
    for title in ("READY", "tokens", "requests", "TTFT", "TBT", "TPOT", "queue", "batch", "step", "KV", "stalls", "stuck"):
        assert title in starts
    assert any(line.startswith("stuck") and line.endswith("preempted") for line in lines)


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 50))
def test_nothing_is_wider_or_higher_than_the_screen(width: int, height: int, num_requests: int) -> None:
    lines = lines_of(full_frame(num_requests), width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)


def test_a_server_with_very_many_names_is_drawn_at_once() -> None:
    """A line is made as far as the screen reaches; longer ones would take minutes."""
    ended = {f"reason {number}": 1.0 for number in range(100_000)}
    frame = full_frame()
    frame = msgspec.structs.replace(frame, throughput=msgspec.structs.replace(frame.throughput, finished_per_second=ended))
    assert "reason 0 1/s" in lines_of(frame, 80)[4]


def test_less_important_lines_go_first_and_the_order_stays() -> None:
    everything = lines_of(full_frame(), 100)
    for height in range(1, len(everything)):
        kept = iter(everything)
        assert all(line in kept for line in lines_of(full_frame(), 100, height))


@given(st.text(max_size=40))
def test_no_text_of_a_server_reaches_the_terminal_as_control(text: str) -> None:
    look = scrape(
        "",
        is_ready=False,
        reason=text,
        model=text,
        version=text,
        requests=live(report(text, tenant=text, state=text, service_class=text, waiting_for=text, stalls=[stall(text, 1.0)])),
    )
    shown = draw(frame_of("http://x", None, look, 5), History(), 100).plain
    assert not any((ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 for char in shown)
    assert shown.count("\n") == draw(
        frame_of("http://x", None, scrape("", requests=live(report())), 5), History(), 100
    ).plain.count("\n")


def test_label_values_and_errors_are_escaped_too() -> None:
    frame = full_frame()
    assert frame.stalls is not None
    evil = frame.__class__(
        unix_seconds=0.0,
        window_seconds=1.0,
        server=frame.server,
        metrics_error=EVIL,
        batch=frame.batch.__class__(blocked_by=[EVIL], classes={EVIL: ClassLoad()}, stage_shares={EVIL: 1.0}),
        throughput=frame.throughput.__class__(finished_per_second={EVIL: 1.0}),
        gateway=frame.gateway.__class__(ring_fill={EVIL: 0.0}),
        stalls={EVIL: frame.stalls["prefill"]},
        requests=frame.requests.__class__(error=EVIL),
    )
    shown = draw(evil, History(), 400).plain
    assert shown.count("\\x1b[2J\\x9b31m\\u202eevil\\r\\n\\x07") == 8
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_a_server_that_is_gone() -> None:
    frame = frame_of("http://x", None, Scrape(0.0, 0.0, error="Connection refused"), 5)
    lines = lines_of(frame, 80)
    assert lines[1] == "NOT REACHABLE, retrying   Connection refused"
    assert "stalls    -" in lines
    assert "no answer for 7 s" in draw(frame, History(), 80, None, 7.0).plain


def test_history_is_drawn_once_there_are_two_frames() -> None:
    history, frame = History(), full_frame()
    history.note(frame)
    assert "█" not in lines_of(frame, 100, None, history)[3]
    for _ in range(100):
        history.note(frame)
    assert lines_of(frame, 100, None, history)[3].count("█") == 30


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.000012, "12 us"),
        (0.00123, "1.23 ms"),
        (0.0456, "45.6 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (59.7, "1m00s"),
        (125.0, "2m05s"),
        (11220.0, "3h07m"),
    ],
)
def test_durations(value: float | None, words: str) -> None:
    assert seconds(value) == words


def test_numbers_shares_bars_and_sparks() -> None:
    assert [number(value) for value in (None, 0, 0.25, 4.2, 12.0, 99.96, 1204.4)] == [
        "-",
        "0",
        "0.25",
        "4.20",
        "12",
        "100",
        "1,204",
    ]
    assert [percent(value) for value in (None, 0.0, 0.004, 0.43, 1.0)] == ["-", "0 %", "0.4 %", "43 %", "100 %"]
    assert [bar(value, 4) for value in (None, 0.5, 1.0, 7.0)] == ["░░░░", "██░░", "████", "████"]
    assert spark([0.0, None, 5.0, 10.0]) == "▁ ▅█"
    assert spark([0.0, 0.0]) == "▁▁"


def test_plain_text_stays_as_it_is() -> None:
    assert plain("Grüße 北京 a-b_c") == "Grüße 北京 a-b_c"
    assert plain("a\nb") == "a\\nb"
    assert len(plain("x" * 1000)) == 300

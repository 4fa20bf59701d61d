"""The journal: its ring, its one line per request, and listeners whose faults fail nothing."""

import json

import pytest

from headrace.protocol.stalls import Stall, StallCause
from headrace.telemetry import logs
from headrace.telemetry.journal import Journal
from headrace.telemetry.meters import GatewayMeters
from tests.telemetry.identities import identity

MS = 1_000_000
SECRET = "a private question"


class Listener:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def on_accepted(self, identity, arrival_ns, prompt_token_ids, deadline_ns, cache_salt):
        self.told.append(("accepted", identity.request_id, arrival_ns, list(prompt_token_ids), deadline_ns, cache_salt))

    def on_refused(self, identity, arrival_ns, prompt_token_ids, error_code, cache_salt):
        self.told.append(("refused", identity.request_id, arrival_ns, list(prompt_token_ids), error_code, cache_salt))

    def on_finished(self, snapshot):
        self.told.append(("finished", snapshot.identity.request_id, snapshot.finished_reason))


class Broken:
    """Raises whatever it is told."""

    def on_accepted(self, *_):
        raise RuntimeError("broken")

    on_refused = on_finished = on_accepted


@pytest.fixture
def meters():
    return GatewayMeters()


@pytest.fixture
def lines(capsys):
    """Makes this process log JSON at a level; the lines so far, when called."""
    form = logs._form
    logs.configure_logging("json", "info")
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logs._configure(form)


def run(meters, number, reason="stop", end_ns=50 * MS, error_code=""):
    timeline = meters.start_request(identity(9, request_id=number), 10 * MS)
    timeline.start(12 * MS)
    timeline.count_tokens(3, 20 * MS)
    timeline.end(reason, end_ns, error_code=error_code)
    return timeline


def test_the_ring_keeps_the_last_ones_newest_first(meters):
    journal = Journal(meters.faults, capacity=3)
    for number in range(5):
        journal.finished(run(meters, number))
    assert [snapshot.identity.request_id for snapshot in journal.recent(10)] == [4, 3, 2]
    assert [snapshot.identity.request_id for snapshot in journal.recent(1)] == [4]


def test_a_slow_reader_is_added_to_a_request_that_has_ended(meters):
    journal = Journal(meters.faults)
    timeline = run(meters, 1)
    journal.finished(timeline)
    timeline.note_stalls((Stall(StallCause.SLOW_READER, 20 * MS, 900 * MS),))
    (snapshot,) = journal.recent(1)
    assert (snapshot.num_stalls, snapshot.stalls[0].cause) == (1, StallCause.SLOW_READER)


def test_one_line_for_each_request_without_any_text(meters, lines):
    journal = Journal(meters.faults)
    timeline = run(meters, 5, "error", error_code="worker_lost")
    timeline.note_stalls((Stall(StallCause.NO_SLOT, 10 * MS, 300 * MS), Stall(StallCause.PREFILL, 20 * MS, 400 * MS)))
    journal.finished(timeline)
    (line,) = lines()
    del line["timestamp"]
    assert line == {
        "event": "request finished",
        "level": "info",
        "component": "request",
        "request_id": "client-5",
        "number": 5,
        "choice": 0,
        "api": "/v1/completions",
        "service_class": "standard",
        "tenant": "default",
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "output_tokens": 3,
        "queue_ms": 2.0,
        "ttft_ms": 10.0,
        "total_ms": 40.0,
        "finish_reason": "error",
        "error_code": "worker_lost",
        "num_preemptions": 0,
        "num_stalls": 2,
        "longest_stall": "prefill",
        "longest_stall_ms": 400.0,
    }


def test_the_prompt_is_in_the_line_only_when_it_is_given(meters, lines):
    journal = Journal(meters.faults)
    journal.finished(run(meters, 1))
    journal.finished(run(meters, 2), prompt_text=SECRET)
    journal.finished(run(meters, 3), prompt_text="x" * 100_000)
    without, given, long = lines()
    assert "prompt_text" not in without
    assert given["prompt_text"] == SECRET
    assert len(long["prompt_text"]) < 3000


def test_refusals_are_told_and_logged_at_debug(meters, lines):
    listener = Listener()
    journal = Journal(meters.faults, listeners=[listener])
    journal.refused(identity(request_id=0), 5, [1, 2], "overloaded", "salt")
    assert lines() == []
    logs.set_level("debug")
    journal.refused(identity(request_id=0), 6, [1, 2], "draining", "")
    (line,) = lines()
    assert (line["event"], line["error_code"]) == ("request refused", "draining")
    assert listener.told == [
        ("refused", 0, 5, [1, 2], "overloaded", "salt"),
        ("refused", 0, 6, [1, 2], "draining", ""),
    ]


def test_met_08_a_listener_that_fails_is_counted_and_the_others_are_told(meters, capsys):
    listener = Listener()
    journal = Journal(meters.faults, listeners=[Broken(), listener])
    journal.accepted(identity(request_id=1), 3, [7], 99, "")
    journal.finished(run(meters, 1))
    journal.refused(identity(request_id=0), 4, [8], "overloaded", "")
    assert [told[0] for told in listener.told] == ["accepted", "finished", "refused"]
    assert listener.told[0] == ("accepted", 1, 3, [7], 99, "")
    assert meters.faults.counter.value == 3
    assert len(journal.recent(5)) == 1
    assert "Broken" in "".join(capsys.readouterr())


def test_met_08_a_log_that_cannot_be_written_fails_nothing(meters, monkeypatch):
    listener = Listener()
    journal = Journal(meters.faults, listeners=[listener])

    def broken(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("headrace.telemetry.journal.log.info", broken, raising=False)
    journal.finished(run(meters, 1))
    assert listener.told == [("finished", 1, "stop")]
    assert meters.faults.counter.value == 1


def test_on_a_terminal_the_line_tells_only_what_happened(capsys, meters):
    form = logs._form
    logs.configure_logging("human", "info")
    try:
        Journal(meters.faults).finished(run(meters, 5))
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        logs._configure(form)
    told = {word.partition("=")[0] for word in line.split() if "=" in word}
    assert not told & {"error_code", "longest_stall", "longest_stall_ms", "num_stalls", "num_preemptions"}
    assert {"request_id", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "finish_reason"} <= told
    assert "None" not in line

"""Control sockets: framing at every split, a peer that is gone, one that does not read, one that talks nonsense."""

import itertools
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc.control import MAX_LINE_BYTES, ControlEnd, ControlError
from headrace.protocol.control import ChildFailed, ChildReady, Drain, Stop, WorkerExited, WorkerStarted

MESSAGES = [
    WorkerStarted(1, 1234),
    WorkerExited(1, "killed by signal 9\n(out of memory?)", 0.5, gives_up=True),
    Drain(30.0),
    Stop(),
    ChildReady("http://127.0.0.1:8000"),
    ChildFailed("port 8000 is in use; choose another with --port: ünïcode"),
]


@pytest.fixture
def ends():
    first, second = ControlEnd.pair()
    with first, second:
        yield first, second


@pytest.fixture
def raw_end():
    """A raw socket joined to a ControlEnd."""
    raw, other = socket.socketpair()
    with raw, ControlEnd(other) as end:
        yield raw, end


def test_every_message_goes_both_ways(ends):
    for sender, receiver in (ends, ends[::-1]):
        assert receiver.receive_nowait() == []
        assert receiver.wait_message(0) is False
        for message in MESSAGES:
            assert sender.send(message) is True
        assert receiver.wait_message(60) is True
        assert receiver.receive_nowait() == MESSAGES
        assert not receiver.closed


@given(st.lists(st.sampled_from(MESSAGES), max_size=5), st.lists(st.integers(0, 400), max_size=8))
def test_lines_may_arrive_in_any_pieces(messages, cuts):
    sender, tap = socket.socketpair()
    with ControlEnd(sender) as end, tap:
        for message in messages:
            end.send(message)
        data = tap.recv(1 << 16) if messages else b""
    raw, other = socket.socketpair()
    received = []
    with ControlEnd(other) as end:
        borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, stop in itertools.pairwise(borders):
            raw.sendall(data[start:stop])
            received += end.receive_nowait()
        raw.close()
        received += end.receive_nowait()
        assert received == messages
        assert end.closed


def test_a_peer_that_is_gone_is_seen_and_its_last_words_are_read(ends):
    supervisor, child = ends
    child.send(ChildFailed("no model"))
    child.close()
    assert supervisor.send(Stop()) is False
    assert not supervisor.closed, "not before its last words were read"
    assert supervisor.wait_message(60) is True
    assert supervisor.receive_nowait() == [ChildFailed("no model")]
    assert supervisor.closed
    assert supervisor.receive_nowait() == []
    assert supervisor.send(Stop()) is False
    assert supervisor.wait_message(0) is True


def test_half_a_message_of_a_peer_that_died_is_none(raw_end):
    raw, end = raw_end
    raw.sendall(b'{"type":"sto')
    raw.close()
    assert end.receive_nowait() == []
    assert end.closed


@pytest.mark.parametrize("line", [b"", b"{}", b'{"type":"unknown"}', b"\xff\xfe", b'{"type":"drain"}', b"[" * 10_000])
def test_nonsense_is_an_error_in_its_turn_and_skipped(raw_end, line):
    raw, end = raw_end
    raw.sendall(b'{"type":"stop"}\n' + line + b'\n{"type":"stop"}\n')
    assert end.receive_nowait() == [Stop()]
    assert end.wait_message(0) is True
    with pytest.raises(ControlError, match="no control message"):
        end.receive_nowait()
    assert end.receive_nowait() == [Stop()]
    assert not end.closed


def test_a_line_without_an_end_is_bounded(raw_end):
    raw, end = raw_end
    raw.setblocking(False)

    def feed():
        for _ in range(100):
            raw.send(b"x" * 4096)
            assert end.receive_nowait() == []

    with pytest.raises(ControlError, match="more than"):
        feed()


def test_a_peer_that_does_not_read_is_an_error_in_the_end_and_nothing_is_cut_in_half(ends):
    sender, receiver = ends
    message = ChildReady("x" * 10_000)
    num_sent = 0

    def send_on():
        nonlocal num_sent
        while num_sent < 10_000:
            assert sender.send(message)
            num_sent += 1

    with pytest.raises(ControlError, match="does not read"):
        send_on()
    assert sender.has_unsent
    received = []
    while sender.has_unsent:
        received += receiver.receive_nowait()
        assert sender.flush()
    received += receiver.receive_nowait()
    assert received == [message] * num_sent


def test_a_message_that_is_too_long_is_refused(ends):
    with pytest.raises(ControlError, match="too long"):
        ends[0].send(ChildReady("x" * MAX_LINE_BYTES))


def test_a_child_takes_its_end_by_number():
    first, second = socket.socketpair()
    second.set_inheritable(True)
    with ControlEnd(first) as supervisor, ControlEnd.from_fd(second.detach()) as child:
        assert not os.get_inheritable(child.fileno())
        supervisor.send(Drain(1.5))
        assert child.receive_nowait() == [Drain(1.5)]

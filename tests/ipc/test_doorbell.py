"""The doorbell, as an eventfd where there is one and as a pipe."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from headrace.ipc.doorbell import Doorbell, timeout_ms

KINDS = [pytest.param(Doorbell.create, id="default"), pytest.param(Doorbell._create_pipe, id="pipe")]


@pytest.fixture(params=KINDS)
def bell(request):
    bell = request.param()
    yield bell
    bell.close()


def test_rings_until_cleared(bell):
    assert not bell.wait(0)
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert bell.wait(60)
    bell.clear()
    assert not bell.wait(0)
    bell.clear()
    bell.ring()
    assert bell.wait(60)


def test_a_full_bell_takes_another_ring_and_clears_at_once(bell):
    if bell.fds[0] == bell.fds[1]:
        os.eventfd_write(bell.fileno(), 2**64 - 2)
    else:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(bell.fds[1], b"x" * 4096)
    bell.ring()
    assert bell.wait(0)
    bell.clear()
    assert not bell.wait(0)


def test_ringing_after_the_reader_died():
    bell = Doorbell._create_pipe()
    read_fd, write_fd = bell.fds
    os.close(read_fd)
    bell.ring()
    os.close(write_fd)


def test_short_waits_are_rounded_up_and_long_ones_bounded():
    """A wait of 0.1 ms that became 0 would be a busy loop."""
    assert timeout_ms(0.0001) == 1
    assert timeout_ms(0) == timeout_ms(-1) == 0
    assert timeout_ms(float("inf")) == 3_600_000


def test_closing_twice(bell):
    bell.close()
    bell.close()


CHILD = """
import sys
from headrace.ipc.doorbell import Doorbell
bell = Doorbell.from_fds((int(sys.argv[1]), int(sys.argv[2])))
assert not any(__import__("os").get_inheritable(fd) for fd in bell.fds)
bell.ring()
"""


@pytest.mark.slow
def test_a_child_rings_the_bell_that_it_inherited(bell):
    arguments = [sys.executable, "-c", CHILD, *map(str, bell.fds)]
    child = subprocess.Popen(arguments, pass_fds=bell.fds)
    assert bell.wait(30)
    assert child.wait(30) == 0


@pytest.mark.slow
def test_waiting_uses_no_processor_time(bell):
    ringer = threading.Timer(0.5, bell.ring)
    started, cpu_started = time.monotonic(), time.thread_time()
    ringer.start()
    assert bell.wait(30)
    cpu_seconds, seconds = time.thread_time() - cpu_started, time.monotonic() - started
    ringer.join()
    assert seconds > 0.4
    assert cpu_seconds < 0.02

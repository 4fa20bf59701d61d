"""The status page: whole snapshots, whoever dies when."""

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ipc import status as status_module
from headrace.ipc.segment import Segment, new_instance
from headrace.ipc.status import StatusPage, StatusPageError
from tests.ipc.opcodes import dies_at

NAMES = ("epoch", "pid", "num_running")


def page_of(names=NAMES):
    buffer = bytearray(StatusPage.size_bytes(names))
    return buffer, StatusPage.create(buffer, names)


def test_a_new_page_reads_zeros():
    _, page = page_of()
    assert page.read() == dict.fromkeys(NAMES, 0)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5), min_size=1, max_size=5), st.booleans())
def test_the_last_write_is_read_by_every_reader(rows, one):
    names = ("a",) if one else tuple("abcde")
    buffer, page = page_of(names)
    reader = StatusPage.attach(buffer, names)
    for row in rows:
        values = dict(zip("abcde", row, strict=True))
        page.write(values)
        assert reader.read() == {name: values[name] for name in names}


def test_faults_of_the_writer_are_errors_and_leave_the_page_whole():
    _, page = page_of()
    values = dict.fromkeys(NAMES, 5)
    page.write(values)
    with pytest.raises(KeyError):
        page.write({"epoch": 1})
    with pytest.raises(status_module.struct.error):
        page.write({**values, "pid": 2**63})
    assert page.read() == values


def test_attaching_needs_the_same_fields():
    buffer, page = page_of()
    assert StatusPage.attach(buffer, NAMES).names == NAMES
    for other in (("epoch", "pid", "num_waiting"), ("pid", "epoch", "num_running"), NAMES[:2]):
        with pytest.raises(StatusPageError):
            StatusPage.attach(buffer, other)
    with pytest.raises(StatusPageError):
        StatusPage.attach(bytearray(10_000), NAMES)
    with pytest.raises(StatusPageError):
        StatusPage.attach(bytearray(10), NAMES)
    page.close()
    page.close()


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_names_that_make_no_page(names):
    with pytest.raises(ValueError, match="names"):
        StatusPage.create(bytearray(1000), names)


def test_a_buffer_that_is_too_small():
    with pytest.raises(ValueError, match="need"):
        StatusPage.create(bytearray(100), NAMES)


def test_a_writer_that_dies_at_any_instruction_leaves_a_whole_page():
    old, new, newer = (dict.fromkeys(NAMES, value) for value in (1, 2, 3))
    seen = set()
    opcode_number, killed = 0, True
    while killed:
        buffer, page = page_of()
        page.write(old)
        killed = dies_at(status_module, opcode_number, lambda page=page: page.write(new))
        reader = StatusPage.attach(buffer, NAMES)
        values = reader.read()
        assert values in (old, new)
        seen.add(values["pid"])
        StatusPage.attach(buffer, NAMES).write(newer)
        assert reader.read() == newer
        opcode_number += 1
    assert seen == {1, 2}
    assert opcode_number > 20


def test_bytes_that_are_not_there_yet_are_not_read():
    buffer, page = page_of()
    page.write(dict.fromkeys(NAMES, 5))
    buffer[-128 + 8] ^= 1
    with pytest.raises(StatusPageError, match="looks"):
        page.read()


WRITER = """
import sys
from headrace.ipc.segment import Segment
from headrace.ipc.status import StatusPage
names = tuple(f"field_{number}" for number in range(60))
page = StatusPage.attach(Segment.attach(sys.argv[1]).buffer, names)
value = 0
while True:
    value += 1
    page.write(dict.fromkeys(names, value))
"""


@pytest.mark.slow
def test_readers_see_no_mixture_while_another_process_writes():
    names = tuple(f"field_{number}" for number in range(60))
    segment = Segment.create("status", StatusPage.size_bytes(names), instance=new_instance())
    writer = None
    try:
        page = StatusPage.create(segment.buffer, names)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, segment.name])
        last, num_changes = 0, 0
        end = time.monotonic() + 20
        while num_changes < 1000 and time.monotonic() < end:
            values = set(page.read().values())
            assert len(values) == 1
            (value,) = values
            assert value >= last
            num_changes += value != last
            last = value
            os.sched_yield()
        assert num_changes == 1000
    finally:
        if writer is not None:
            writer.kill()
            writer.wait()
        segment.unlink()

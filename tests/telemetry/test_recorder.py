"""The recorder: whole lines whatever happens to disk and process, bounded, and prompts that nobody can guess."""

import asyncio
import errno
import json
import os
import pathlib
import tempfile

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import RecordHeader, RecordLine, RecordStep, RecordTarget
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.recorder import FLUSH_BYTES, FLUSH_NS, GatewayRecording, PromptHasher, Recorder, create_record
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot, TimelineStamps

START_NS = 1_000_000_000_000
HEADER = RecordHeader(
    started_unix=1.75e9,
    started_monotonic_ns=START_NS,
    model="m",
    classes=["interactive", "standard", "batch"],
    num_tenants=2,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=2048,
)


class Clock:
    def __init__(self):
        self.ns = START_NS

    def __call__(self):
        return self.ns


def step(number, **changes):
    fields = {
        "at_us": number, "epoch": 1, "duration_us": 5, "forward_us": 4, "sample_us": 1, "decode_rows": 1, "prefill_rows": 0,
        "prefill_tokens": 0, "context_tokens": 9, "running": 1, "waiting": 0,
    }  # fmt: skip
    return RecordStep(**(fields | changes))


@pytest.fixture
def target(tmp_path):
    return create_record(tmp_path / "record.jsonl", HEADER)


def text_of(target):
    return pathlib.Path(target.path).read_text(encoding="utf-8")


def lines_of(target):
    return [msgspec.json.decode(line, type=RecordLine) for line in text_of(target).splitlines() if line.strip()]


def test_a_record_begins_with_its_header_for_its_owner_alone(target):
    assert lines_of(target) == [HEADER]
    assert os.stat(target.path).st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(target.salt)) == 16
    assert target.salt not in text_of(target)
    assert target.started_monotonic_ns == START_NS


def test_what_is_there_is_never_overwritten(tmp_path, target):
    before = text_of(target)
    with pytest.raises(ConfigurationError, match=r"not empty.*another file"):
        create_record(target.path, HEADER)
    assert text_of(target) == before
    empty = tmp_path / "empty"
    empty.touch()
    assert create_record(empty, HEADER).salt != target.salt


@pytest.mark.parametrize("place", ["nowhere/record", "."])
def test_what_cannot_be_created_is_said(tmp_path, place):
    with pytest.raises(ConfigurationError, match="cannot be created"):
        create_record(tmp_path / place, HEADER)
    with pytest.raises(ConfigurationError, match="no regular file"):
        create_record("/dev/null", HEADER)


def test_a_relative_path_holds_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert create_record("r.jsonl", HEADER).path == str(tmp_path / "r.jsonl")


def test_lines_wait_for_half_a_second_and_no_longer(target):
    clock = Clock()
    recorder = Recorder(target, clock)
    recorder.write(step(1))
    clock.ns += FLUSH_NS - 1
    recorder.write(step(2))
    recorder.flush_due(clock.ns)
    assert len(lines_of(target)) == 1
    assert recorder.num_lines == 0
    recorder.flush_due(clock.ns + 1)
    assert lines_of(target)[1:] == [step(1), step(2)]
    recorder.write(step(3))  # the half second is that of the first line that waits
    clock.ns += FLUSH_NS
    recorder.write(step(4))
    assert lines_of(target)[1:] == [step(number) for number in (1, 2, 3, 4)]
    assert (recorder.num_lines, recorder.num_drops) == (4, 0)


def test_many_lines_go_out_by_one_write_of_whole_lines(target, monkeypatch):
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: written.append(bytes(data)) or write(descriptor, data))
    recorder = Recorder(target, Clock())
    for number in range(2000):
        recorder.write(step(number))
    recorder.close()
    assert all(data.startswith(b"{") and data.endswith(b"}\n") for data in written)
    assert all(FLUSH_BYTES <= len(data) < FLUSH_BYTES + 300 for data in written[:-1])
    assert len(written) > 2
    assert lines_of(target)[1:] == [step(number) for number in range(2000)]


def test_close_writes_what_waits_and_later_lines_are_counted(target):
    recorder = Recorder(target, Clock())
    recorder.write(step(1))
    recorder.close()
    recorder.close()
    assert lines_of(target)[1:] == [step(1)]
    recorder.write(step(2))
    recorder.flush_due(START_NS + FLUSH_NS)
    assert (recorder.is_open, recorder.num_lines, recorder.num_drops) == (False, 1, 1)


def test_a_file_that_is_gone_costs_lines_and_nothing_else(tmp_path):
    recorder = Recorder(RecordTarget(str(tmp_path / "gone"), "00" * 16, START_NS, 1 << 20))
    recorder.write(step(1))
    recorder.close()
    assert (recorder.num_lines, recorder.num_drops) == (0, 1)
    assert not (tmp_path / "gone").exists()


def test_the_full_size_ends_the_recording_with_whole_lines(target):
    limited = msgspec.structs.replace(target, max_bytes=2000)
    first, second = Recorder(limited, Clock()), Recorder(limited, Clock())
    for number in range(100):
        recorder = first if number % 2 else second
        recorder.write(step(number))
        recorder.flush()
    size = os.stat(target.path).st_size
    assert 1600 < size <= 2000
    assert not first.is_open
    assert not second.is_open
    assert first.num_lines + second.num_lines == len(lines_of(target)) - 1
    assert first.num_lines + first.num_drops + second.num_lines + second.num_drops == 100


def lines_of_whole(target):
    """The lines after the header, without one that is cut."""
    return [line for line in text_of(target).splitlines()[1:] if line.endswith("}")]


LINE_BYTES = len(msgspec.json.encode(step(1)))


@given(st.integers(0, 1200), st.integers(1, 6))
@example(0, 3)
@example(LINE_BYTES - 1, 3)
@example(LINE_BYTES, 3)
@example(2 * LINE_BYTES + 1, 3)
def test_what_is_in_the_file_when_a_write_is_cut_counts_as_written(num_bytes, num_lines):
    """Also when no more than the end of the last line is missing."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        target = create_record(pathlib.Path(folder) / "record.jsonl", HEADER)
        recorder = Recorder(target, Clock())
        for number in range(num_lines):
            recorder.write(step(number))
        write, room = os.write, [num_bytes]

        def nearly_full(descriptor, data):
            if descriptor < 3:
                return write(descriptor, data)
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            num_written = write(descriptor, bytes(data)[: room[0]])
            room[0] -= num_written
            return num_written

        patch.setattr(os, "write", nearly_full)
        recorder.close()
        patch.undo()
        num_whole = len(lines_of_whole(target))
        assert (recorder.num_lines, recorder.num_drops) == (num_whole, num_lines - num_whole)


def test_a_full_disk_ends_the_recording_and_is_logged_once(target, monkeypatch, capsys):
    write = os.write
    room = [400]

    def nearly_full(descriptor, data):
        if descriptor < 3:
            return write(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_bytes = min(room[0], len(data))
        room[0] -= num_bytes
        return write(descriptor, bytes(data[:num_bytes]))

    monkeypatch.setattr(os, "write", nearly_full)
    recorder = Recorder(target, Clock())
    for number in range(10):
        recorder.write(step(number))
        if number == 0:
            recorder.flush()
    recorder.flush()
    recorder.write(step(10))
    recorder.flush()
    num_whole = len(lines_of_whole(target))
    assert num_whole == 2
    assert (recorder.num_lines, recorder.num_drops) == (num_whole, 11 - num_whole)
    assert capsys.readouterr().err.count("cannot be written") == 1
    # The disk has room again: another process goes on, on a line of its own.
    monkeypatch.undo()
    other = Recorder(target, Clock())
    other.write(step(77))
    other.close()
    lines = text_of(target).split("\n")
    assert json.loads(lines[-2]) == json.loads(msgspec.json.encode(step(77)))
    assert not lines[-3].endswith("}")


# Hashes.

token_lists = st.lists(st.integers(0, 200_000), max_size=200)


@given(token_lists, token_lists, st.integers(1, 40), st.sampled_from(["", "a", "salt"]))
def test_equal_beginnings_and_nothing_else_have_equal_hashes(first, second, block_tokens, cache_salt):
    hasher = PromptHasher("07" * 16, block_tokens)
    common = first[: len(first) // 2]
    one, other = hasher.hashes(common + first, cache_salt), hasher.hashes(common + second, cache_salt)
    assert len(one) == (len(common) + len(first)) // block_tokens
    assert all(0 <= value < 2**53 for value in one)
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        end = (place + 1) * block_tokens
        assert (left == right) == ((common + first)[:end] == (common + second)[:end])


@given(st.lists(st.integers(0, 9), min_size=64, max_size=99), st.text(max_size=3), st.text(max_size=3))
def test_another_salt_gives_hashes_that_say_nothing_of_each_other(tokens, cache_salt, other_cache_salt):
    hasher = PromptHasher("07" * 16, 32)
    mine = hasher.hashes(tokens, cache_salt)
    assert not set(mine) & set(PromptHasher("08" * 16, 32).hashes(tokens, cache_salt))
    if cache_salt != other_cache_salt:
        assert not set(mine) & set(hasher.hashes(tokens, other_cache_salt))


# The listener.


def identity(number, **changes):
    fields = {
        "request_id": number, "client_request_id": "chat-17", "choice_index": 0, "api": "/v1/completions", "model": "m",
        "service_class": "batch", "tenant": "other", "priority": -3, "num_prompt_tokens": 70, "max_tokens": 9,
    }  # fmt: skip
    return RequestIdentity(**(fields | changes))


def finished(number, *, first_token_ns=30_000_000, num_tokens=5):
    at = START_NS + 2_000_000_000
    stamps = TimelineStamps(
        received_ns=at,
        tokenized_ns=at + 1_000_000,
        queued_ns=at + 2_000_000,
        first_scheduled_ns=at + 10_000_000,
        first_token_ns=at + first_token_ns if first_token_ns else 0,
        last_token_ns=at + first_token_ns + 50_000_000,
        end_ns=at + 90_000_000,
    )
    return TimelineSnapshot(identity(number), stamps, "finished", "length", "", num_tokens, 32, 1, (), 0)


def test_an_arrival_and_an_end_say_what_a_replay_needs(target):
    recording = GatewayRecording(target, TrafficPolicy(), gateway=3, first_request_id=3 << 40, clock_ns=Clock())
    prompt = list(range(70))
    recording.on_accepted(identity((3 << 40) + 6), START_NS + 2_000_000_000, prompt, START_NS + 5_000_000_000, "")
    recording.on_finished(finished((3 << 40) + 6))
    recording.on_refused(identity(0), START_NS + 2_500_000_000, prompt, "overloaded", "mine")
    recording.close()
    arrival, end, refused = lines_of(target)[1:]
    assert msgspec.structs.asdict(arrival) == {
        "at_us": 2_000_000, "id": 7, "gateway": 3, "class_index": 2, "tenant_index": 1, "priority": -3, "prompt_tokens": 70,
        "max_tokens": 9, "timeout_us": 3_000_000, "refused": "", "blocks": PromptHasher(target.salt, 32).hashes(prompt),
    }  # fmt: skip
    assert msgspec.structs.asdict(end) == {
        "at_us": 2_090_000, "id": 7, "gateway": 3, "output_tokens": 5, "cached_tokens": 32, "preemptions": 1,
        "reason": "length", "queue_us": 10_000, "ttft_us": 30_000, "last_token_us": 80_000,
    }  # fmt: skip
    assert (refused.id, refused.refused, refused.timeout_us) == (0, "overloaded", 0)
    assert len(refused.blocks) == 2
    assert not set(refused.blocks) & set(arrival.blocks)


def test_what_did_not_happen_is_minus_one(target):
    recording = GatewayRecording(target, TrafficPolicy(), gateway=1, first_request_id=0, clock_ns=Clock())
    recording.on_finished(finished(0, first_token_ns=0, num_tokens=0))
    recording.close()
    end = lines_of(target)[1]
    assert (end.ttft_us, end.last_token_us, end.output_tokens) == (-1, -1, 0)


def test_nothing_of_a_text_or_a_name_is_in_a_record(target):
    """Class and tenant are numbers, and no token, no id of the client's is there."""
    recording = GatewayRecording(target, TrafficPolicy(), gateway=1, first_request_id=0, clock_ns=Clock())
    recording.on_accepted(identity(0), START_NS, [123_456] * 70, 0, "hidden-salt")
    recording.on_finished(finished(0))
    recording.close()
    text = text_of(target)
    for word in ("chat-17", "hidden", "123456", "other", "completions"):
        assert word not in text


def test_an_idle_gateway_writes_what_waits(target):
    async def idle():
        loop = asyncio.get_running_loop()
        clock = Clock()
        timers = []
        recording = GatewayRecording(target, TrafficPolicy(), gateway=1, first_request_id=0, clock_ns=clock)

        class Loop:
            def call_later(self, seconds, callback, *arguments):
                timers.append((seconds, callback, arguments))
                return loop.call_later(3600, lambda: None)

        recording.start(Loop())
        recording.on_finished(finished(0))
        clock.ns += FLUSH_NS
        seconds, callback, arguments = timers.pop()
        assert seconds == FLUSH_NS / 1e9
        callback(*arguments)
        assert len(lines_of(target)) == 2
        assert len(timers) == 1  # and again
        recording.close()
        assert not recording.recorder.is_open

    asyncio.run(idle())


def test_a_recording_that_ended_makes_no_hashes(target, monkeypatch):
    recording = GatewayRecording(target, TrafficPolicy(), gateway=1, first_request_id=0)
    recording.close()
    monkeypatch.setattr(PromptHasher, "hashes", lambda *_: pytest.fail("hashed in vain"))
    recording.on_accepted(identity(0), START_NS, [1] * 70, 0, "")
    assert recording.recorder.num_drops == 1

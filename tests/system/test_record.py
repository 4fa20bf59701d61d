"""Recording with real processes: what a load tool sent stands in the record, and the record sends it again."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from harness import Server, serving
from headrace.loadtest.record_file import read_record
from headrace.loadtest.records import Outcome, Run
from headrace.loadtest.report.files import load_report
from headrace.loadtest.traces import read_trace
from headrace.protocol.record import RecordArrival, RecordEnd, RecordHeader, RecordLine, RecordStep, RecordTarget, RecordWorker
from headrace.telemetry.recorder import create_record

pytestmark = pytest.mark.slow
FLAGS = ("--model", "sim:step_ms=4", "--served-model-name", "sim", "--max-num-seqs", "16")


def bench(server: Server, report: pathlib.Path, *options: str) -> Run:
    command = [sys.executable, "-m", "headrace", "bench", "run", "--url", server.url, "--quiet", "--json", str(report)]
    subprocess.run([*command, *options], check=True, timeout=100)
    (run,) = load_report(report).sections[0].runs
    return run


def by_kind(path: pathlib.Path) -> dict[type, list[Any]]:
    reader = read_record(path)
    lines = list(reader)
    assert reader.num_cut_lines == 0
    found: dict[type, list[Any]] = {RecordArrival: [], RecordEnd: [], RecordStep: [], RecordWorker: [], RecordHeader: []}
    for line in lines:
        found[type(line)].append(line)
    return found


def test_a_recorded_load_can_be_sent_again(tmp_path: pathlib.Path) -> None:
    first_path, second_path = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with serving(*FLAGS, "--record", str(first_path), quiet=False) as server:
        sent = bench(
            server, tmp_path / "first.json",
            "--rate", "15", "--duration", "6", "--workload", "fixed:150,20", "--shared-prefix-tokens", "96",
        )  # fmt: skip
    assert {record.outcome for record in sent.requests} == {Outcome.COMPLETED}
    found = by_kind(first_path)
    num_asked_before = len(found[RecordArrival]) - len(sent.requests)  # the tool's own small requests
    arrivals = sorted(found[RecordArrival], key=lambda line: line.at_us)[num_asked_before:]
    check_record(sent, found, arrivals)

    # The same load, from the record alone.
    entries = list(read_trace(first_path))
    with serving(*FLAGS, "--record", str(second_path), quiet=False) as server:
        again = bench(server, tmp_path / "second.json", "--workload", f"trace:{first_path}", "--arrival", "trace")
    assert {record.outcome for record in again.requests} == {Outcome.COMPLETED}
    assert len(again.requests) == len(entries)
    requests = sorted(again.requests, key=lambda record: record.index)
    assert [record.output_tokens for record in requests] == [entry.output_tokens for entry in entries]
    assert [record.scheduled for record in requests] == pytest.approx([entry.at for entry in entries], abs=1e-6)
    for record, entry in zip(requests, entries, strict=True):
        assert record.prompt_tokens == pytest.approx(entry.prompt_tokens, abs=2 + 0.05 * entry.prompt_tokens)

    # And it was the same on the server's side: times between arrivals, and what prompts shared.
    repeated = by_kind(second_path)
    later = sorted(repeated[RecordArrival], key=lambda line: line.at_us)[-len(entries) :]
    offsets = [(line.at_us - later[0].at_us) / 1e6 - entry.at for line, entry in zip(later, entries, strict=True)]
    offsets.sort()
    assert abs(offsets[len(offsets) // 2]) < 0.05  # a busy machine may send single ones late
    shared = later[-len(arrivals) :]
    assert {line.blocks[0] for line in shared} == {shared[0].blocks[0]}
    assert all(len({line.blocks[place] for line in shared}) == len(shared) for place in (3, -1))
    assert not {block for line in shared for block in line.blocks} & {block for line in arrivals for block in line.blocks}


def check_record(sent: Run, found: dict[type, list[Any]], arrivals: list[RecordArrival]) -> None:
    """What the server wrote down against what the load tool knows."""
    (header,) = found[RecordHeader]
    assert (header.model, header.max_num_seqs, header.block_tokens) == ("sim", 16, 32)
    assert [line.epoch for line in found[RecordWorker]] == [1]
    assert len(arrivals) == len(sent.requests)
    records = sorted(sent.requests, key=lambda record: record.sent)
    assert sorted(line.prompt_tokens for line in arrivals) == sorted(record.prompt_tokens or 0 for record in records)
    assert {line.max_tokens for line in arrivals} == {20}
    ends = {(line.gateway, line.id): line for line in found[RecordEnd]}
    assert len(ends) == len(found[RecordEnd]) == len(found[RecordArrival])
    assert {(line.gateway, line.id) for line in found[RecordArrival]} == ends.keys()
    for line in arrivals:
        end = ends[line.gateway, line.id]
        assert (end.output_tokens, end.reason, end.preemptions) == (20, "length", 0)
        assert 0 <= end.queue_us <= end.ttft_us <= end.last_token_us <= end.at_us - line.at_us
        assert len(line.blocks) == line.prompt_tokens // header.block_tokens
    assert {line.blocks[0] for line in arrivals} == {arrivals[0].blocks[0]}  # 96 shared tokens: all of the first block
    assert len({line.blocks[-1] for line in arrivals}) == len(arrivals)
    assert any(ends[line.gateway, line.id].cached_tokens for line in arrivals)
    # Times are those of the clock that the tool has as well: arrivals come as it sent them.
    sent_gaps = [later.sent - earlier.sent for earlier, later in itertools.pairwise(records)]
    seen_gaps = [(later.at_us - earlier.at_us) / 1e6 for earlier, later in itertools.pairwise(arrivals)]
    faults = sorted(abs(seen - wanted) for seen, wanted in zip(seen_gaps, sent_gaps, strict=True))
    assert faults[len(faults) // 2] < 0.01
    # Every token that was computed was computed in a step that is written down.
    steps = found[RecordStep]
    prompt_tokens = sum(line.prompt_tokens - ends[line.gateway, line.id].cached_tokens for line in found[RecordArrival])
    output_tokens = sum(line.output_tokens - 1 for line in found[RecordEnd])  # the last one is never computed itself
    assert sum(step.decode_rows + step.prefill_tokens for step in steps) == prompt_tokens + output_tokens
    assert all(0 <= step.forward_us + step.sample_us <= step.duration_us for step in steps)
    assert all(step.context_tokens >= step.decode_rows + step.prefill_tokens for step in steps)


def test_a_record_goes_on_when_the_worker_dies_and_when_requests_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.jsonl"
    flags = ("--model", "sim:step_ms=20", "--served-model-name", "sim", "--max-num-seqs", "2", "--max-queued-requests", "2")
    with serving(*flags, "--record", str(path), quiet=False) as server:
        bench(server, tmp_path / "crowd.json", "--clients", "32", "--requests", "64", "--workload", "fixed:20,40")
        victim = server.worker
        os.kill(victim.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not server.metrics()["headrace_worker_restarts_total"]:  # until it has heard, it calls itself ready
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.wait_ready(30)
        bench(server, tmp_path / "after.json", "--clients", "1", "--requests", "2", "--workload", "fixed:20,10")
    found = by_kind(path)
    assert sorted(line.epoch for line in found[RecordWorker]) == [1, 2]
    assert {line.epoch for line in found[RecordStep]} == {1, 2}
    refused = [line for line in found[RecordArrival] if line.refused]
    assert refused
    assert all(line.id == 0 for line in refused)
    assert all(line.prompt_tokens > 0 for line in refused)
    accepted = {(line.gateway, line.id) for line in found[RecordArrival] if not line.refused}
    assert accepted == {(line.gateway, line.id) for line in found[RecordEnd]}
    entries = list(read_trace(path))
    assert len(entries) == len(found[RecordArrival])
    assert all(entry.output_tokens <= 40 for entry in entries)


def test_a_server_does_not_start_on_a_record_that_exists(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text("{}\n")
    command = [sys.executable, "-m", "headrace", "serve", *FLAGS, "--port", "0", "--record", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "not empty" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert path.read_text() == "{}\n"


WRITER = """
import sys, msgspec
from headrace.protocol.record import RecordStep, RecordTarget
from headrace.telemetry.recorder import Recorder
recorder = Recorder(msgspec.json.decode(sys.argv[1], type=RecordTarget))
print("ready", flush=True)
sys.stdin.readline()
for number in range(5000):
    recorder.write(RecordStep(at_us=number, epoch=int(sys.argv[2]), duration_us=5, forward_us=4, sample_us=1, decode_rows=1,
        prefill_rows=0, prefill_tokens=0, context_tokens=9, running=1, waiting=0))
    if number % 7 == 0:
        recorder.flush()
recorder.close()
"""


@pytest.fixture
def target(tmp_path: pathlib.Path) -> RecordTarget:
    header = RecordHeader(
        started_unix=0.0, started_monotonic_ns=time.monotonic_ns(), model="m", classes=["a"], num_tenants=2, max_num_seqs=1,
        max_num_batched_tokens=1, max_model_len=2,
    )  # fmt: skip
    return create_record(tmp_path / "record.jsonl", header)


def start_writer(target: RecordTarget, epoch: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", WRITER, msgspec.json.encode(target).decode(), str(epoch)]
    writer = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    return writer


def begin(writer: "subprocess.Popen[str]") -> None:
    assert writer.stdin is not None
    writer.stdin.write("\n")
    writer.stdin.close()


def test_lines_of_two_processes_never_mix(target: RecordTarget) -> None:
    writers = [start_writer(target, epoch) for epoch in (1, 2)]
    for writer in writers:
        begin(writer)
    assert [writer.wait(60) for writer in writers] == [0, 0]
    lines: list[RecordLine] = list(read_record(pathlib.Path(target.path)))
    steps = [line for line in lines if isinstance(line, RecordStep)]
    for epoch in (1, 2):
        assert [line.at_us for line in steps if line.epoch == epoch] == list(range(5000))
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()


def test_kill_9_of_a_writer_costs_no_line_that_was_written_and_none_of_another(target: RecordTarget) -> None:
    killed = start_writer(target, 1)
    begin(killed)
    path = pathlib.Path(target.path)
    while path.stat().st_size < 20_000:
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    other = start_writer(target, 2)
    begin(other)
    assert other.wait(60) == 0
    reader = read_record(path)
    steps = [line for line in reader if isinstance(line, RecordStep)]
    assert reader.num_cut_lines <= 1
    numbers = [line.at_us for line in steps if line.epoch == 1]
    assert numbers == list(range(len(numbers)))
    assert [line.at_us for line in steps if line.epoch == 2] == list(range(5000))
    for writer in (killed, other):
        assert writer.stdout is not None
        writer.stdout.close()

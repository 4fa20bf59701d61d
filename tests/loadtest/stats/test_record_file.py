"""A server's record as lines and as a trace: damage is named, cut lines are counted, what is unknown is as documented."""

import gzip
import json

import msgspec
import pytest

from headrace.loadtest.record_file import REORDER_US, read_record
from headrace.loadtest.records import RunSettings
from headrace.loadtest.request_drafts import WorkloadError
from headrace.loadtest.traces import TraceError, read_trace
from headrace.loadtest.workloads import make_plan
from headrace.protocol.record import RecordArrival, RecordEnd, RecordHeader, RecordStep, RecordWorker

HEADER = RecordHeader(
    started_unix=1.75e9,
    started_monotonic_ns=5,
    model="m",
    classes=["interactive", "batch"],
    num_tenants=2,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_model_len=2048,
)
STEP = RecordStep(
    at_us=4, epoch=1, duration_us=5, forward_us=4, sample_us=1, decode_rows=1, prefill_rows=0, prefill_tokens=0,
    context_tokens=9, running=1, waiting=0,
)  # fmt: skip


def arrival(number, at_us, **changes):
    fields = {
        "at_us": at_us, "id": number, "gateway": 1, "class_index": 0, "tenant_index": 1, "priority": 0, "prompt_tokens": 70,
        "max_tokens": 100, "blocks": [11, 12],
    }  # fmt: skip
    return RecordArrival(**(fields | changes))


def end(number, output_tokens, reason="length", **changes):
    fields = {
        "at_us": 9, "id": number, "gateway": 1, "output_tokens": output_tokens, "cached_tokens": 0, "preemptions": 0,
        "reason": reason, "queue_us": 1, "ttft_us": 2,
    }  # fmt: skip
    return RecordEnd(**(fields | changes))


@pytest.fixture
def written(tmp_path):
    def write(*lines, name="record.jsonl", header=HEADER):
        path = tmp_path / name
        data = b"".join(
            (line if isinstance(line, bytes) else msgspec.json.encode(line)) + b"\n" for line in (header, *lines) if line
        )
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
def test_lines_come_back_as_they_were_written(written, name):
    lines = [RecordWorker(at_us=1, epoch=1, num_blocks=9, block_size=16), arrival(1, 3), STEP, end(1, 7)]
    reader = read_record(written(*lines, name=name))
    assert list(reader) == [HEADER, *lines]
    assert reader.num_cut_lines == 0


def test_cut_lines_are_counted_and_passed_over(written):
    whole = msgspec.json.encode(STEP)
    path = written(STEP, whole[:30], b"", STEP)
    with path.open("ab") as file:
        file.write(whole[:50])
    reader = read_record(path)
    assert list(reader) == [HEADER, STEP, STEP]
    assert reader.num_cut_lines == 2


def test_fields_of_a_later_program_are_passed_over(written):
    line = json.loads(msgspec.json.encode(STEP)) | {"new": [1]}
    header = json.loads(msgspec.json.encode(HEADER)) | {"new": {"a": 1}}
    path = written(json.dumps(line).encode(), header=json.dumps(header).encode())
    assert list(read_record(path)) == [HEADER, STEP]


@pytest.mark.parametrize(
    ("lines", "header", "told"),
    [
        ([b'{"type":"later","at_us":1}'], HEADER, "line 2: no line of a record.*later"),
        ([STEP, b'{"type":"step","at_us":"soon"}'], HEADER, "line 3"),
        ([STEP, b"x}"], HEADER, "line 3"),
        ([HEADER], HEADER, "line 2: a second header"),
        ([], msgspec.structs.replace(HEADER, version=2), "version 2; version 1 can be read"),
        ([], b'{"type":"header","format":"headrace-record","version":1}', "line 1.*started_unix"),
        ([], STEP, "not the header"),
        ([], b'{"type":"header"', "line 1"),
        ([], b"", "line 1"),
    ],
)
def test_what_is_no_record_is_named(written, lines, header, told):
    with pytest.raises(TraceError, match=told):
        list(read_record(written(*lines, header=header)))


def test_a_missing_or_damaged_file_is_named(written, tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        list(read_record(tmp_path / "nowhere"))
    path = written(*[STEP] * 100, name="cut.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match=r"cut\.gz"):
        list(read_record(path))


def test_requests_become_entries_in_order_of_time(written):
    path = written(
        arrival(2, 3_500_000, class_index=1, prompt_tokens=40, blocks=[11], priority=4),
        arrival(1, 3_000_000),
        STEP,
        end(2, 9),
        end(1, 7, "stop"),
    )
    first, second = read_trace(path)
    assert msgspec.structs.asdict(first) == {
        "at": 0.0, "prompt_tokens": 70, "output_tokens": 7, "part_ids": (11, 12), "group": "interactive", "part_tokens": 32,
        "service_class": "interactive", "tenant": "tenant1", "priority": 0,
    }  # fmt: skip
    assert (second.at, second.output_tokens, second.part_ids, second.group, second.priority) == (0.5, 9, (11,), "batch", 4)


def test_answers_of_unknown_length_are_as_long_as_those_of_their_class(written):
    path = written(
        arrival(1, 0),
        arrival(2, 1, class_index=1),
        arrival(0, 2, refused="overloaded"),
        arrival(3, 3, max_tokens=15),  # never ends
        arrival(4, 4),  # ended by the server before its time
        arrival(5, 5),  # ended by its client
        arrival(6, 6),  # ended by the server late
        arrival(0, 7, class_index=1, refused="overloaded"),
        arrival(7, 8),
        end(1, 10, "stop"),
        end(2, 60),
        end(4, 5, "error"),
        end(5, 3, "abort"),
        end(6, 90, "deadline"),
        end(7, 40),
    )
    mean = 25  # of the requests 1 and 7, which the model ended
    wanted = [10, 60, mean, 15, mean, 3, 90, 60, 40]
    assert [entry.output_tokens for entry in read_trace(path)] == wanted


def test_without_any_known_length_the_limit_counts(written):
    assert [entry.output_tokens for entry in read_trace(written(arrival(1, 0), arrival(0, 5, refused="x", max_tokens=8)))] == [
        100,
        8,
    ]


def test_requests_of_two_lives_of_the_gateway_are_told_apart(written):
    path = written(arrival(1, 0), end(1, 4), arrival(1, 50, gateway=2), end(1, 6, gateway=2))
    assert [entry.output_tokens for entry in read_trace(path)] == [4, 6]


def test_an_answer_of_no_token_asks_for_one(written):
    assert [entry.output_tokens for entry in read_trace(written(arrival(1, 0), end(1, 0, "abort")))] == [1]


def test_times_never_go_back_however_late_a_line_stands(written):
    late = arrival(3, 1_000)
    path = written(arrival(1, 0), arrival(2, 20), arrival(4, REORDER_US + 5_000_000), late, arrival(5, 3 * REORDER_US))
    times = [entry.at for entry in read_trace(path)]
    assert times == sorted(times)
    assert len(times) == 5


def test_a_class_that_the_header_lacks_is_damage(written):
    with pytest.raises(TraceError, match="class 2"):
        list(read_trace(written(arrival(1, 0, class_index=2))))


def plan(path, **changes):
    wanted = {"url": "http://h", "model": "m", "workload": f"trace:{path}", "arrival": "trace"} | changes
    return list(make_plan(RunSettings(**wanted)).requests)


def test_a_replay_shares_what_was_shared_and_keeps_the_times(written):
    path = written(
        arrival(1, 0, prompt_tokens=70, blocks=[11, 12]),
        arrival(2, 250_000, prompt_tokens=80, blocks=[11, 13]),
        arrival(3, 500_000, prompt_tokens=31, blocks=[], class_index=1),
        *(end(number, 5) for number in (1, 2, 3)),
    )
    requests = plan(path)
    words = [request.body["prompt"].split(" ") for request in requests]
    assert [len(item) for item in words] == [70, 80, 31]
    assert words[0][:32] == words[1][:32]
    assert words[0][32:64] != words[1][32:64]
    assert [request.due for request in requests] == [0.0, 0.25, 0.5]
    assert [request.body["max_tokens"] for request in requests] == [5, 5, 5]
    assert [request.group for request in requests] == ["interactive", "interactive", "batch"]
    assert [request.headers for request in requests] == [{}, {}, {}]


def test_classes_tenants_and_priority_are_sent_when_asked(written):
    path = written(arrival(1, 0, priority=-2), arrival(2, 1, class_index=1, tenant_index=0), end(1, 5), end(2, 5))
    first, second = plan(path, extra={"class_headers": "1"})
    assert first.headers == {"x-headrace-class": "interactive", "x-headrace-tenant": "tenant1"}
    assert second.headers == {"x-headrace-class": "batch", "x-headrace-tenant": "tenant0"}
    assert (first.body["priority"], "priority" in second.body) == (-2, False)


def test_classes_of_a_trace_that_has_none_cannot_be_sent(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n')
    with pytest.raises(WorkloadError, match="knows no classes"):
        plan(path, extra={"class_headers": "1"})

"""Recorded traces: times, lengths and what prompts share; damage is named with its line."""

import gzip
import json

import pytest

from headrace.loadtest.traces import TraceError, parse_timestamp, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    {"timestamp": 3000, "input_length": 800, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 900, "output_length": 8, "hash_ids": [0, 4]},
    {"timestamp": 6000, "input_length": 10, "output_length": 9, "hash_ids": [5]},
    {"timestamp": 6000, "input_length": 11, "output_length": 9, "hash_ids": [6]},
]


@pytest.fixture
def written(tmp_path):
    def write(content, name="trace"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def mooncake_text(lines=MOONCAKE):
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_azure_times_begin_at_zero_and_empty_answers_become_one_token(written):
    entries = list(read_trace(written(AZURE)))
    assert [entry.at for entry in entries] == pytest.approx([0.0, 0.052, 0.052])
    assert [(entry.prompt_tokens, entry.output_tokens) for entry in entries] == [(4808, 10), (3180, 8), (110, 1)]


def test_a_later_azure_format_with_a_zone_and_gzip_is_read(written):
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    text = f"{head}2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 00:00:01+00:00,3,4\r\n"
    entries = list(read_trace(written(gzip.compress(text.encode()), "trace.csv.gz")))
    assert [(round(entry.at, 6), entry.prompt_tokens) for entry in entries] == [(0.0, 2162), (0.99007, 3)]


def test_mooncake_ticks_are_strewn_up_to_the_next_one_in_order(written):
    """Ten requests of one tick would otherwise come at once, and none for three seconds."""
    path = written(mooncake_text())
    entries = list(read_trace(path))
    times = [entry.at for entry in entries]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 3.0 <= times[1] < times[2] < times[3] < 6.0
    assert 6.0 <= times[4] < times[5] < 9.0
    assert [entry.part_ids for entry in entries][:2] == [(0, 1), (0, 2)]
    assert entries == list(read_trace(path))
    assert entries != list(read_trace(path, seed=1))


def test_a_limit_reads_no_further(written):
    text = mooncake_text(MOONCAKE[:1]) + mooncake_text([{**MOONCAKE[1], "timestamp": 1000}]) + "damage\n"
    assert len(list(read_trace(written(text), limit=1))) == 1
    with pytest.raises(TraceError, match="line 3"):
        list(read_trace(written(text)))


def saved_report():
    requests = [
        {"scheduled": 2.0, "prompt_tokens": 20, "output_tokens": 5, "group": "b"},
        {"scheduled": 1.0, "prompt_tokens": 10, "output_tokens": 4},
        {"scheduled": 1.5, "target_prompt_tokens": 11, "target_output_tokens": 3},
        {"scheduled": 1.7},
    ]
    return {"format": "headrace-bench", "report": {"sections": [{"runs": [{"requests": requests}, {"requests": requests}]}]}}


def test_a_saved_report_is_a_trace(written):
    entries = list(read_trace(written(json.dumps(saved_report()), "report.json")))
    assert [(entry.at, entry.prompt_tokens, entry.output_tokens, entry.group) for entry in entries[:3]] == [
        (0.0, 10, 4, ""),
        (0.5, 11, 3, ""),
        (1.0, 20, 5, "b"),
    ]
    assert [entry.at for entry in entries[3:]] == [1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no trace of a known form"),
        ("hello\n", "no trace of a known form"),
        ("ContextTokens,GeneratedTokens\n1,2\n", "timestamp are missing"),
        (AZURE + "2023-11-16 18:17:05,x,1\n", "line 5"),
        (AZURE + "2023-11-16 18:17:05\n", "line 5"),
        (AZURE + "yesterday,1,1\n", "line 5"),
        (AZURE + "2023-11-16 18:17:00,1,1\n", "line 5: the time goes back"),
        (AZURE + "2023-11-16 18:17:05,-1,1\n", "below zero"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1"),
        (
            mooncake_text([{**MOONCAKE[0], "timestamp": at} for at in (9, 8)]),
            "back",
        ),
        ('{"format": "headrace-bench", "report": {"sections": [{"runs": []}]}}', "no records"),
        ('{"requests": [{"prompt_tokens": 3}]}', "without its time"),
        ('{"half": ', "neither a trace nor a saved report"),
        (b"\x1f\x8b damaged", "trace"),
        (b"\xff\xfe\x00", "trace"),
    ],
)
def test_damage_is_named(written, content, told):
    with pytest.raises(TraceError, match=told):
        list(read_trace(written(content)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        list(read_trace(tmp_path / "nowhere"))


def test_timestamps_of_any_precision():
    assert (parse_timestamp("2023-11-16 18:15:50.9951690") - parse_timestamp("2023-11-16 18:15:46.68059")).total_seconds() == (
        pytest.approx(4.314579)
    )
    assert parse_timestamp("2024-05-10T00:00:00Z") == parse_timestamp("2024-05-10 00:00:00")

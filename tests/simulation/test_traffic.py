from collections import Counter
from pathlib import Path

import pytest

from headrace.loadtest.lengths import Lengths
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import TrafficPolicy
from headrace.simulation.recorded import read_traffic
from headrace.simulation.settings import TrafficSettings
from headrace.simulation.traffic import Traffic, asked_tokens, draw_traffic, zipf_tenants
from tests.simulation.simulated_record import request

POLICY = TrafficPolicy()


def test_a_rate_and_a_load_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="give one of"):
        TrafficSettings(rate=1.0, load=1.0).check(POLICY)


def drawn(rate: float | None = 5.0, context_tokens: int = 8192, **fields: object) -> Traffic:
    settings = TrafficSettings(**fields)  # type: ignore[arg-type]
    settings.check(POLICY)
    return draw_traffic(settings, POLICY, context_tokens, rate)


def test_the_same_seed_draws_the_same() -> None:
    again = [drawn(num_requests=300, tenants=zipf_tenants(4), seed=5).requests for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != drawn(num_requests=300, tenants=zipf_tenants(4), seed=6).requests
    assert [item.index for item in again[0]] == list(range(300))
    assert [item.due_ns for item in again[0]] == sorted(item.due_ns for item in again[0])


def test_rate_and_shares_are_as_asked() -> None:
    traffic = drawn(num_requests=6000, rate=20.0, tenants={"a": 3, "b": 1}, classes={"interactive": 0.8, "batch": 0.2})
    assert traffic.rate == pytest.approx(20, rel=0.05)
    tenants = Counter(item.tenant_id for item in traffic.requests)
    assert tenants["a"] / 6000 == pytest.approx(0.75, abs=0.03)
    classes = Counter(item.service_class for item in traffic.requests)
    assert classes["interactive"] / 6000 == pytest.approx(0.8, abs=0.03)


def test_a_duration_ends_the_traffic() -> None:
    traffic = drawn(rate=50.0, duration_seconds=20)
    assert len(traffic.requests) == pytest.approx(1000, rel=0.15)
    assert traffic.requests[-1].due_ns < 20e9


def test_lengths_keep_the_shape_and_are_cut_to_the_context() -> None:
    traffic = drawn(num_requests=4000, workload="azure-code", length_scale=0.5, context_tokens=2000)
    prompts = sorted(item.prompt_tokens for item in traffic.requests)
    assert prompts[2000] == pytest.approx(1469 / 2, rel=0.1)  # the trace's median prompt, halved
    assert max(item.prompt_tokens + item.output_tokens for item in traffic.requests) <= 2000
    assert "were cut to the context of 2000 tokens" in traffic.notes[0]


def test_requests_ask_for_the_next_power_of_two() -> None:
    assert [asked_tokens(Lengths(10, output), None, 1000) for output in (1, 2, 3, 100)] == [1, 2, 4, 128]
    assert asked_tokens(Lengths(950, 40), None, 1000) == 50
    assert asked_tokens(Lengths(10, 40), 500, 1000) == 500
    assert asked_tokens(Lengths(10, 40), 8, 1000) == 40  # it produces 40: it must have asked for so many


def test_prompts_share_tokens_exactly_where_they_share_parts() -> None:
    one = request(0, prompt=10, part_tokens=4, parts=(1, 2)).prompt_token_ids()
    two = request(1, prompt=10, part_tokens=4, parts=(1, 3)).prompt_token_ids()
    assert (len(one), one[:4], one[4] != two[4], one[8] != two[8]) == (10, two[:4], True, True)
    cut = request(2, prompt=6, part_tokens=4, parts=(1, 2)).prompt_token_ids()
    assert cut == one[:6]


def test_mooncake_prompts_begin_as_earlier_ones() -> None:
    requests = drawn(num_requests=3000, workload="mooncake-conversation", length_scale=0.125, context_tokens=20_000).requests
    known: set[int] = set()
    shares = []
    for item in requests:
        shares.append(sum(part in known for part in item.parts) / len(item.parts))
        known.update(item.parts)
    shares.sort()
    assert requests[0].part_tokens == 64
    assert shares[1500] == pytest.approx(0.36, abs=0.06)  # the trace's median
    assert shares[750] == pytest.approx(0.07, abs=0.06)


def test_tenants_begin_with_their_own_prefix() -> None:
    requests = drawn(num_requests=100, tenants={"a": 1, "b": 1}, shared_prefix_tokens=96).requests
    begins = {(item.tenant_id, item.prompt_token_ids()[0]) for item in requests}
    assert len(begins) == 2


def test_a_mix_names_classes() -> None:
    requests = drawn(num_requests=500, workload="mix:interactive=0.9:fixed:8,4;batch=0.1:fixed:99,7").requests
    assert {(item.service_class, item.prompt_tokens) for item in requests} == {("interactive", 8), ("batch", 99)}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"workload": "poems"}, "must be one of"),
        ({"workload": "fixed:9"}, "two lengths"),
        ({"workload": "fixed:9,9", "length_scale": 2.0}, "no lengths to scale"),
        ({"workload": "mix:fast=1:fixed:8,8"}, "names of a mix"),
        ({"workload": "mix:batch=1:fixed:8,8", "classes": {"batch": 1.0}}, "names the classes itself"),
        ({"workload": "mooncake-conversation", "shared_prefix_tokens": 5}, "prefixes of its own"),
        ({"classes": {"gold": 1.0}}, "no class gold"),
        ({"tenants": {"a": 0.0}}, "positive"),
        ({"arrival": "trace"}, "own times"),
        ({"rate_scale": 2.0}, "for a trace"),
        ({"timeout_seconds": -1.0}, "between 0.001 and"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        drawn(**({"num_requests": 10} | fields))


MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [5, 6, 7]}\n'
    '{"timestamp": 4000, "input_length": 1536, "output_length": 0, "hash_ids": [5, 6, 9]}\n'
)


def test_a_trace_keeps_times_lengths_and_shared_parts(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE)
    settings = TrafficSettings(workload=f"trace:{path}", arrival="trace", length_scale=0.5, rate_scale=2.0)
    traffic = read_traffic(path, settings, POLICY, 8192, None)
    first, second = traffic.requests
    assert (first.due_ns, second.due_ns) == (0, 2_000_000_000)
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (550, 20, 1)
    assert first.prompt_token_ids()[:512] == second.prompt_token_ids()[:512]
    assert first.prompt_token_ids()[512:] != second.prompt_token_ids()[512:550]
    assert traffic.notes == ["recorded lengths were multiplied by 0.5", "requests come 2 times as fast as recorded"]


def test_a_trace_is_stretched_to_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:00:{second:02}.0000000,{100 + second},{5 + second}\n" for second in range(11))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    settings = TrafficSettings(workload=f"trace:{path}", arrival="trace", rate=4.0)
    traffic = read_traffic(path, settings, POLICY, 8192, 4.0)
    assert (len(traffic.requests), traffic.rate) == (11, pytest.approx(4.0))
    assert [item.prompt_tokens for item in traffic.requests] == list(range(100, 111))
    with pytest.raises(ConfigurationError, match="its own prefixes"):
        read_traffic(path, TrafficSettings(tenants={"a": 1.0}), POLICY, 8192, 4.0)
    with pytest.raises(ConfigurationError, match="no-such-file"):
        read_traffic(tmp_path / "no-such-file", settings, POLICY, 8192, None)

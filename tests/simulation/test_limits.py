"""Numbers that a simulation cannot count with are refused, by name and with what is allowed."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from headrace.cli.simulate import simulate
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import TrafficPolicy
from headrace.simulation.fairness import fairness_of
from headrace.simulation.limits import RANGES
from headrace.simulation.recorded import read_run, read_traffic
from headrace.simulation.settings import ServerSettings, SimulationSettings, TrafficSettings
from headrace.simulation.step_model import StepModel
from headrace.simulation.study import run_study
from headrace.simulation.traffic import draw_traffic
from headrace.simulation.validation import validate
from tests.simulation.simulated_record import machine, record_of, request, run
from tests.simulation.test_figures import S, ended

POLICY = TrafficPolicy()
NUMBERS = {
    "--requests": "num_requests", "--duration": "duration_seconds", "--rate": "rate", "--load": "load",
    "--burst-on": "burst_on_seconds", "--burst-off": "burst_off_seconds", "--scale-lengths": "length_scale",
    "--rate-scale": "rate_scale", "--shared-prefix-tokens": "shared_prefix_tokens", "--max-tokens": "max_tokens",
    "--timeout": "timeout_seconds", "--seed": "seed", "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens", "--max-model-len": "max_model_len", "--num-blocks": "num_blocks",
    "--block-size": "block_size", "--max-queued-requests": "max_queued_requests", "--max-tries": "max_tries",
    "--ttft-ms": "ttft_ms", "--tbt-ms": "tbt_ms", "--warm-up": "warm_up_seconds", "--window": "window_seconds",
}  # fmt: skip


@pytest.mark.parametrize("option", NUMBERS)
def test_an_option_refuses_what_is_outside_its_range_or_no_number(option: str) -> None:
    allowed = RANGES[NUMBERS[option]]
    is_count = isinstance(allowed.low, int)
    beyond = str(int(allowed.high) + 1) if is_count else "1e300"
    for value in (beyond, "-1", *([] if is_count else ["nan", "inf", "1e-300" if allowed.low else "-1e-300"])):
        result = CliRunner().invoke(simulate, [option, value])
        assert result.exit_code == 2, value
        assert f"Invalid value for '{option}'" in result.output
        assert "not in the range" in result.output or "not a number from" in result.output


def test_every_number_of_a_step_has_a_range() -> None:
    for name in StepModel.__struct_fields__:
        for value in ("1e300", "nan", "inf", "-1"):
            with pytest.raises(ConfigurationError, match=f"step model: {name} must be between 0 and"):
                StepModel.parse(f"{name}={value}")


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_queued_prompt_tokens"])
def test_a_simulated_server_is_bounded(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be between"):
        ServerSettings(**{name: 10**13}).machine(StepModel(), POLICY)


@pytest.mark.parametrize("name", ["ttft_ms", "tbt_ms", "warm_up_seconds", "window_seconds"])
def test_a_study_checks_its_own_numbers(name: str) -> None:
    settings = SimulationSettings(traffic=TrafficSettings(rate=1.0, num_requests=3))
    with pytest.raises(ConfigurationError, match=f"{name} must be between .*, not nan"):
        run_study(msgspec.structs.replace(settings, **{name: float("nan")}))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"duration_seconds": 1e9}, "more than 1000000 requests"),
        ({"rate": 1e-6, "num_requests": 2000}, "request 1031 would come .* between 0 and 1000000000"),
        ({"rate": 1e-6, "num_requests": 50, "arrival": "bursty", "burst_on_seconds": 0.001}, "bursts and pauses"),
        ({"num_requests": 5, "tenants": {"a": 1.0, "b": 1e-300}}, "share of b is below 0.000001"),
        ({"num_requests": 5, "workload": f"fixed:{'9' * 5000},1"}, "at most 12 digits"),
    ],
)
def test_traffic_without_end_is_refused_at_once(fields: dict[str, object], word: str) -> None:
    settings = TrafficSettings(**({"rate": 2.0} | fields))  # type: ignore[arg-type]

    def draw() -> None:
        settings.check(POLICY)
        draw_traffic(settings, POLICY, 8192, settings.rate)

    with pytest.raises(ConfigurationError, match=word):
        draw()


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,5,5\n9999-12-31 00:00:00,5,5\n"
MOONCAKE = "".join(f'{{"timestamp": {at}, "input_length": 5, "output_length": 5, "hash_ids": []}}\n' for at in ("0", "9e15"))


@pytest.mark.parametrize("text", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
def test_a_trace_of_times_too_far_apart_is_refused_unless_it_is_stretched(text: str, tmp_path: Path) -> None:
    path = tmp_path / "far"
    path.write_text(text)
    settings = TrafficSettings(workload=f"trace:{path}", arrival="trace")
    with pytest.raises(ConfigurationError, match=r"far: request 2 would come .* between 0 and 1000000000"):
        read_traffic(path, settings, POLICY, 8192, None)
    assert read_traffic(path, settings, POLICY, 8192, 1.0).requests[1].due_ns == S


SERVER = ServerSettings(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=400, block_size=16, max_model_len=1024)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("step", "duration_us", 10**18),
        ("step", "decode_rows", -3),
        ("arrival", "at_us", 10**17),
        ("end", "ttft_us", 10**17),
    ],
)
def test_a_record_of_impossible_numbers_is_refused_with_the_line(kind: str, name: str, value: int, tmp_path: Path) -> None:
    path = record_of(tmp_path / "r.jsonl", [request(i, 30 * i, output=5) for i in range(30)], StepModel(), SERVER)
    lines = path.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if f'"type":"{kind}"' in line)
    lines[place] = msgspec.json.encode(msgspec.json.decode(lines[place]) | {name: value}).decode()
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigurationError, match=f"line {place + 1}: {name} must be between"):
        read_run(path)


def test_a_record_of_a_pool_without_bound_is_refused(tmp_path: Path) -> None:
    path = record_of(tmp_path / "r.jsonl", [request(i, 30 * i, output=5) for i in range(30)], StepModel(), SERVER)
    path.write_text(path.read_text().replace('"num_blocks":400', '"num_blocks":1000000000000'))
    with pytest.raises(ConfigurationError, match="num_blocks must be between 1 and 1000000, not 1000000000000"):
        validate(path)


def test_a_simulation_that_runs_past_its_clock_is_refused() -> None:
    slow = machine(StepModel(step_ms=1e6, kv_ns=1e12, row_us=0, token_us=0))
    with pytest.raises(ConfigurationError, match="ran past 4000000000 s"):
        run([request(index, prompt=2000, output=3000) for index in range(4)], slow)


def test_fairness_is_judged_over_so_many_windows_at_most() -> None:
    pair = [ended(0, 0, [1e10], tenant_id="a"), ended(1, 0, [1e10], tenant_id="b")]
    waiting = [msgspec.structs.replace(item, first_scheduled_ns=10_000 * S) for item in pair]
    assert fairness_of(waiting, [], {}, S).num_windows == 10_000
    with pytest.raises(ConfigurationError, match="make it 1 s or more"):
        fairness_of(waiting, [], {}, 1_000_000)


def test_a_part_longer_than_the_prompt_takes_no_memory() -> None:
    assert len(request(0, prompt=5, part_tokens=10**12, parts=(1,)).prompt_token_ids()) == 5


def test_ranges_are_not_empty() -> None:
    for name, (low, high) in RANGES.items():
        assert low < high, name

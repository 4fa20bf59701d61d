from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from headrace.cli.simulate import simulate
from headrace.protocol.errors import ConfigurationError
from headrace.simulation.settings import ServerSettings, SimulationSettings, TrafficSettings
from headrace.simulation.step_model import StepModel
from headrace.simulation.study import SimulationReport, measure_capacity, run_study
from headrace.simulation.validation import ValidationReport, validate
from tests.simulation.simulated_record import record_of, request

SMALL = ["--requests", "120", "--workload", "azure-conversation", "--scale-lengths", "0.05"]
SERVER = ServerSettings(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=400, block_size=16, max_model_len=1024)


def settings(**traffic: object) -> SimulationSettings:
    fields: dict[str, object] = {"num_requests": 150, "length_scale": 0.05} | traffic
    return SimulationSettings(server=SERVER, traffic=TrafficSettings(**fields))  # type: ignore[arg-type]


def test_each_policy_gets_the_same_traffic() -> None:
    report = run_study(settings(rate=20.0))
    assert [result.policy for result in report.results] == ["headrace", "fcfs", "no-chunking", "reserve-max"]
    for result in report.results:
        total = result.total
        assert (total.offered, total.completed + total.refused + total.failed) == (150, 150)
    assert report.traffic.num_requests == 150
    headrace, current = run_study(msgspec.structs.replace(settings(rate=20.0), policies=("headrace", "current"))).results
    assert msgspec.structs.replace(current, policy="headrace") == headrace  # what is configured unless told otherwise


def test_capacity_is_the_full_batch_and_load_a_multiple_of_it() -> None:
    """Eight places, prompts of 16 and answers of 32 tokens, steps of 10 ms: 8 requests in some 330 ms."""
    base = settings(workload="fixed:16,32", length_scale=1.0)
    model = StepModel(step_ms=10, row_us=0, token_us=0, kv_ns=0)
    capacity = measure_capacity(base, base.server.machine(model, base.policy))
    assert capacity == pytest.approx(8 / 0.32, rel=0.05)
    report = run_study(
        msgspec.structs.replace(
            base,
            step_model=model,
            policies=("current",),
            traffic=msgspec.structs.replace(base.traffic, load=2.0, num_requests=1500),
        )
    )
    assert report.capacity_per_second == capacity
    assert report.traffic.rate == pytest.approx(2 * capacity, rel=0.06)
    assert report.results[0].requests_per_second == pytest.approx(capacity, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"policies": ("best",)}, "no policy 'best'"),
        ({"policies": ("fcfs", "fcfs")}, "each once"),
        ({"max_tries": 0}, "tries"),
        ({"warm_up_seconds": 1e6}, "within the warm-up"),
        ({"traffic": TrafficSettings()}, "give a rate"),
    ],
)
def test_a_study_that_cannot_be_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        run_study(msgspec.structs.replace(settings(rate=10.0), **changes))


def call(*arguments: str) -> str:
    result = CliRunner().invoke(simulate, [*arguments, "--processes", "1"])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_same_command_saves_the_same_bytes(tmp_path: Path) -> None:
    command = [
        *SMALL,
        "--load",
        "1.4",
        "--tenants",
        "3",
        "--classes",
        "interactive=1,batch=1",
        "--retry",
        "--quiet",
        "--seed",
        "4",
    ]
    saved = []
    for name in ("a.json", "b.json"):
        call(*command, "--max-queued-requests", "4", "--max-num-seqs", "4", "--json", str(tmp_path / name))
        saved.append((tmp_path / name).read_bytes())
    assert saved[0] == saved[1]
    report = msgspec.json.decode(saved[0], type=SimulationReport)
    assert (report.settings.traffic.seed, report.settings.max_tries) == (4, 10)
    assert run_study(report.settings, report.fit) == report  # what is saved repeats it


def test_tables_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("c.svg", "c.png"):
        output = call(*SMALL, "--rate", "30", "--classes", "interactive=1,batch=1", "--picture", str(tmp_path / name))
        for text in ("goodput", "TTFT p99.9", "no-chunking", "fairness, mean / least", "interactive: goodput", "0.05 times"):
            assert text in output
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "c.svg").read_text()
    assert "<svg" in picture
    assert "var(--" not in picture


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--arrival", "poisson", "--workload", "trace:x"], "its own times"),
        (["--burst-on", "2"], "for --arrival bursty"),
        (["--max-tries", "3"], "needs --retry"),
        (["--picture", "x.pdf"], ".svg or .png"),
        (["--classes", "batch"], "NAME=SHARE"),
        (["--tenants", "0"], "1 to 200"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_options_that_contradict_are_usage_errors(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_the_server_is_configured_by_headrace_toml_and_flags_win(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(
        "[server]\nadmission = 'bounds'\n[scheduler]\nmax_num_seqs = 3\nmax_num_batched_tokens = 48\npolicy = 'fcfs'\n"
        "step_time_budget = false\nmin_chunk_tokens = 9\nclass_aging_seconds = 7\n[cache]\nprefix_caching = false\n"
        "[classes.gold]\nlevel = 0\nttft_target_ms = 100\ntbt_target_ms = 50\n[tenants.acme]\nweight = 2.0\n"
    )
    saved = tmp_path / "r.json"
    call(*SMALL, "--rate", "5", "--config", str(config), "--max-num-seqs", "5", "--classes", "gold=1",
         "--tenants", "acme=1,b=1", "--policies", "current", "--quiet", "--json", str(saved))  # fmt: skip
    report = msgspec.json.decode(saved.read_bytes(), type=SimulationReport)
    server = report.settings.server
    assert (server.max_num_seqs, server.max_num_batched_tokens, server.prefix_caching) == (5, 48, False)
    assert (server.admission, server.policy, server.step_time_budget) == ("bounds", "fcfs", False)
    config_of = server.machine(report.settings.step_model, report.settings.policy).config
    assert (config_of.policy, config_of.step_time_budget, config_of.min_chunk_tokens) == ("fcfs", False, 9)
    assert config_of.class_aging_ns == 7_000_000_000
    assert {tenant.name: tenant.weight for tenant in report.settings.policy.tenants} == {
        "default": 1.0, "other": 1.0, "acme": 2.0, "b": 1.0,
    }  # fmt: skip
    assert list(report.results[0].by_class) == ["gold"]


TRUE_MODEL = StepModel(step_ms=8, row_us=300, token_us=120, kv_ns=200)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    requests = [
        request(index, due_ms=37 * index, prompt=20 + 13 * (index % 11), output=5 + index % 17, max_tokens=64)
        for index in range(120)
    ]
    return record_of(tmp_path / "record.jsonl", requests, TRUE_MODEL, SERVER)


def test_a_record_of_a_simulated_server_is_met_exactly(record: Path) -> None:
    report = validate(record)
    assert report.fit is not None
    for name in ("step_ms", "row_us", "token_us", "kv_ns"):
        assert getattr(report.fit.model, name) == pytest.approx(getattr(TRUE_MODEL, name), rel=0.02), name
    assert (report.num_requests, report.num_compared, report.server) == (120, 120, SERVER)
    assert len(report.comparisons) == 18
    for item in report.comparisons:
        assert item.recorded is not None
        assert item.simulated == pytest.approx(item.recorded, rel=0.01, abs=0.0005), item  # the record knows whole microseconds


def test_a_wrong_model_is_shown_as_wrong(record: Path) -> None:
    slow = msgspec.structs.replace(TRUE_MODEL, step_ms=24)
    errors = {item.name: item.error for item in validate(record, slow).comparisons}
    tpot = errors["TPOT p50"]
    assert tpot is not None
    assert tpot > 0.5


def test_a_record_is_validated_fitted_and_replayed_by_the_command(record: Path, tmp_path: Path) -> None:
    saved = tmp_path / "v.json"
    output = call("--against", str(record), "--json", str(saved))
    assert "120 of 120 requests compared" in output
    assert "TTFT p99" in output
    assert msgspec.json.decode(saved.read_bytes(), type=ValidationReport).record == "record.jsonl"
    call("--fit", str(record), "--workload", f"trace:{record}", "--policies", "current", "--quiet", "--json", str(saved))
    report = msgspec.json.decode(saved.read_bytes(), type=SimulationReport)
    assert report.fit is not None
    assert report.settings.server == SERVER  # that of the record
    assert report.settings.step_model == report.fit.model
    refused = CliRunner().invoke(simulate, ["--against", str(record), "--rate", "3"])
    assert "leave out rate" in refused.output


def test_refused_requests_of_a_record_are_not_compared(record: Path) -> None:
    lines = record.read_text().splitlines()
    arrival = msgspec.json.decode(lines[2])
    lines.append(msgspec.json.encode(arrival | {"id": 0, "at_us": 5, "refused": "overloaded"}).decode())
    record.write_text("\n".join(lines) + "\n")
    assert (validate(record).num_requests, validate(record).num_compared) == (120, 120)


def test_what_is_not_compared_is_told_with_the_reason(record: Path) -> None:
    text = record.read_text().splitlines()
    places = [place for place, line in enumerate(text) if '"type":"end"' in line]
    for place in places[3:5]:
        text[place] = text[place].replace('"reason":"length"', '"reason":"deadline"')
    del text[places[9]]
    record.write_text("\n".join(text) + "\n")
    report = validate(record)
    assert report.left_out == {"ended by deadline": 2, "whose end is not in the record": 1}
    assert (report.num_requests, report.num_compared) == (120, 117)
    output = call("--against", str(record))
    assert "not compared: 2 ended by deadline, 1 whose end is not in the record" in output
    assert "were load and are not compared" in output
    assert "warning" not in output


def test_a_bad_fit_gets_a_warning(record: Path) -> None:
    lines = [msgspec.json.decode(line) for line in record.read_text().splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    for number, line in enumerate(steps):
        line["duration_us"] = (1000, 40_000, 9000, 300_000)[number % 4]
    record.write_text("".join(msgspec.json.encode(line).decode() + "\n" for line in lines))
    output = call("--against", str(record))
    assert "warning: the step model fits badly (R2 " in output
    assert "is above 30%" in output

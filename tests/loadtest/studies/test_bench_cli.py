"""The commands of `headrace bench`, with servers on paper in the place of the network."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.bench import bench
from headrace.cli.bench_display import progress_line
from headrace.cli.bench_options import KEY_VARIABLES, without_key
from headrace.loadtest.definitions import DEFINITIONS
from headrace.loadtest.engine import LoadError
from headrace.loadtest.progress import LoadProgress, Phase
from headrace.loadtest.records import RunSettings
from headrace.loadtest.studies import runner as runner_module
from headrace.loadtest.studies.errors import StudyError
from headrace.loadtest.studies.server_facts import ServerFacts
from tests.loadtest.studies.synthetic import PaperServer

URL = "http://paper:1"


class World:
    """What the commands asked of the world: servers looked up, runs made."""

    def __init__(self) -> None:
        self.servers: dict[str, PaperServer] = {}
        self.looked_up: list[tuple[str, str | None, str | None, str]] = []
        self.headers: list[dict[str, str]] = []
        self.outstanding: list[int] = []

    @property
    def settings(self) -> list[RunSettings]:
        return [settings for server in self.servers.values() for settings, _ in server.calls]

    def look_up(self, url: str, *, model: str | None, key: str | None, api: str) -> ServerFacts:
        if url.endswith("gone"):
            raise StudyError(f"{url} is not reachable")
        self.looked_up.append((url, model, key, api))
        return ServerFacts(url=url, model=model or "only", facts={"version": "1"})

    def run_load(self, plan, *, on_progress, label, drain_seconds):
        self.headers.append(plan.headers)
        self.outstanding.append(plan.max_outstanding)
        server = self.servers.setdefault(plan.settings.url, PaperServer())
        return server(plan.settings, label)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    from headrace.cli import bench_session

    made = World()
    monkeypatch.setattr(bench_session, "look_up", made.look_up)
    monkeypatch.setattr(runner_module, "run_load", made.run_load)
    monkeypatch.setattr(bench_session, "calibration_for", lambda *_: runner_module.ASSUMED)
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return made


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(bench, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_the_form_that_scripts_rely_on(world, tmp_path):
    path = tmp_path / "run.json"
    call(
        "run", "--url", URL, "--model", "m", "--clients", "4", "--requests", "20", "--prompt-tokens", "32",
        "--output-tokens", "10", "--key", "sk-secret", "--json", str(path),
    )  # fmt: skip
    document = json.loads(path.read_text())
    assert document["requests"] == {"offered": 20, "completed": 20, "refused": 0, "failed": 0}
    assert document["output_tokens_per_second"] > 0
    assert 0 <= document["goodput"] <= 1
    for name in ("ttft_seconds", "tbt_seconds", "tpot_seconds", "e2e_seconds"):
        assert {"mean", "p50", "p90", "p99", "max", "count"} <= document[name].keys()
        assert document[name]["count"] > 0
    assert world.looked_up == [(URL, "m", "sk-secret", "completions")]
    assert world.headers == [{"Authorization": "Bearer sk-secret"}]
    (settings,) = world.settings
    assert (settings.arrival, settings.num_clients, settings.num_requests) == ("closed", 4, 20)
    assert settings.is_salted


def test_a_key_is_in_no_file_and_not_on_the_screen(world, tmp_path):
    """OPS: secrets do not leak into what is saved."""
    paths = [tmp_path / name for name in ("a.json", "a.csv", "r.csv", "a.html")]
    output = call(
        "run", "--url", URL, "--requests", "9", "--key", "sk-secret", "--json", str(paths[0]), "--csv", str(paths[1]),
        "--requests-csv", str(paths[2]), "--html", str(paths[3]),
    )  # fmt: skip
    assert all("sk-secret" not in path.read_text() for path in paths)
    assert "sk-secret" not in output
    assert "Repeat with: headrace bench run --url" in output


@pytest.mark.parametrize("variable", KEY_VARIABLES)
def test_the_key_of_the_environment(world, monkeypatch, variable):
    monkeypatch.setenv(variable, "from-env")
    call("run", "--url", URL, "--requests", "8")
    assert world.headers == [{"Authorization": "Bearer from-env"}]


def test_without_key_leaves_out_both_forms():
    assert without_key(["--key", "s", "--url", "u", "--key=s", "--api", "chat"]) == ["--url", "u", "--api", "chat"]


def test_a_rate_makes_an_open_loop_bounded_by_clients(world):
    call("run", "--url", URL, "--rate", "5", "--clients", "12", "--duration", "20", "--no-stream", "--api", "chat")
    (settings,) = world.settings
    assert (settings.arrival, settings.rate, settings.num_clients, settings.is_stream) == ("poisson", 5.0, None, False)
    assert world.outstanding == [12]
    call("run", "--url", URL, "--rate", "5", "--duration", "20")
    assert world.outstanding[1] > 1000


def test_defaults_end_every_run(world):
    call("run", "--url", URL)
    call("run", "--url", URL, "--rate", "3")
    assert [(item.num_clients, item.num_requests, item.duration_seconds) for item in world.settings] == [
        (8, 100, None),
        (None, None, 60.0),
    ]


def test_every_option_of_a_run_reaches_the_settings(world):
    call(
        "run", "--url", URL, "--rate", "4", "--arrival", "bursty", "--burst-on", "2", "--burst-off", "3",
        "--burst-off-share", "0.1", "--duration", "30", "--warm-up", "2", "--cool-down", "1", "--timeout", "9",
        "--processes", "3",
        "--workload", "chat:3", "--think", "0.5", "--system-tokens", "40", "--tenants", "2", "--seed", "7",
        "--temperature", "0.3", "--no-ignore-eos",
        "--no-salt",
    )  # fmt: skip
    (settings,) = world.settings
    assert settings.arrival == "bursty"
    assert (settings.warm_up_seconds, settings.cool_down_seconds, settings.timeout_seconds) == (2, 1, 9)
    assert (settings.num_processes, settings.workload, settings.seed, settings.temperature) == (3, "chat", 7, 0.3)
    assert (settings.ignores_eos, settings.is_salted) == (False, False)
    expected = {
        "burst_on_seconds": "2",
        "burst_off_seconds": "3",
        "burst_off_share": "0.1",
        "think_seconds": "0.5",
        "system_tokens": "40",
        "num_tenants": "2",
        "turns": "3",
    }
    assert expected.items() <= settings.extra.items()


def test_classes_of_a_record_are_sent_when_asked_and_refused_where_there_are_none(world, tmp_path):
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n')
    told = call("run", "--url", URL, "--workload", f"trace:{trace}", "--class-headers", code=1)
    assert "knows no classes" in told
    told = call("run", "--url", URL, "--requests", "2", "--class-headers", code=1)
    assert "does not know class_headers" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--url", URL, "--arrival", "bursty"], "needs --rate"),
        (["run", "--url", URL, "--rate", "2", "--ramp-to", "4"], "--ramp-to is for --arrival ramp"),
        (["run", "--url", URL, "--rate", "2", "--arrival", "ramp"], "needs --ramp-to"),
        (["run", "--url", URL, "--burst-on", "2"], "--burst-on is for --arrival bursty"),
        (["run", "--url", URL, "--quiet"], "would do nothing"),
        (["run", "--url", URL, "--json", "/no/such/folder/x.json"], "no folder"),
        (["run", "--url", URL, "--json", "x", "--csv", "x"], "the same file"),
        (["run", "--url", URL, "--target", "fast"], "TTFT:TBT"),
        (["run", "--url", URL, "--target", "mlperf", "--target", "mlperf"], "same name"),
        (["run"], "Missing option '--url'"),
        (["sweep", "--url", URL, "--clients", "1,2", "--rates", "1,2"], "not both"),
        (["sweep", "--url", URL, "--arrival", "constant"], "by --rates"),
        (["sweep", "--url", URL, "--rates", "1,2", "--arrival", "ramp"], "no one rate"),
        (["compare", "--server", f"a={URL}"], "two or more"),
        (["compare", "--url", URL, "--variant", "a", "--server", "b=http://h"], "not both"),
        (["compare", "--variant", "a", "--variant", "b"], "needs --url"),
        (["compare", "--url", URL, "--variant", "a", "--variant", "a"], "different names"),
        (["compare", "--server", f"a={URL}", "--server", "b=http://h", "--key", "s"], "a key is named there"),
        (["compare", "--url", URL, "--variant", "a", "--variant", "b:rate=3"], "closed loop"),
        (["capacity", "--url", URL, "--target", "mlperf", "--target", "90:9"], "one --target"),
    ],
)
def test_what_contradicts_itself_is_refused_before_any_load(world, arguments, said):
    assert said in call(*arguments, code=2)
    assert not world.settings


def test_a_server_that_is_not_there_is_one_line(world):
    output = call("run", "--url", "http://gone", code=1)
    assert output == "Error: http://gone is not reachable\n"


def test_a_workload_that_cannot_be_is_one_line(world):
    output = call("run", "--url", URL, "--workload", "dreams", "--requests", "3", code=1)
    assert "Error: workload is 'dreams'" in output
    assert "Traceback" not in output


def test_nothing_completed_is_exit_code_1(world):
    world.servers[URL] = PaperServer(requests_per_second=0.001, max_queued=-1)
    output = call("run", "--url", URL, "--rate", "5", "--duration", "10", code=1)
    assert "no request completed" in output


def test_stream_alternates_both_ways(world, tmp_path):
    path = tmp_path / "s.json"
    output = call("stream", "--url", URL, "--rounds", "3", "--json", str(path))
    assert [item.is_stream for item in world.settings] == [True, False, False, True, True, False, False, True]
    assert all(item.num_requests == 32 for item in world.settings)
    assert "perceived speed" in output
    assert json.loads(path.read_text())["kind"] == "stream"
    call("stream", "--url", URL, "--rounds", "1", "--keep-first")
    assert len(world.settings) == 8 + 2


def test_sweep_by_clients_and_by_rates(world, tmp_path):
    path = tmp_path / "s.json"
    call("sweep", "--url", URL, "--clients", "4,1,2", "--to-the-end", "--json", str(path))
    assert [item.num_clients for item in world.settings] == [1, 2, 4]
    assert json.loads(path.read_text())["load_unit"] == "clients"
    call("sweep", "--url", URL, "--rates", "0.5,1")
    assert [(item.rate, item.duration_seconds) for item in world.settings[3:]] == [(0.5, 40.0), (1.0, 40.0)]


def test_compare_servers_with_keys_and_models_of_their_own(world, tmp_path, monkeypatch):
    monkeypatch.setenv("B_KEY", "secret-b")
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-these")
    world.servers["http://b"] = PaperServer(speed=2)
    path = tmp_path / "c.json"
    output = call(
        "compare", "--server", f"a={URL}", "--server", "b=http://b,model=mb,key=B_KEY", "--rounds", "5", "--json", str(path)
    )
    assert world.looked_up == [(URL, None, None, "completions"), ("http://b", "mb", "secret-b", "completions")]
    assert {frozenset(headers.items()) for headers in world.headers} == {
        frozenset(),
        frozenset({("Authorization", "Bearer secret-b")}),
    }
    assert "b is better" in output
    assert "secret-b" not in path.read_text() + output


def test_compare_variants_of_one_server(world):
    call("compare", "--url", URL, "--variant", "short", "--variant", "long:output-tokens=128", "--rounds", "2", "--keep-first")
    assert [item.output_tokens for item in world.settings] == [64, 128, 128, 64]


def test_capacity(world, tmp_path):
    path = tmp_path / "c.json"
    output = call(
        "capacity", "--url", URL, "--target", "1000:100", "--min-goodput", "0.9", "--max-runs", "6", "--json", str(path)
    )
    document = json.loads(path.read_text())
    assert document["kind"] == "capacity"
    assert document["capacity_low_per_second"] > 0
    assert "held" in output
    assert len(world.settings) <= 6
    assert world.settings[1].duration_seconds == 60


def test_a_server_that_dies_in_between_is_exit_code_1_and_saves_what_there_is(world, tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    whole = world.run_load

    def dying(*arguments, **named):
        if len(world.settings) == 2:
            raise LoadError("no connection")
        return whole(*arguments, **named)

    monkeypatch.setattr(runner_module, "run_load", dying)
    output = call("sweep", "--url", URL, "--clients", "1,2,4", "--json", str(path), code=1)
    assert "Ended by an error (no connection): 2 of 3 loads" in output
    assert json.loads(path.read_text())["ended_by"] == "error"


def test_quiet_saves_and_says_nothing(world, tmp_path):
    path = tmp_path / "r.json"
    assert call("run", "--url", URL, "--quiet", "--json", str(path)) == ""
    assert path.exists()


def test_an_unwritable_file_does_not_take_the_others_with_it(world, tmp_path):
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    good = tmp_path / "r.json"
    result = CliRunner().invoke(bench, ["run", "--url", URL, "--json", str(good), "--csv", str(folder)])
    assert result.exit_code == 2  # click sees a folder before the load
    blocked = Path("/dev/full")
    if blocked.exists():
        output = call("run", "--url", URL, "--json", str(good), "--csv", str(blocked), code=1)
        assert "cannot be written" in output
        assert good.exists()


@pytest.mark.parametrize("command", ["run", "stream", "sweep", "compare", "capacity"])
def test_help_defines_every_figure(command):
    output = " ".join(call(command, "--help").split())
    for definition in DEFINITIONS:
        assert definition.name in output


def test_the_line_of_progress():
    line = progress_line(
        "8 clients",
        LoadProgress(
            phase=Phase.MEASURING, elapsed_seconds=12.3, max_requests=100, num_running=8, num_completed=48, num_failed=2,
            output_tokens_per_second=412.4, max_send_lag_seconds=0.2,
        ),
    )  # fmt: skip
    bar = "█" * 12 + "░" * 12
    assert line == (
        f"8 clients  {bar}  measuring 12 s  running 8  done 50/100 (2 failed)  412 tokens/s  sent up to 200 ms late"
    )

"""Settings: file and flags say the same things, unknown keys are fatal, and every error names the key."""

import click
import pytest
from click.testing import CliRunner

from headrace.cli.main import main
from headrace.cli.options import with_settings
from headrace.launch.settings import SECTIONS_WITH_FLAGS, Settings, load_settings, setting_fields
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import BATCH, INTERACTIVE, STANDARD, ServiceClass, Tenant, TrafficPolicy


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    config = tmp_path / "headrace.toml"
    config.write_text("[server]\nport = 9000\nhost = '0.0.0.0'\n[cache]\nprefix_caching = false\n")
    settings = load_settings(str(config), {"port": 9001, "host": None})
    assert (settings.server.port, settings.server.host, settings.cache.prefix_caching) == (9001, "0.0.0.0", False)
    assert settings.scheduler == Settings().scheduler


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1\n", "prot"),
        ("[sever]\nport = 1\n", "sever"),
        ("[server]\nport = 'x'\n", "server.port"),
        ("[server]\nport = 70000\n", "server.port"),
        ("[cache]\nkv_cache_gib = -1.0\n", "cache.kv_cache_gib"),
        ("[model]\nprecision = 'int3'\n", "model.precision"),
        ("[server]\nkeep_alive_seconds = inf\n", "server.keep_alive_seconds"),
        ("[server]\nsse_ping_seconds = 0.000001\n", "server.sse_ping_seconds"),
        ("[operation]\nhang_timeout_seconds = inf\n", "operation.hang_timeout_seconds"),
        ("[server\n", "TOML"),
        ("[server]\nprot = 1\n", "unknown key `server.prot`"),
        ("[classes.gold]\nlevle = 1\n", "unknown key `classes.gold.levle`"),
        ("[classes.batch]\nlevel = 'x'\n", "classes.batch.level"),
        ("[classes.batch]\nttft_target_ms = 0\n", "classes.batch.ttft_target_ms"),
        ("[classes.batch]\nweight = 1001\n", "classes.batch.weight"),
        ("[classes]\nbatch = 1\n", "classes.batch"),
        ("classes = 1\n", "classes"),
        ("[tenants.acme]\nwight = 1\n", "unknown key `tenants.acme.wight`"),
        ("[tenants.acme]\nweight = 0\n", "tenants.acme.weight"),
        ("[operation]\nstall_threshold_ms = 0\n", "operation.stall_threshold_ms"),
        ("[operation]\ntrace_sample_ratio = 1.5\n", "operation.trace_sample_ratio"),
        ("[operation]\ndebug_requests = 0\n", "operation.debug_requests"),
        ("[operation]\nadmin_token = ''\n", "operation.admin_token"),
        ("[operation]\nadmin_token = 'two words'\n", "operation.admin_token"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, named):
    config = tmp_path / "headrace.toml"
    config.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        load_settings(str(config), {})


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigurationError, match="nowhere"):
        load_settings("/nowhere/headrace.toml", {})


def test_contradictions_are_refused():
    with pytest.raises(ConfigurationError, match="--max-num-batched-tokens"):
        load_settings(None, {"max_num_seqs": 64, "max_num_batched_tokens": 32})


def test_every_setting_is_a_flag_with_help_and_a_unique_name():
    fields = setting_fields()
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.help for field in fields)
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    assert all(field.flag in shown for field in fields)


def test_the_cli_gives_the_command_one_settings_object(monkeypatch):
    seen = []

    @click.command()
    @with_settings()
    def probe(settings: Settings) -> None:
        seen.append(settings)

    monkeypatch.setenv("HEADRACE_MAX_NUM_SEQS", "7")
    result = CliRunner().invoke(probe, ["--port", "1234", "--no-prefix-caching"])
    assert result.exit_code == 0, result.output
    assert (seen[0].server.port, seen[0].scheduler.max_num_seqs, seen[0].cache.prefix_caching) == (1234, 7, False)


def test_a_configuration_error_is_one_line_and_exit_code_1():
    result = CliRunner().invoke(main, ["serve", "--max-num-batched-tokens", "1"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: --max-num-batched-tokens (1)")


def load(tmp_path, text, **flags):
    config = tmp_path / "headrace.toml"
    config.write_text(text)
    return load_settings(str(config), flags)


def test_without_tables_the_traffic_is_the_usual_one():
    assert Settings().traffic() == TrafficPolicy()


def test_a_table_changes_only_the_named_keys_of_a_usual_class(tmp_path):
    traffic = load(tmp_path, "[classes.batch]\nmax_queued_requests = 7\nweight = 3\n").traffic()
    assert traffic.classes[:2] == (INTERACTIVE, STANDARD)
    changed = traffic.classes[2]
    assert (changed.max_queued_requests, changed.weight) == (7, 3.0)
    assert (changed.level, changed.ttft_target_ms, changed.max_queued_tokens) == (2, 600_000, BATCH.max_queued_tokens)


def test_a_class_of_ones_own_stands_where_its_level_is(tmp_path):
    text = "[classes.gold]\nlevel = 0\nttft_target_ms = 500\ntbt_target_ms = 50\n[classes.interactive]\nlevel = 1\n"
    traffic = load(tmp_path, text, default_class="gold").traffic()
    assert traffic.class_names == ("gold", "interactive", "standard", "batch")
    assert traffic.classes[0] == ServiceClass(name="gold", level=0, ttft_target_ms=500, tbt_target_ms=50)
    assert traffic.default_class == "gold"


def test_tenants_are_added_to_the_two_that_are_always_there(tmp_path):
    traffic = load(tmp_path, "[tenants.acme]\nweight = 2\n[tenants.default]\nweight = 0.5\n[tenants.bob]\n").traffic()
    assert traffic.tenants == (
        Tenant(name="default", weight=0.5),
        Tenant(name="other"),
        Tenant(name="acme", weight=2.0),
        Tenant(name="bob"),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[classes.gold]\nlevel = 0\nttft_target_ms = 5\n", "`classes.gold` is a new class: it must give tbt_target_ms"),
        ("[classes.gold]\n", "level, ttft_target_ms, tbt_target_ms"),
        ("[server]\ndefault_class = 'gold'\n", "'gold' is none of interactive, standard, batch"),
        ("[tenants.'a b']\n", "letters, digits"),
        ("[classes.'']\n", "letters, digits"),
        ("".join(f"[classes.c{i}]\nlevel = 1\nttft_target_ms = 5\ntbt_target_ms = 5\n" for i in range(6)), "1 to 8"),
        ("".join(f"[tenants.t{i}]\n" for i in range(255)), "at most 256 tenants"),
    ],
)
def test_traffic_that_cannot_be_is_refused(tmp_path, text, named):
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, text)


def test_classes_and_tenants_have_no_flags_and_the_help_says_where_they_are():
    assert {"classes", "tenants"} == set(Settings.__struct_fields__) - set(SECTIONS_WITH_FLAGS)
    shown = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    assert "[classes.NAME]" in shown
    assert "[tenants.NAME]" in shown


def test_the_admin_token_is_taken_from_the_environment_and_shown_nowhere(monkeypatch):
    seen = []

    @click.command()
    @with_settings()
    def probe(settings: Settings) -> None:
        seen.append(settings)

    monkeypatch.setenv("HEADRACE_ADMIN_TOKEN", "hush-hush")
    assert CliRunner().invoke(probe, []).exit_code == 0
    settings = seen[0]
    assert settings.operation.admin_token == "hush-hush"
    assert settings.without_secrets().operation.admin_token is None
    assert settings.without_secrets().server == settings.server
    assert "hush-hush" not in repr(settings)
    assert "hush-hush" not in CliRunner().invoke(main, ["serve", "--help"]).output


def test_admission_is_by_forecast_or_by_bounds_alone():
    assert load_settings(None, {}).server.admission == "forecast"
    assert load_settings(None, {"admission": "bounds"}).server.admission == "bounds"
    with pytest.raises(ConfigurationError, match="admission"):
        load_settings(None, {"admission": "never"})

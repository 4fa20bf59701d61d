"""Settings: file and flags say the same things, unknown keys are fatal, and every error names the key."""

import click
import pytest
from click.testing import CliRunner

from headrace.cli.main import main
from headrace.cli.options import with_settings
from headrace.launch.settings import Settings, load_settings, setting_fields
from headrace.protocol.errors import ConfigurationError


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

"""Each command takes the options that mean something to it, and says whose an option is that it does not take."""

import click
import pytest
from click.testing import CliRunner

from headrace.cli.main import main
from headrace.launch.settings import setting_fields

MODEL_FLAGS = {"--model", "--precision", "--cache-dir"}
EXPECTED = {
    "run": {
        *MODEL_FLAGS,
        *("--quantize-activations", "--compute-precision", "--max-num-batched-tokens", "--max-model-len"),
        *("--kv-cache-gib", "--kv-cache-memory-fraction", "--kv-cache-precision", "--threads"),
    },
    "prepare": MODEL_FLAGS,
    "models": {"--cache-dir"},
    "doctor": {"--cache-dir", "--host", "--port"},
    "serve": {field.flag for field in setting_fields()},
}


def invoke(*arguments, **options):
    return CliRunner().invoke(main, arguments, **options)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_command_has_the_settings_that_it_uses(name):
    settings = {field.flag for field in setting_fields()}
    command = main.commands[name]
    flags = {option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts}
    assert flags & settings == EXPECTED[name]


@pytest.mark.parametrize(
    ("arguments", "owners"),
    [
        (["run", "--record", "x", "Hello"], "headrace serve"),
        (["run", "--admin-token", "a", "Hello"], "headrace serve"),
        (["run", "Hello", "--otlp-endpoint=http://127.0.0.1:4318"], "headrace serve"),
        (["run", "--log-level", "debug", "Hello"], "headrace serve"),
        (["prepare", "--record", "x"], "headrace serve"),
        (["prepare", "--threads", "2"], "headrace serve and headrace run"),
        (["models", "--model", "x"], "headrace serve, headrace run and headrace prepare"),
        (["doctor", "--no-prefix-caching"], "headrace serve"),
        (["serve", "--stats"], "headrace run"),
        (["simulate", "--drain-seconds", "1"], "headrace serve"),
    ],
)
def test_an_option_of_another_command_is_a_usage_error_that_says_whose_it_is(arguments, owners):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    flag = next(word for word in arguments if word.startswith("--")).partition("=")[0]
    assert result.output.endswith(f"Error: No such option '{flag}'. It is an option of {owners}.\n")


def commands(command=main, path=()):
    """All commands, those that are imported when called for too, with the words that call them."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def options_with_fractions():
    settings = {field.flag for field in setting_fields()}
    for path, command in commands():
        for parameter in command.params:
            is_fraction = isinstance(parameter, click.Option) and isinstance(parameter.type, click.types.FloatParamType)
            if is_fraction and parameter.opts[0] not in settings:
                yield pytest.param(parameter, id=" ".join((*path, parameter.opts[-1])))


@pytest.mark.parametrize("option", list(options_with_fractions()))
def test_no_option_takes_what_is_no_number(option):
    """NaN is below no bound and above none: a plain range lets it through."""
    with pytest.raises(click.BadParameter, match="nan is not a number"):
        option.type.convert("nan", option, None)


@pytest.mark.parametrize("flag", [field.flag for field in setting_fields() if field.kind is float])
def test_no_setting_takes_what_is_no_number(flag):
    """Settings have their bounds in the configuration, for files and the environment too."""
    result = invoke("serve", flag, "nan")
    assert result.exit_code != 0
    assert "Error: configuration: Expected `float`" in result.output


def test_an_option_that_no_command_has_is_corrected():
    result = invoke("serve", "--prot", "1")
    assert result.exit_code == 2
    assert "--port" in result.output
    assert "It is an option of" not in result.output


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "headrace.toml"
    file.write_text(
        f"[model]\ncache_dir = '{tmp_path / 'cache'}'\n[operation]\ndebug_requests = 5\n[classes.batch]\nweight = 2\n"
    )
    return file


def test_a_file_for_the_server_serves_other_commands_too(config, tmp_path):
    result = invoke("models", "--config", str(config))
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "cache") in result.output


def test_an_unknown_key_of_the_file_is_fatal_for_other_commands_too(config):
    config.write_text(config.read_text() + "[server]\nprot = 1\n")
    result = invoke("models", "--config", str(config))
    assert (result.exit_code, "server.prot" in result.output) == (1, True)


def test_one_answer_needs_no_more_tokens_in_a_step_than_one(monkeypatch):
    """The bound by the number of sequences is the server's: `run` has one."""
    seen = []
    monkeypatch.setattr("headrace.launch.local.answer", lambda settings, *_: seen.append(settings.scheduler))
    result = invoke("run", "--max-num-batched-tokens", "16", "Hello", env={"HEADRACE_MAX_NUM_SEQS": "64"})
    assert result.exit_code == 0, result.output
    assert (seen[0].max_num_seqs, seen[0].max_num_batched_tokens) == (1, 16)


def test_the_help_of_the_file_names_the_tables_only_where_they_count():
    assert "[classes.NAME]" in " ".join(invoke("serve", "--help").output.split())
    assert "[classes.NAME]" not in " ".join(invoke("run", "--help").output.split())


def test_most_choices_are_bounded_as_the_product_is():
    """What the help promises is what a request may ask for: prompts times n have a bound that no setting raises."""
    (field,) = (field for field in setting_fields() if field.name == "max_choices")
    from headrace.gateway.http.settings import HttpSettings

    bound = HttpSettings().max_sequences
    assert f"at most {bound}" in field.help
    result = invoke("serve", "--max-choices", str(bound + 1))
    assert (result.exit_code, "server.max_choices" in result.output) == (1, True)

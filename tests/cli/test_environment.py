"""Variables named HEADRACE_*: the known ones are settings, a mistyped one is fatal, those of Kubernetes are passed over."""

import click
import pytest
from click.testing import CliRunner

from headrace.cli.bench_options import KEY_VARIABLES
from headrace.cli.main import LAZY_COMMANDS, main
from headrace.launch.environment import KNOWN_VARIABLES, check_environment
from headrace.protocol.errors import ConfigurationError

KUBERNETES = {
    "HEADRACE_SERVICE_HOST": "10.0.0.7",
    "HEADRACE_SERVICE_PORT": "8000",
    "HEADRACE_SERVICE_PORT_HTTP": "8000",
    "HEADRACE_PORT": "tcp://10.0.0.7:8000",
    "HEADRACE_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "HEADRACE_PORT_8000_TCP_PROTO": "tcp",
    "HEADRACE_PORT_8000_TCP_PORT": "8000",
    "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.7",
    "HEADRACE_GPU_SERVICE_HOST": "10.0.0.8",
    "HEADRACE_GPU_PORT": "udp://[fd00::8]:53",
    "HEADRACE_GPU_PORT_53_UDP_ADDR": "fd00::8",
}


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("HEADRACE_PROT", "HEADRACE_PORT"), ("HEADRACE_ADMIN_TOKENS", "HEADRACE_ADMIN_TOKEN"), ("HEADRACE_SERVER_PORT", "")],
)
def test_an_unknown_variable_is_named_with_what_may_be_meant(name, suggested):
    with pytest.raises(ConfigurationError) as raised:
        check_environment({"PATH": "/bin", name: "1"})
    assert name in raised.value.message
    assert suggested in raised.value.message


def test_all_unknown_variables_are_named():
    with pytest.raises(ConfigurationError, match=r"HEADRACE_FOO.*HEADRACE_XYZZY"):
        check_environment({"HEADRACE_XYZZY": "1", "HEADRACE_FOO": "1"})


def test_known_variables_unset_ones_and_those_of_others_pass():
    check_environment(dict.fromkeys(KNOWN_VARIABLES, "1") | {"HEADRACE_PROT": "", "HEADRACER": "1", "MY_HEADRACE_PROT": "1"})
    assert {"HEADRACE_ADMIN_TOKEN", "HEADRACE_CACHE_DIR", "HEADRACE_PORT", "HEADRACE_CONFIG"} <= KNOWN_VARIABLES


def test_what_kubernetes_says_about_a_service_of_our_name_passes():
    check_environment(KUBERNETES)


@pytest.mark.parametrize("name", ["HEADRACE_SERVICE_HOSTS", "HEADRACE_GPU_PORT", "HEADRACE_PORT_X_TCP", "HEADRACE_SERVICE"])
def test_what_only_looks_like_it_does_not_pass(name):
    with pytest.raises(ConfigurationError, match=name):
        check_environment({name: "8000"})


def all_commands(group, ctx):
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield command
        if isinstance(command, click.Group):
            yield from all_commands(command, ctx)


def test_every_variable_of_every_command_is_known():
    found = set(KEY_VARIABLES)
    for command in all_commands(main, click.Context(main)):
        for parameter in command.params:
            names = getattr(parameter, "envvar", None) or ()
            found.update([names] if isinstance(names, str) else names)
    assert LAZY_COMMANDS.keys() <= set(main.list_commands(click.Context(main)))
    assert {name for name in found if name.startswith("HEADRACE_")} == KNOWN_VARIABLES


@pytest.mark.parametrize("arguments", [["serve"], ["models"], ["doctor"], ["run", "Hello"]])
def test_a_mistyped_variable_ends_a_command_before_it_does_anything(arguments):
    result = CliRunner().invoke(main, arguments, env={"HEADRACE_PROT": "1"})
    assert result.exit_code == 1
    assert result.output == "Error: environment: unknown variable HEADRACE_PROT (did you mean HEADRACE_PORT?)\n"


def test_the_port_that_kubernetes_gives_is_not_ours(monkeypatch):
    seen = []

    async def serve(settings):
        seen.append(settings.server.port)
        return 0

    monkeypatch.setattr("headrace.launch.serve.serve", serve)
    for variables in (KUBERNETES, {"HEADRACE_PORT": "9000"}):
        assert CliRunner().invoke(main, ["serve"], env=variables).exit_code == 0
    assert seen == [8000, 9000]

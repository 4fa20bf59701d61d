"""Click options made from the settings table, so that a flag and a key of headrace.toml can never differ.

Owns: with_settings, whose_option. Runs in: CLI. Must not know: what a setting does.
"""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from headrace.launch.environment import check_environment, is_service_address
from headrace.launch.settings import SettingField, load_settings, setting_fields

KINDS: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}
CONFIG_HELP = "A TOML file with the same settings in tables; flags win over it. Unknown keys are fatal. "
TABLES_HELP = (
    "Only there: service classes, [classes.NAME] with level, weight, ttft_target_ms, tbt_target_ms, queue_timeout_ms, "
    "max_queued_requests, max_queued_tokens, and tenants, [tenants.NAME] with weight."
)


class _SettingOption(click.Option):
    """An option whose variable may also be one of Kubernetes', which is then passed over."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value is not None and is_service_address(str(self.envvar), value) else value


def _option(field: SettingField) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = {True: "on", False: "off"}[field.default] if field.kind is bool else field.default
    shown = "" if default is None else f"  [default: {default}]"
    is_switch = field.kind is bool
    names = f"{field.flag}/--no-{field.flag[2:]}" if is_switch else field.flag
    kind = None if is_switch else click.Choice(field.choices) if field.choices else KINDS[field.kind]
    return click.option(
        names, field.name, cls=_SettingOption, type=kind, default=None, envvar=field.variable, help=field.help + shown
    )


def with_settings(*names: str, **fixed: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command --config and the flags of these settings (without names: of all); it is called with `settings`.

    `fixed`: what the command itself decides, whatever the file says.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = [field for field in setting_fields() if not names or field.name in names]

        @functools.wraps(command)
        def wrapper(config: str | None, **given: Any) -> Any:
            check_environment(os.environ)
            flags = {field.name: given.pop(field.name) for field in fields}
            return command(settings=load_settings(config, flags | fixed), **given)

        decorated: Callable[..., Any] = wrapper
        for field in reversed(fields):
            decorated = _option(field)(decorated)
        text = CONFIG_HELP + ("It may hold those of other commands too." if names else TABLES_HELP)
        return click.option("--config", type=click.Path(), envvar="HEADRACE_CONFIG", help=text)(decorated)

    return decorate


def whose_option(flag: str, commands: Iterable[click.Command]) -> str:
    """ "headrace serve and headrace run" for a flag that these of the commands take; "" when none does."""
    owners = [
        f"headrace {command.name}"
        for command in commands
        if any(flag in (*parameter.opts, *parameter.secondary_opts) for parameter in command.params)
    ]
    return " and ".join(part for part in (", ".join(owners[:-1]), *owners[-1:]) if part)

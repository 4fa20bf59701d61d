"""Click options made from the settings table, so that a flag and a key of headrace.toml can never differ.

Owns: with_settings. Runs in: CLI. Must not know: what a setting does.
"""

import functools
from collections.abc import Callable
from typing import Any

import click

from headrace.launch.settings import SECTIONS_WITH_FLAGS, SettingField, load_settings, setting_fields

KINDS: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


def _option(field: SettingField) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    environment = "HEADRACE_" + field.name.upper()
    default = {True: "on", False: "off"}[field.default] if field.kind is bool else field.default
    shown = "" if default is None else f"  [default: {default}]"
    text = field.help + shown
    if field.kind is bool:
        return click.option(f"{field.flag}/--no-{field.flag[2:]}", field.name, default=None, envvar=environment, help=text)
    kind = click.Choice(field.choices) if field.choices else KINDS[field.kind]
    return click.option(field.flag, field.name, type=kind, default=None, envvar=environment, help=text)


def with_settings(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command --config and the flags of these sections; it is called with `settings` in their place."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = setting_fields(sections or SECTIONS_WITH_FLAGS)

        @functools.wraps(command)
        def wrapper(config: str | None, **given: Any) -> Any:
            flags = {field.name: given.pop(field.name) for field in fields}
            return command(settings=load_settings(config, flags), **given)

        decorated: Callable[..., Any] = wrapper
        for field in reversed(fields):
            decorated = _option(field)(decorated)
        return click.option(
            "--config",
            type=click.Path(),
            envvar="HEADRACE_CONFIG",
            help="A TOML file with the same settings in tables; flags win over it. Unknown keys are fatal. Only there: service "
            "classes, [classes.NAME] with level, weight, ttft_target_ms, tbt_target_ms, queue_timeout_ms, max_queued_requests, "
            "max_queued_tokens, and tenants, [tenants.NAME] with weight.",
        )(decorated)

    return decorate

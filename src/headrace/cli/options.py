"""Click options made from the settings table, so that a flag and a key of headrace.toml can never differ.

Owns: with_settings. Runs in: CLI. Must not know: what a setting does.
"""

import functools
from collections.abc import Callable
from typing import Any

import click

from headrace.launch.settings import SettingField, Settings, load_settings, setting_fields

KINDS: dict[type, click.ParamType[Any]] = {int: click.INT, float: click.FLOAT, str: click.STRING}


def _option(field: SettingField) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    environment = "HEADRACE_" + field.name.upper()
    shown = "" if field.default is None else f"  [default: {'on' if field.default is True else field.default}]"
    text = field.help + shown
    if field.kind is bool:
        return click.option(f"{field.flag}/--no-{field.flag[2:]}", field.name, default=None, envvar=environment, help=text)
    kind = click.Choice(field.choices) if field.choices else KINDS[field.kind]
    return click.option(field.flag, field.name, type=kind, default=None, envvar=environment, help=text)


def with_settings(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command --config and the flags of these sections; it is called with `settings` in their place."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        fields = setting_fields(sections or Settings.__struct_fields__)

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
            help="A TOML file with the same settings in tables; flags win over it. Unknown keys are fatal.",
        )(decorated)

    return decorate

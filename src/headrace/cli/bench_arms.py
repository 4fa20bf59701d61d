"""The sides of a comparison as they are written on the command line.

Owns: ServerSpec, the syntax of --server, --variant and lists of loads. Runs in: CLI. Must not know: how arms are measured.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import click

from headrace.loadtest.records import RunSettings

_NAME = re.compile(r"[\w.+-][\w .+-]{0,39}")
_SERVER_PART = re.compile(r",(?=(?:model|key)=)")


class ServerSpec(NamedTuple):
    """One --server. `key` is the secret itself, taken from the variable that was named."""

    name: str
    url: str
    model: str | None
    key: str | None


def parse_server(text: str, environment: Mapping[str, str] = os.environ) -> ServerSpec:
    """NAME=URL[,model=ID][,key=VARIABLE]. BadParameter for anything else, or a variable that is not set."""
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise click.BadParameter(f"{text!r}: give NAME=URL[,model=ID][,key=VARIABLE], NAME of letters, digits, . + - _")
    url, *options = _SERVER_PART.split(rest)
    if not url:
        raise click.BadParameter(f"{text!r} has no URL")
    given: dict[str, str] = {}
    for option in options:
        what, _, value = option.partition("=")
        if what in given or not value:
            raise click.BadParameter(f"{text!r}: {what} is given twice or empty")
        given[what] = value
    key = None
    if variable := given.get("key"):
        key = environment.get(variable)
        if not key:
            raise click.BadParameter(
                f"{text!r}: the environment variable {variable} is not set (key= takes its name, not the key)"
            )
    return ServerSpec(name, url, given.get("model"), key)


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError
    return text == "yes"


def _api(text: str) -> str:
    if text not in ("chat", "completions"):
        raise ValueError
    return text


# What a variant may change: name on the command line -> (field of RunSettings, how it is read).
VARIANT_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "api": ("api", _api),
    "clients": ("num_clients", _whole),
    "rate": ("rate", _positive),
    "prompt-tokens": ("prompt_tokens", _whole),
    "output-tokens": ("output_tokens", _whole),
    "scale": ("length_scale", _positive),
    "shared-prefix-tokens": ("shared_prefix_tokens", lambda text: int(_not_negative(text))),
    "salt": ("is_salted", _yes),
    "stream": ("is_stream", _yes),
    "temperature": ("temperature", _not_negative),
}


def parse_variant(text: str) -> tuple[str, dict[str, object]]:
    """NAME:SETTING=VALUE[,SETTING=VALUE] -> (name, fields of RunSettings to change). NAME alone changes nothing."""
    name, _, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise click.BadParameter(f"{text!r}: give NAME or NAME:SETTING=VALUE[,SETTING=VALUE]")
    changes: dict[str, object] = {}
    for part in rest.split(",") if rest else []:
        setting, _, value = part.partition("=")
        if setting not in VARIANT_SETTINGS:
            raise click.BadParameter(f"{setting!r} is no setting of a variant; these are: {', '.join(VARIANT_SETTINGS)}")
        field, read = VARIANT_SETTINGS[setting]
        if field in changes:
            raise click.BadParameter(f"{text!r}: {setting} is given twice")
        try:
            changes[field] = read(value)
        except ValueError:
            raise click.BadParameter(f"{text!r}: {value!r} is no value for {setting}") from None
    return name, changes


def check_variant(name: str, settings: RunSettings, changes: Mapping[str, object]) -> None:
    """A change that the run would not look at is refused."""
    is_closed = settings.arrival == "closed"
    if is_closed and "rate" in changes:
        raise click.UsageError(f"variant {name!r} changes the rate of a closed loop; give --rate to make it an open one")
    if not is_closed and "num_clients" in changes:
        raise click.UsageError(f"variant {name!r} changes the clients of an open loop")


def parse_loads(text: str, *, is_whole: bool) -> list[float]:
    """1,2,4,8 -> the loads of a sweep, in rising order. BadParameter for anything that is not two or more numbers above 0."""
    read = _whole if is_whole else _positive
    try:
        loads = sorted({float(read(part.strip())) for part in text.split(",")})
    except ValueError:
        what = "whole numbers" if is_whole else "numbers"
        raise click.BadParameter(f"{text!r}: give {what} above 0 with commas between, such as 1,2,4,8") from None
    if len(loads) < 2:
        raise click.BadParameter(f"{text!r}: a sweep takes two or more different loads")
    return loads

"""Several kinds of requests in one run: how a mix is written, and the preset that provokes head-of-line blocking.

Owns: MixClass, parse_mix, HEAD_OF_LINE. Runs in: load tool. Must not know: texts, arrival times.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from headrace.loadtest.request_drafts import WorkloadError

MIX_FORM = (
    "a mix is NAME=WEIGHT:WORKLOAD, several joined by ';', such as "
    "'interactive=0.7:fixed:128,64;documents=0.3:long-document:4096,64', or the name of a .toml or .json file"
)
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # a token of RFC 9110


class MixClass(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One kind of request. Its name is the group that figures are reported for."""

    name: str
    weight: float  # of all weights together: its share of the requests (of conversations, for chat)
    workload: str
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    length_scale: float | None = None  # None: the run's
    extra: dict[str, str] = {}
    headers: dict[str, str] = {}  # of its requests, such as x-headrace-class; no secrets: a mix is named in reports


class _MixFile(msgspec.Struct, forbid_unknown_fields=True):
    classes: list[MixClass] = msgspec.field(name="class")


def head_of_line_classes(long_prompt_tokens: int | None, stream_tokens: int | None) -> tuple[MixClass, ...]:
    """Steady streams of short prompts, and a tenth of long prompts among them."""
    return (
        MixClass(name="streams", weight=0.9, workload="fixed", prompt_tokens=64, output_tokens=stream_tokens or 128),
        MixClass(name="long-prompts", weight=0.1, workload="fixed", prompt_tokens=long_prompt_tokens or 2048, output_tokens=16),
    )


def parse_mix(text: str) -> tuple[MixClass, ...]:
    """Read a mix from its short form, or from a TOML or JSON file of [[class]] tables with MixClass's fields.

    Raises WorkloadError, in words for the user.
    """
    classes = _from_file(Path(text)) if text.endswith((".toml", ".json")) else tuple(_from_text(part) for part in _parts(text))
    if not classes:
        raise WorkloadError(f"an empty mix; {MIX_FORM}")
    names = [item.name for item in classes]
    if len(set(names)) < len(names) or not all(names):
        raise WorkloadError(f"the classes of a mix need different names, not {', '.join(names)}")
    if not all(0 < item.weight < float("inf") for item in classes):
        raise WorkloadError("the weights of a mix must be positive numbers")
    for item in classes:
        for name, value in item.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isprintable() or not value.isascii():
                raise WorkloadError(f"class {item.name!r}: {name!r}: {value!r} is no header")
    return classes


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _from_text(part: str) -> MixClass:
    name, equals, rest = part.partition("=")
    weight, colon, workload = rest.partition(":")
    try:
        share = float(weight)
    except ValueError:
        raise WorkloadError(f"{part!r}: {weight!r} is no weight; {MIX_FORM}") from None
    if not equals or not colon or not workload:
        raise WorkloadError(f"{part!r}: {MIX_FORM}")
    return MixClass(name=name.strip(), weight=share, workload=workload.strip())


def _from_file(path: Path) -> tuple[MixClass, ...]:
    try:
        text = path.read_text(encoding="utf-8")
        document: Any = tomllib.loads(text) if path.suffix == ".toml" else msgspec.json.decode(text)
        return tuple(msgspec.convert(document, _MixFile).classes)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: no mix: {error}") from error

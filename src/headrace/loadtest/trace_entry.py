"""One request of a recorded trace, whatever the trace's form, and how the files of traces are opened.

Owns: TraceEntry, TraceError, open_trace. Runs in: load tool, simulator. Must not know: the forms of traces.
"""

import gzip
from pathlib import Path
from typing import TextIO

import msgspec

MOONCAKE_PART_TOKENS = 512  # what one hash id stands for
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """A trace cannot be read; the text says where and why."""


class TraceEntry(msgspec.Struct, frozen=True):
    """One recorded request. `at`: seconds since the first one. Equal ids at equal places of `part_ids`: equal prompt parts."""

    at: float
    prompt_tokens: int
    output_tokens: int
    part_ids: tuple[int, ...] = ()
    group: str = ""
    part_tokens: int = MOONCAKE_PART_TOKENS  # what one of `part_ids` stands for
    service_class: str = ""  # "": the trace knows none
    tenant: str = ""
    priority: int = 0


def open_trace(path: Path) -> TextIO:
    """Open a text file that may be gzipped, which is told from its first bytes. OSError as open() has it."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    if is_gzip:
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open("r", encoding="utf-8", newline="")


def checked(entry: TraceEntry, where: str) -> TraceEntry:
    """Some records have answers of no token; a request cannot ask for that, so it asks for one. TraceError below zero."""
    if entry.prompt_tokens < 0 or entry.output_tokens < 0:
        raise TraceError(f"{where}: a length below zero")
    if entry.prompt_tokens == 0 or entry.output_tokens == 0:
        return msgspec.structs.replace(
            entry, prompt_tokens=max(1, entry.prompt_tokens), output_tokens=max(1, entry.output_tokens)
        )
    return entry

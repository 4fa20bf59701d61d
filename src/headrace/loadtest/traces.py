"""Recorded traffic, read a line at a time: when each request came, how long it was, and what it shared with others.

Owns: read_trace, the readers of Azure's CSV, Mooncake's JSONL and our own saved runs. Runs in: load tool.
Must not know: texts, servers.
"""

import csv
import datetime
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from headrace.loadtest.record_file import UNREADABLE, entries_of_record
from headrace.loadtest.trace_entry import MOONCAKE_PART_TOKENS, TraceEntry, TraceError, checked, open_trace
from headrace.protocol.record import RECORD_FORMAT

__all__ = ["MOONCAKE_PART_TOKENS", "TraceEntry", "TraceError", "parse_timestamp", "read_trace"]

MAX_OWN_RECORD_BYTES = 1 << 30
MAX_LAST_TICK_SECONDS = 10.0
HEADER_CHARACTERS = 200  # a record names its format among the first


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int | None = None, seed: int = 0) -> Iterator[TraceEntry]:
    """The entries of a trace in order of time, at most `limit`; lazily, so that a long file costs no memory.

    The format is told from the content: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure); JSON lines with
    timestamp, input_length, output_length, hash_ids (Mooncake); a record of `headrace serve --record`; a report saved by this
    tool with its records. Any of them may be gzipped. Raises TraceError.
    """
    return itertools.islice(_entries(path, seed), limit)


def _entries(path: Path, seed: int) -> Iterator[TraceEntry]:
    try:
        with open_trace(path) as file:
            first_line = file.readline()
            file.seek(0)
            if "contexttokens" in first_line.lower():
                yield from _azure(file, path)
            elif RECORD_FORMAT in first_line[:HEADER_CHARACTERS]:
                yield from entries_of_record(path)
            elif '"input_length"' in first_line:
                yield from _spread_ticks(_mooncake(file, path), seed)
            elif first_line.lstrip().startswith("{"):
                yield from _own_record(file.read(MAX_OWN_RECORD_BYTES), path)
            else:
                raise TraceError(f"{path}: no trace of a known form; it starts with {first_line[:60]!r}")
    except UNREADABLE as error:
        raise TraceError(f"{path}: {error}") from error


def _azure(file: TextIO, path: Path) -> Iterator[TraceEntry]:
    rows = csv.DictReader(file)
    names = {name.strip().lower(): name for name in rows.fieldnames or []}
    missing = {"timestamp", "contexttokens", "generatedtokens"} - names.keys()
    if missing:
        raise TraceError(f"{path}: the columns {', '.join(sorted(missing))} are missing")
    start: datetime.datetime | None = None
    latest = 0.0
    for number, row in enumerate(rows, start=2):
        try:
            moment = parse_timestamp(row[names["timestamp"]])
            prompt, output = int(row[names["contexttokens"]]), int(row[names["generatedtokens"]])
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        start = start or moment
        at = (moment - start).total_seconds()
        if at < latest:
            raise TraceError(f"{path}, line {number}: the time goes back by {latest - at:.3f} s")
        latest = at
        yield checked(TraceEntry(at, prompt, output), f"{path}, line {number}")


def parse_timestamp(text: str) -> datetime.datetime:
    """ISO 8601 with any number of decimals (Azure writes seven); without a zone it is UTC. Raises ValueError."""
    whole, dot, rest = text.strip().partition(".")
    digits = "".join(itertools.takewhile(str.isdigit, rest))
    zone = rest[len(digits) :]
    shortened = f"{whole}.{digits[:6].ljust(6, '0')}{zone}" if dot else whole
    moment = datetime.datetime.fromisoformat(shortened)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def _mooncake(file: TextIO, path: Path) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    start: float | None = None
    latest = 0.0
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            item = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        start = item.timestamp if start is None else start
        at = (item.timestamp - start) / 1000
        if at < latest:
            raise TraceError(f"{path}, line {number}: the time goes back by {latest - at:.3f} s")
        latest = at
        yield checked(TraceEntry(at, item.input_length, item.output_length, tuple(item.hash_ids)), f"{path}, line {number}")


def _spread_ticks(entries: Iterator[TraceEntry], seed: int) -> Iterator[TraceEntry]:
    """Requests that share a coarse time stamp are strewn over the time to the next one, in their order.

    The published times are whole ticks of some 3 s; taken as they are, ten requests would come at once and none in between.
    """
    source = random.Random(f"{seed}:ticks")  # noqa: S311 - not for secrets
    tick_seconds = 0.0
    ticks = itertools.groupby(entries, key=lambda entry: entry.at)
    waiting: tuple[float, list[TraceEntry]] | None = None
    for at, group in ticks:
        if waiting is not None:
            tick_seconds = at - waiting[0]
            yield from _strewn(*waiting, tick_seconds, source)
        waiting = at, list(group)
    if waiting is not None:
        yield from _strewn(*waiting, min(tick_seconds, MAX_LAST_TICK_SECONDS), source)


def _strewn(at: float, entries: list[TraceEntry], seconds: float, source: random.Random) -> Iterator[TraceEntry]:
    if len(entries) == 1:
        yield entries[0]
        return
    offsets = sorted(source.random() * seconds for _ in entries)
    for entry, offset in zip(entries, offsets, strict=True):
        yield msgspec.structs.replace(entry, at=at + offset)


def _own_record(text: str, path: Path) -> Iterator[TraceEntry]:
    """The requests of all runs of a saved report (or of one run alone), laid one run after the other."""
    try:
        document = msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}: neither a trace nor a saved report: {error}") from error
    runs = [document] if "requests" in document and isinstance(document["requests"], list) else _saved_runs(document)
    if not runs:
        raise TraceError(f"{path}: no records of requests in it; save it with them")
    offset = 0.0
    for run in runs:
        try:
            found = sorted(
                (
                    float(record["scheduled"]),
                    int(record.get("prompt_tokens") or record.get("target_prompt_tokens") or 0),
                    int(record.get("output_tokens") or record.get("target_output_tokens") or 0),
                    str(record.get("group", "")),
                )
                for record in run["requests"]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}: a record without its time or lengths: {error!r}") from error
        begin = found[0][0] if found else 0.0
        for scheduled, prompt, output, group in found:
            if prompt > 0 and output > 0:  # a request that failed before its lengths were known says nothing
                yield TraceEntry(offset + scheduled - begin, prompt, output, (), group)
        offset += found[-1][0] - begin if found else 0.0


def _saved_runs(document: dict[str, Any]) -> list[dict[str, Any]]:
    report = document.get("report")
    sections = report.get("sections", []) if isinstance(report, dict) else []
    return [run for section in sections for run in section.get("runs", []) if run.get("requests")]

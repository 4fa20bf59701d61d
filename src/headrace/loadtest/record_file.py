"""A server's record (`headrace serve --record`), read: its lines, and the requests in it as entries of a trace.

Owns: read_record, entries_of_record. Runs in: load tool, simulator. Must not know: who wrote it.
docs/record.md describes the form, protocol/record.py is the form.
"""

import heapq
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.loadtest.trace_entry import TraceEntry, TraceError, checked, open_trace
from headrace.protocol.record import RECORD_FORMAT, RECORD_VERSION, RecordArrival, RecordEnd, RecordHeader, RecordLine

REORDER_US = 30_000_000  # an arrival stands in the file at most so long after a later one
ENDED_BY_MODEL = frozenset({"stop", "length"})
ENDED_BY_CLIENT = "abort"
UNREADABLE = (OSError, UnicodeDecodeError, EOFError, zlib.error)


class _Form(msgspec.Struct):
    """What any version begins with."""

    type: str = ""
    format: str = ""
    version: int = 0


class RecordReader(Iterator[RecordLine]):
    """The lines of a record, the header first, in the file's order: nearly that of time (see protocol/record.py).

    A line that ends before its closing brace was cut when its writer was killed, or when the disk or the file was full: it is
    counted in `num_cut_lines` and passed over. Anything else that is no line of a record raises TraceError, with its number.
    """

    def __init__(self, path: Path) -> None:
        self.num_cut_lines = 0
        self._path = path
        self._lines = self._read()

    def __next__(self) -> RecordLine:
        return next(self._lines)

    def _read(self) -> Iterator[RecordLine]:
        decoder: msgspec.json.Decoder[RecordLine] = msgspec.json.Decoder(RecordLine)
        try:
            with open_trace(self._path) as file:
                yield self._header(file.readline())
                for number, text in enumerate(file, start=2):
                    line = text.strip()
                    if not line:
                        continue
                    if not line.endswith("}"):
                        self.num_cut_lines += 1
                        continue
                    try:
                        found = decoder.decode(line)
                    except msgspec.MsgspecError as error:
                        raise TraceError(f"{self._path}, line {number}: no line of a record: {error}") from error
                    if isinstance(found, RecordHeader):
                        raise TraceError(f"{self._path}, line {number}: a second header: these are several records")
                    yield found
        except UNREADABLE as error:
            raise TraceError(f"{self._path}: {error}") from error

    def _header(self, text: str) -> RecordHeader:
        try:
            form = msgspec.json.decode(text, type=_Form)
            if form.type != "header" or form.format != RECORD_FORMAT:
                raise TraceError(f"{self._path}: no record: its first line is not the header of one")
            if form.version != RECORD_VERSION:
                raise TraceError(f"{self._path}: a record of version {form.version}; version {RECORD_VERSION} can be read")
            return msgspec.json.decode(text, type=RecordHeader)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self._path}, line 1: no header of a record: {error}") from error


def read_record(path: Path) -> RecordReader:
    """The lines of a record, lazily; it may be gzipped. TraceError when reading comes to something that is no record."""
    return RecordReader(path)


def entries_of_record(path: Path) -> Iterator[TraceEntry]:
    """The requests of a record in order of time, refused ones included: they were load as well. Raises TraceError.

    Output tokens are those of the request's end where the model ended it or the client left. Of one that was refused, had not
    ended, or was ended by the server (an error, a deadline), nobody knows how long it would have become: at least what it had,
    else the mean of the answers of its class that the model ended (else of all classes; else as long as it allowed), at most
    the max_tokens that it asked for. `part_ids` are the record's block hashes.

    The file is read twice; in memory are two numbers for each request and the arrivals of REORDER_US.
    """
    ends, means = _read_ends(path)
    reader = read_record(path)
    header = next(reader)
    if not isinstance(header, RecordHeader):
        raise TraceError(f"{path}: no record")
    arrivals = _in_order(line for line in reader if isinstance(line, RecordArrival))
    start_us: int | None = None
    for line in arrivals:
        start_us = line.at_us if start_us is None else start_us
        if not 0 <= line.class_index < len(header.classes):
            raise TraceError(f"{path}: a request of class {line.class_index}, and the header has {len(header.classes)} classes")
        name = header.classes[line.class_index]
        entry = TraceEntry(
            at=(line.at_us - start_us) / 1e6,
            prompt_tokens=line.prompt_tokens,
            output_tokens=_output_tokens(line, ends, means),
            part_ids=tuple(line.blocks),
            group=name,
            part_tokens=header.block_tokens,
            service_class=name,
            tenant=f"tenant{line.tenant_index}",
            priority=line.priority,
        )
        yield checked(entry, f"{path}, the request at {line.at_us} us")


Ends = dict[tuple[int, int], tuple[int, bool]]  # (gateway, id) -> output tokens, whether that is all


def _read_ends(path: Path) -> tuple[Ends, dict[int | None, float]]:
    """How requests ended, and the mean output tokens by class (None: of all) of those that the model ended."""
    ends: Ends = {}
    classes: dict[tuple[int, int], int] = {}  # of requests under way
    sums: dict[int | None, int] = defaultdict(int)
    counts: dict[int | None, int] = defaultdict(int)
    for line in read_record(path):
        if isinstance(line, RecordArrival) and not line.refused:
            classes[line.gateway, line.id] = line.class_index
        elif isinstance(line, RecordEnd):
            key = line.gateway, line.id
            ends[key] = line.output_tokens, line.reason in ENDED_BY_MODEL or line.reason == ENDED_BY_CLIENT
            class_index = classes.pop(key, None)
            if line.reason in ENDED_BY_MODEL:
                for group in {class_index, None}:
                    sums[group] += line.output_tokens
                    counts[group] += 1
    return ends, {group: sums[group] / count for group, count in counts.items()}


def _output_tokens(line: RecordArrival, ends: Ends, means: dict[int | None, float]) -> int:
    found, is_whole = ends.get((line.gateway, line.id), (0, False)) if not line.refused else (0, False)
    if is_whole:
        return found
    mean = means.get(line.class_index, means.get(None))
    likely = line.max_tokens if mean is None else min(line.max_tokens, round(mean))
    return max(found, likely)


def _in_order(arrivals: Iterator[RecordArrival]) -> Iterator[RecordArrival]:
    """By time. One that comes later than REORDER_US allows is moved to the time that the others have reached."""
    waiting: list[tuple[int, int, RecordArrival]] = []
    latest_us = 0
    reached_us: int | None = None
    for number, line in enumerate(arrivals):
        latest_us = max(latest_us, line.at_us)
        if reached_us is not None and line.at_us < reached_us:
            line = msgspec.structs.replace(line, at_us=reached_us)
        heapq.heappush(waiting, (line.at_us, number, line))
        while waiting and waiting[0][0] < latest_us - REORDER_US:
            reached_us = waiting[0][0]
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]

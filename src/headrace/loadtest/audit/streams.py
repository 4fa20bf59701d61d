"""Reading a streamed answer byte by byte: server-sent events and what the OpenAI API puts into them.

Owns: StreamView and its reader; every break of the framing is kept as a sentence. Runs in: audit, pure.
Must not know: sockets, checks. Events after the WHATWG HTML standard, section "Server-sent events".
"""

import bisect
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.loadtest.audit.answers import Usage
from headrace.loadtest.audit.findings import WrongAnswer, quote
from headrace.loadtest.audit.wire import Reply

DONE = "[DONE]"
KNOWN_FIELDS = ("data", "event", "id", "retry")
MAX_FAULTS = 5


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _StreamChoice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] | None = None
    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    usage: Usage | None = None
    error: Any = None


@dataclass(slots=True)
class StreamedChoice:
    """One choice, put together again. `deltas`: its non-empty texts; `role_positions`: which of its events named a role."""

    deltas: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    role_positions: list[int] = field(default_factory=list)
    num_events: int = 0
    num_after_finish: int = 0

    @property
    def text(self) -> str:
        """All deltas joined."""
        return "".join(self.deltas)


@dataclass(slots=True)
class StreamView:
    """What a stream said. `faults`: breaks of the event framing or of the JSON within, as sentences."""

    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    text_times: list[float] = field(default_factory=list)  # arrival of each event with text
    usages: list[Usage] = field(default_factory=list)
    usage_has_choices: bool = False
    num_events: int = 0
    num_done: int = 0
    is_done_last: bool = False
    num_comments: int = 0
    errors: list[str] = field(default_factory=list)
    identities: set[tuple[str | None, str | None, int | None, str | None]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    first_is_role_only: bool = False

    @property
    def text(self) -> str:
        """Of choice 0."""
        return self.choices[0].text if 0 in self.choices else ""

    def add_fault(self, sentence: str) -> None:
        """Keep the first few."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(sentence)


def read_stream(reply: Reply) -> StreamView:
    """Raise WrongAnswer for anything but a 200 with an event stream, whole or cut."""
    if reply.status != 200 or reply.media_type != "text/event-stream":
        raise WrongAnswer(f"no event stream but {reply.header('content-type')}: {reply.summary()}")
    view = StreamView()
    for at, data in _events(reply, view):
        view.num_events += 1
        if data == DONE:
            view.num_done += 1
            view.is_done_last = True
            continue
        view.is_done_last = False
        _read_chunk(data, at, view)
    if reply.fault:
        view.add_fault(f"the connection: {reply.fault}")
    return view


def _events(reply: Reply, view: StreamView) -> list[tuple[float, str]]:
    """Each event's arrival and data. Lines may end with LF, CRLF or CR."""
    body = reply.body
    ends = _arrivals(reply)
    events: list[tuple[float, str]] = []
    lines: list[str] = []
    offset = 0
    for raw in body.splitlines(keepends=True):  # of bytes: only CR, LF and CRLF end a line
        offset += len(raw)
        line = raw.rstrip(b"\r\n")
        if not line:
            if lines:
                events.append((_arrival(ends, offset), "\n".join(lines)))
            lines = []
            continue
        _read_line(line, lines, view)
    if lines:
        view.add_fault("the last event is not ended by a blank line")
        events.append((_arrival(ends, offset), "\n".join(lines)))
    return events


def _read_line(line: bytes, lines: list[str], view: StreamView) -> None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        view.add_fault(f"a line is not UTF-8: {line[:60]!r}")
        text = line.decode("utf-8", "replace")
    name, _, value = text.partition(":")
    if not name:
        view.num_comments += 1
    elif name == "data":
        lines.append(value.removeprefix(" "))
    elif name not in KNOWN_FIELDS:
        view.add_fault(f"a line is no event field: {quote(text)}")


def _read_chunk(data: str, at: float, view: StreamView) -> None:
    try:
        chunk = msgspec.json.decode(data.encode(), type=_Chunk)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        view.add_fault(f"an event is no chunk ({error}): {quote(data)}")
        return
    if chunk.error is not None:
        view.errors.append(data[:300])
        return
    view.identities.add((chunk.id, chunk.object, chunk.created, chunk.model))
    if chunk.usage is not None and chunk.usage.completion_tokens is not None:
        view.usages.append(chunk.usage)
        view.usage_has_choices = view.usage_has_choices or bool(chunk.choices)
    for choice in chunk.choices or ():
        _add(choice, at, view)


def _add(choice: _StreamChoice, at: float, view: StreamView) -> None:
    kept = view.choices.setdefault(choice.index, StreamedChoice())
    delta = choice.delta or _Delta()
    text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or choice.text or "")
    if delta.role is not None:
        kept.role_positions.append(kept.num_events)
    if kept.num_events == 0 and not view.text_times:
        view.first_is_role_only = not text and choice.finish_reason is None
    if kept.finish_reasons and (text or delta.role is not None):
        kept.num_after_finish += 1
    kept.num_events += 1
    if text:
        kept.deltas.append(text)
        view.text_times.append(at)
    if choice.finish_reason is not None:
        kept.finish_reasons.append(choice.finish_reason)


def _arrivals(reply: Reply) -> list[tuple[int, float]]:
    """Cumulative bytes after each piece, and its time."""
    total = 0
    ends = []
    for at, piece in reply.pieces:
        total += len(piece)
        ends.append((total, at))
    return ends


def _arrival(ends: list[tuple[int, float]], offset: int) -> float:
    """When the byte before `offset` had come."""
    if not ends:
        return 0.0
    return ends[min(bisect.bisect_left(ends, (offset,)), len(ends) - 1)][1]

"""Bytes of an event stream -> events -> what each says in the OpenAI form. Whole JSON answers too.

Owns: server-sent events (WHATWG HTML, 9.2.6), the OpenAI chunk and answer shapes. Runs in: load tool; pure.
Must not know: HTTP, clocks, records.
"""

from typing import Any

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_DETAIL_CHARS = 300


class BadStreamError(Exception):
    """The stream's bytes or an event's JSON are not what the protocol allows; the text says where."""


class SseEvent(msgspec.Struct, frozen=True):
    """One dispatched event: its data lines joined by a line feed, and its type ("" when none was given)."""

    data: bytes
    type: str = ""


class SseParser:
    """Feed bytes as they come, in any split. Lines end with LF, CRLF or CR; comments and unknown fields are skipped."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.num_comments = 0
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # of a line whose end has not come
        self._data: list[bytes] = []
        self._num_event_bytes = 0
        self._type = ""
        self._ends_with_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that this chunk completes. BadStreamError when one grows past its bound."""
        if self._ends_with_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._ends_with_cr = False
        if b"\r" in chunk:
            self._ends_with_cr = chunk.endswith(b"\r")  # that CR ends the line already; an LF to come belongs to it
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        events: list[SseEvent] = []
        for piece in ended:
            line = piece
            if self._line:
                self._line += piece
                line = bytes(self._line)
                self._line.clear()
            self._take_line(line, events)
        self._line += rest
        if len(self._line) + self._num_event_bytes > self._max_event_bytes:
            raise BadStreamError(f"an event is over {self._max_event_bytes} bytes")
        return events

    @property
    def is_inside_event(self) -> bool:
        """Whether bytes of an event came whose end did not (such an event is dropped at the stream's end)."""
        return bool(self._line or self._data)

    def _take_line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._is_first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._is_first = False
        if not line:
            if self._data:
                events.append(SseEvent(b"\n".join(self._data), self._type))
            self._data, self._num_event_bytes, self._type = [], 0, ""
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._num_event_bytes += len(line) + 1
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif not name:
            self.num_comments += 1


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server states them; None where it does not."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


class Said(msgspec.Struct):
    """What one event, or one whole answer, says.

    `num_chars`: characters of text, whatever the field: content, reasoning, refusal, names and arguments of tool calls.
    """

    num_chars: int = 0
    spoken_choices: tuple[int, ...] = ()  # indices of choices with text
    finishes: tuple[tuple[int, str], ...] = ()  # (index of the choice, reason)
    usage: Usage | None = None
    error: str | None = None
    is_done: bool = False


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None  # of a flat error object


_decode_body = msgspec.json.Decoder(_Body, strict=False).decode


def read_event(event: SseEvent) -> Said:
    """One event of a stream. BadStreamError when its data is neither [DONE] nor JSON of the known shape."""
    if event.data.strip() == b"[DONE]":
        return Said(is_done=True)
    said = read_answer(event.data)
    if event.type == "error" and said.error is None:
        said.error = bounded(event.data.decode("utf-8", "replace"))
    return said


def read_answer(data: bytes) -> Said:
    """One JSON object: a chunk or a whole answer. BadStreamError when it is not of the known shape."""
    try:
        body = _decode_body(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadStreamError(f"{error}: {bounded(data.decode('utf-8', 'replace'), 120)}") from None
    said = Said()
    if body.error is not None:
        said.error = error_text(body.error)
    elif body.object == "error":
        said.error = error_text(body.message)
    if body.usage is not None:
        details = body.usage.prompt_tokens_details
        said.usage = Usage(
            body.usage.prompt_tokens, body.usage.completion_tokens, details.cached_tokens if details is not None else None
        )
    for choice in body.choices or ():
        num_chars = len(choice.text or "") + _num_message_chars(choice.delta) + _num_message_chars(choice.message)
        if num_chars:
            said.num_chars += num_chars
            said.spoken_choices += (choice.index,)
        if choice.finish_reason is not None:
            said.finishes += ((choice.index, choice.finish_reason),)
    return said


def _num_message_chars(message: _Message | None) -> int:
    if message is None:
        return 0
    if isinstance(message.content, list):
        num_chars = sum(len(part["text"]) for part in message.content if isinstance(part.get("text"), str))
    else:
        num_chars = len(message.content or "")
    # Servers that send both names for the same reasoning text send it once for the reader.
    num_chars += len(message.reasoning_content or message.reasoning or "") + len(message.refusal or "")
    for call in message.tool_calls or ():
        if call.function is not None:
            num_chars += len(call.function.name or "") + len(call.function.arguments or "")
    return num_chars


def error_text(error: object) -> str:
    """An error value of any dialect (object with message, text, ...) as one bounded line."""
    if isinstance(error, dict):
        code, kind, message = error.get("code"), error.get("type"), error.get("message")
        known = [str(part) for part in (code, kind, message) if part not in (None, "")]
        if known:
            return bounded(": ".join(known))
    text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    return bounded(text or "an error without words")


def bounded(text: str, max_chars: int = MAX_DETAIL_CHARS) -> str:
    """One line of at most `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"

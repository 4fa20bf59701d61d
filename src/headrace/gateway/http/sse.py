"""Event-stream frames of the two endpoints, as bytes.

Owns: the framing and the constant JSON around a token's text. Runs in: gateway. Pure: must not know sockets or streams.

Everything that does not change from token to token is encoded once for each choice; a token costs one JSON string and one
concatenation. Frames follow the "text/event-stream" format of the HTML standard: one `data:` line, a blank line.
"""

import msgspec

from headrace.gateway.http.schemas import UsageBlock
from headrace.telemetry.reports import RequestReport

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.encode


def json_text(text: str) -> bytes:
    """`text` as a JSON string in which no reader can see a line's end.

    JSON lets U+0085, U+2028 and U+2029 stand as they are, and some clients split lines at them; so they are escaped here.
    The encoder itself escapes everything below U+0020.
    """
    encoded = _encode(text)
    if not text.isascii() and (b"\xe2\x80" in encoded or b"\xc2\x85" in encoded):
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        encoded = encoded.replace(b"\xc2\x85", b"\\u0085")
    return encoded


class Envelope:
    """What all chunks of one answer share: id, time, model. `object_name` tells the endpoints apart.

    `service_tier`: named in every chunk when it was spoken of.
    """

    __slots__ = ("head", "usage_tail")

    def __init__(
        self,
        object_name: str,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        include_usage: bool,
        service_tier: str | None = None,
    ) -> None:
        fields: dict[str, str | int] = {"id": answer_id, "object": object_name, "created": created, "model": model}
        if service_tier is not None:
            fields["service_tier"] = service_tier
        self.head = b"data: " + _encode(fields | {"system_fingerprint": fingerprint})[:-1] + b","
        self.usage_tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def usage_event(self, usage: UsageBlock) -> bytes:
        """The chunk before [DONE] for those who asked for it."""
        return self.head + b'"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def timeline_event(self, reports: list[RequestReport]) -> bytes:
        """The last chunk before [DONE], also after an error, for those who asked for it."""
        return self.head + b'"choices":[],"timeline":' + _encode(reports) + self.usage_tail


class ChatChoiceFrames:
    """Frames of one choice of a chat completion. The first carries the role, together with the first text."""

    __slots__ = ("_first", "_head", "_index_head", "_started", "_tail", "_usage_tail")

    def __init__(self, envelope: Envelope, index: int) -> None:
        self._index_head = envelope.head + b'"choices":[{"index":%d,"delta":' % index
        self._first = self._index_head + b'{"role":"assistant","content":'
        self._head = self._index_head + b'{"content":'
        self._usage_tail = envelope.usage_tail
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + envelope.usage_tail
        self._started = False

    def text_event(self, text: str) -> bytes:
        """A chunk with text."""
        if self._started:
            return self._head + json_text(text) + self._tail
        self._started = True
        return self._first + json_text(text) + self._tail

    def last_event(self, text: str, finish_reason: str, stop_string: str | None) -> bytes:
        """The choice's last chunk, with what text is left."""
        if not self._started:
            delta = self._first + json_text(text) + b"}"
        else:
            delta = self._head + json_text(text) + b"}" if text else self._index_head + b"{}"
        self._started = True
        return delta + b',"logprobs":null' + _ending(finish_reason, stop_string) + self._usage_tail


class TextChoiceFrames:
    """Frames of one choice of a text completion. `echo` is put before the first text."""

    __slots__ = ("_echo", "_head", "_tail", "_usage_tail")

    def __init__(self, envelope: Envelope, index: int, echo: str = "") -> None:
        self._head = envelope.head + b'"choices":[{"index":%d,"text":' % index
        self._usage_tail = envelope.usage_tail
        self._tail = b',"logprobs":null,"finish_reason":null}]' + envelope.usage_tail
        self._echo = echo

    def text_event(self, text: str) -> bytes:
        """A chunk with text."""
        if self._echo:
            text, self._echo = self._echo + text, ""
        return self._head + json_text(text) + self._tail

    def last_event(self, text: str, finish_reason: str, stop_string: str | None) -> bytes:
        """The choice's last chunk, with what text is left."""
        if self._echo:
            text, self._echo = self._echo + text, ""
        return self._head + json_text(text) + b',"logprobs":null' + _ending(finish_reason, stop_string) + self._usage_tail


def error_event(body: bytes) -> bytes:
    """The frame for a fault after the stream began. `body`: a rendered error object."""
    return b"data: " + body + b"\n\n"


def _ending(finish_reason: str, stop_string: str | None) -> bytes:
    stop_reason = b"null" if stop_string is None else json_text(stop_string)
    return b',"finish_reason":' + _encode(finish_reason) + b',"stop_reason":' + stop_reason + b"}]"

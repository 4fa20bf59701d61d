"""Request bodies: media type, size, nesting, decoding, and the names of fields that nobody knows.

Owns: the way from bytes to a request struct. Runs in: gateway. Must not know: what the fields mean.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Generic, TypeVar

import msgspec

from headrace.gateway.http.errors import decoding_error
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.telemetry.logs import get_logger

T = TypeVar("T", bound=msgspec.Struct)

MAX_CONTAINERS = 100_000  # lists and objects in one body
MAX_IGNORED_NAMES = 20
MAX_IGNORED_NAME_CHARS = 40

log = get_logger("http")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # to the end where unterminated: linear whatever comes
_DEPTH_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in _DEPTH_STEP)
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_RAW_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class BodyReader(Generic[T]):
    """Reads bodies of one type. `nested`: fields that hold objects whose names are checked too."""

    def __init__(
        self, body_type: type[T], settings: HttpSettings, nested: Mapping[str, type[msgspec.Struct]] | None = None
    ) -> None:
        self._settings = settings
        self._decoder = msgspec.json.Decoder(body_type)
        self._known = _names(body_type)
        self._nested = {field: _names(struct) for field, struct in (nested or {}).items()}

    async def read(self, exchange: Exchange) -> T:
        """Decode the body, and note unknown fields in the exchange. Raises RequestError 400, 408, 413, 415; ClientGoneError."""
        check_media_type(exchange)
        body = await exchange.read_body(self._settings.max_body_bytes, self._settings.body_seconds)
        check_nesting(body, self._settings.max_json_depth)
        try:
            request = self._decoder.decode(body)
            ignored = list(self._unknown(body))
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
            raise decoding_error(error) from None
        if ignored:
            exchange.ignored_fields = ", ".join(ignored).encode()
            log.info(
                "unknown fields of a request were ignored",
                request_id=exchange.request_id.decode(),
                route=exchange.route,
                fields=ignored,
            )
        return request

    def _unknown(self, body: bytes) -> Iterator[str]:
        """Names of fields that are not known, made harmless, each once and not too many."""
        fields = _RAW_OBJECT.decode(body)
        names = {name: None for name in fields if name not in self._known}
        for field, known in self._nested.items():
            raw = bytes(fields.get(field, b"null")).lstrip()
            if raw.startswith(b"["):
                names |= {f"{field}[].{name}": None for item in _RAW_OBJECTS.decode(raw) for name in item if name not in known}
            elif raw.startswith(b"{"):
                names |= {f"{field}.{name}": None for name in _RAW_OBJECT.decode(raw) if name not in known}
        for count, name in enumerate(names):
            if count == MAX_IGNORED_NAMES:
                yield f"and-{len(names) - count}-more"
                return
            yield _UNSAFE.sub("_", name[:MAX_IGNORED_NAME_CHARS])


def check_media_type(exchange: Exchange) -> None:
    """Raise RequestError 415 unless the body is declared as JSON in UTF-8, or nothing is declared."""
    declared = exchange.headers.get(b"content-type", b"").decode("latin-1").lower()
    media_type, _, parameters = declared.partition(";")
    media_type = media_type.strip()
    charset = re.search(r'charset="?([\w-]+)', parameters)
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise RequestError("The content type must be application/json.", code=ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise RequestError("The body's charset must be utf-8.", code=ErrorCode.UNSUPPORTED_MEDIA_TYPE)
    if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError("Compressed bodies are not taken.", code=ErrorCode.UNSUPPORTED_MEDIA_TYPE)


def check_nesting(body: bytes, max_depth: int) -> None:
    """Raise RequestError when lists and objects are nested deeper than `max_depth`, or are too many.

    Few bodies have so many brackets at all; only for those are strings taken out and depths added up.
    """
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= max_depth:
        return
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise RequestError("The request body has too many lists and objects.", code=ErrorCode.INVALID_JSON)
    if max(accumulate(map(_DEPTH_STEP.__getitem__, brackets)), default=0) > max_depth:
        message = f"The request body is nested too deeply: at most {max_depth} levels are taken."
        raise RequestError(message, code=ErrorCode.INVALID_JSON)


def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    fields: tuple[Any, ...] = struct.__struct_encode_fields__
    return frozenset(fields)

"""Errors in OpenAI's shape, and decoding faults in plain words.

Owns: the one function that renders a RequestError. Runs in: gateway. Must not know: routes.
An error body never repeats what the client sent, and stays below 4 KiB, but for the timeline of those who asked for one.
"""

import re
from typing import Any

import msgspec

from headrace.protocol.errors import ErrorCode, RequestError
from headrace.telemetry.reports import RequestReport

MAX_MESSAGE_CHARS = 800
MAX_PARAM_CHARS = 120

_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


def error_body(error: RequestError, timeline: list[RequestReport] | None = None) -> bytes:
    """`{"error": {message, type, param, code}}` as JSON, bounded whatever the error says; a timeline beside it if given."""
    status = error.code.value.http_status
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    message = error.message if len(error.message) <= MAX_MESSAGE_CHARS else error.message[:MAX_MESSAGE_CHARS] + " ..."
    param = error.param[:MAX_PARAM_CHARS] if error.param else None
    content = {"message": _encodable(message), "type": kind, "param": param, "code": error.code.value.code}
    body: dict[str, Any] = {"error": content}
    if timeline is not None:
        body["timeline"] = timeline
    return msgspec.json.encode(body)


def error_headers(error: RequestError, http_version: str) -> list[tuple[bytes, bytes]]:
    """Retry-After where the error knows when to come again: whole seconds, at least 1. WWW-Authenticate with a 401.

    x-headrace-reject-reason where the request was turned away at the door. Connection: close from a server that is stopping,
    so that no proxy sends its next request this way; HTTP/2 has no such header (RFC 9113, 8.2.2) and says GOAWAY at the end.
    """
    if error.code is ErrorCode.UNAUTHORIZED:
        return [(b"www-authenticate", b"Bearer")]
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % max(1, error.retry_after_seconds)))
    if error.reject_reason is not None:
        headers.append((b"x-headrace-reject-reason", error.reject_reason.value.encode()))
    if error.code is ErrorCode.DRAINING and http_version.startswith("1"):
        headers.append((b"connection", b"close"))
    return headers


def internal_error() -> RequestError:
    """What a client is told of a fault that is the server's own: nothing of its inside."""
    return RequestError("The server failed to handle this request; its log says why.", code=ErrorCode.INTERNAL)


def decoding_error(error: Exception) -> RequestError:
    """A fault found by the JSON decoder, as a RequestError that names the field and never repeats its value."""
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(_malformed(str(error)), code=ErrorCode.INVALID_JSON)
    text = str(error)
    found = _PATH.search(text)
    path = _readable_path(found["path"]) if found else None
    missing = _MISSING.search(text)
    if missing:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestError(f"{param} is required.", param=param)
    subject = path or "The request body"
    expected = _EXPECTED.search(text)
    if expected:
        wanted = _one_of(expected["expected"])
        return RequestError(f"{subject} must be {wanted}, not {_one_of(expected['got'])}.", param=path)
    if "out of range" in text:
        return RequestError(f"{subject} is a number that is out of range.", param=path)
    return RequestError(f"{subject} is not valid.", param=path)


def _malformed(text: str) -> str:
    if "surrogate" in text:
        return "The request body holds half of a UTF-16 surrogate pair (a \\ud8xx escape alone), which is no character."
    if "UTF-8" in text:
        return "The request body is not valid UTF-8."
    if "truncated" in text:
        return "The request body is not complete JSON: it ends too early."
    at = re.search(r"\(byte (\d+)\)", text)
    return "The request body is not valid JSON" + (f": see byte {at[1]}." if at else ".")


def _one_of(types: str) -> str:
    names = [_NAMES.get(name, "an object") for name in types.split(" | ")]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def _readable_path(path: str) -> str | None:
    """`$.messages[0].role` -> `messages[0].role`; keys of maps are shown as [...] by the decoder and left out here."""
    return path.removeprefix("$").removeprefix(".").replace("[...]", "") or None


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()

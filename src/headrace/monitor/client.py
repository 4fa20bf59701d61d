"""Asks one server over HTTP, a few small pages at a time.

Owns: Client. Runs in: CLI, in a thread of its own where it may not hold up the screen. Must not know: what pages mean.

One connection is kept; redirects are not followed, so the token goes to the given address only. Every answer is bounded in size
and in time.
"""

import contextlib
import http.client
import ssl
import time
import urllib.parse

import msgspec

from headrace import __version__
from headrace.monitor.exposition import ExpositionError, read_exposition
from headrace.monitor.scrape import Scrape
from headrace.telemetry.bounded_answer import BoundedAnswer
from headrace.telemetry.reports import DebugRequests

MAX_ANSWER_BYTES = 8 << 20
PIECE_BYTES = 1 << 16
TIMEOUT_SECONDS = 5.0  # of each page
MAX_REASON_CHARACTERS = 300


class NoAnswerError(Exception):
    """The server could not be asked. The message says why."""


class _Health(msgspec.Struct):
    status: str = ""
    reason: str | None = None


class _Version(msgspec.Struct):
    version: str = ""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""


class _Error(msgspec.Struct):
    error: _ErrorBody = _ErrorBody()


class Client:
    """Raises ValueError for an address or a token that cannot be one. Not for use from two threads at once."""

    def __init__(self, url: str, token: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
        if not token.isascii() or not token.isprintable():
            raise ValueError("the admin token has characters that no header can carry")
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._headers = {"User-Agent": f"headrace-top/{__version__}", "Accept": "*/*"}
        self._guarded_headers = self._headers | ({"Authorization": f"Bearer {token}"} if token else {})
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_seconds, context=context)
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_seconds)
        self._connection.response_class = BoundedAnswer
        self._model = ""
        self._version = ""

    def look(self, max_requests: int) -> Scrape:
        """All pages once. Never raises for what the server does: see Scrape's errors."""
        at_seconds, unix_seconds = time.monotonic(), time.time()
        try:
            status, body = self._get("/metrics")
            metrics, metrics_error = None, ""
            try:
                if status == 200:
                    metrics = read_exposition(body.decode("utf-8", "replace"))
                else:
                    metrics_error = f"/metrics: {_refusal(status, body)}"
            except ExpositionError as error:
                metrics_error = f"/metrics: {error}"
            is_ready, reason = self._readiness()
            requests, requests_error = self._requests(max_requests)
            if not self._model:
                self._introduce()
        except NoAnswerError as error:
            self._connection.close()
            self._model = ""  # the next that answers may be another
            return Scrape(at_seconds, unix_seconds, error=str(error))
        return Scrape(
            at_seconds=at_seconds,
            unix_seconds=unix_seconds,
            is_ready=is_ready,
            reason=reason,
            model=self._model,
            version=self._version,
            metrics=metrics,
            metrics_error=metrics_error,
            requests=requests,
            requests_error=requests_error,
        )

    def close(self) -> None:
        """Give back the connection."""
        self._connection.close()

    def _readiness(self) -> tuple[bool | None, str]:
        status, body = self._get("/health/ready")
        if status == 200:
            return True, ""
        if status != 503:
            return None, f"/health/ready: {_refusal(status, body)}"
        with contextlib.suppress(msgspec.MsgspecError):
            health = msgspec.json.decode(body, type=_Health)
            return False, (health.reason or health.status)[:MAX_REASON_CHARACTERS]
        return False, ""

    def _requests(self, max_requests: int) -> tuple[DebugRequests | None, str]:
        status, body = self._get(f"/debug/requests?limit={max_requests}", self._guarded_headers)
        if status != 200:
            return None, _refusal(status, body)
        try:
            return msgspec.json.decode(body, type=DebugRequests), ""
        except msgspec.MsgspecError as error:
            return None, f"the answer is not understood: {error}"

    def _introduce(self) -> None:
        """What does not change while a server runs."""
        with contextlib.suppress(msgspec.MsgspecError):
            models = msgspec.json.decode(self._get("/v1/models")[1], type=_Models).data
            self._model = models[0].id if models else ""
        with contextlib.suppress(msgspec.MsgspecError):
            self._version = msgspec.json.decode(self._get("/version")[1], type=_Version).version

    def _get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body. A kept connection that the server has closed meanwhile is opened anew once."""
        is_kept = self._connection.sock is not None
        try:
            return self._exchange(path, headers or self._headers)
        except ConnectionError as error:
            self._connection.close()
            if not is_kept:
                raise NoAnswerError(_because(error)) from None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise NoAnswerError(_because(error)) from None
        try:
            return self._exchange(path, headers or self._headers)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise NoAnswerError(_because(error)) from None

    def _exchange(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection.sock is not None:
            self._connection.sock.settimeout(self._timeout_seconds)  # the answer before used its own up
        self._connection.request("GET", self._prefix + path, headers=headers)
        answer = self._connection.getresponse()
        pieces, num_bytes = [], 0
        while piece := answer.read1(PIECE_BYTES):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise NoAnswerError(f"the answer of {path} has more than {MAX_ANSWER_BYTES >> 20} MiB")
        answer.close()  # read to its end: the connection is free for the next page
        return answer.status, b"".join(pieces)


def _because(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _refusal(status: int, body: bytes) -> str:
    """HTTP status and, where the body is an error object, its words."""
    with contextlib.suppress(msgspec.MsgspecError):
        message = msgspec.json.decode(body, type=_Error).error.message
        if message:
            return f"HTTP {status}: {message[:MAX_REASON_CHARACTERS]}"
    return f"HTTP {status}"

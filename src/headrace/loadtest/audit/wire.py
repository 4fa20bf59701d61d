"""One HTTP exchange as data: what is asked, what came back and when. Exact bytes are the evidence of an audit.

Owns: Target, Ask, Reply and the ports Exchanger and Clock. Runs in: audit. Must not know: sockets, OpenAI's API.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """The one server that is asked. `base_path` comes before every path; a trailing /v1 of the given URL is not part of it."""

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Raise ValueError, with words for people, for anything but http(s)://host[:port][/path]."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// address.")
        if parts.username or parts.password:
            raise ValueError("Leave names and passwords out of the address; a key is given with --key.")
        if parts.query or parts.fragment:
            raise ValueError("Leave ? and # out of the address.")
        base = parts.path.rstrip("/")
        return cls(parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme], base.removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address, without /v1."""
        return f"{self.scheme}://{self.authority}{self.base_path}"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    `lane`: exchanges of the same lane share one kept connection, "" opens a new one. `drop`: once it is set the connection is
    cut. `on_piece` is called after the headers and after each piece of the body. `body_limit`: only so many bytes of the body
    are sent, and the rest never follows.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    timeout_seconds: float = 60.0
    lane: str = ""
    drop: asyncio.Event | None = None
    on_piece: "Callable[[Reply], None] | None" = None
    body_limit: int | None = None
    is_chunked: bool = False  # send the body in chunks, without a Content-Length


@dataclass(slots=True)
class Reply:
    """What came back, filled in as it arrives. Times are seconds of the exchanger's clock.

    `fault` is "" or says what went wrong on the way: "timeout", "connect: ...", "cut: ...", "malformed: ...". `is_whole`: the
    body ended as it was announced.
    """

    request: str
    sent_at: float
    status: int | None = None
    http_version: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)  # names in lower case
    headers_at: float | None = None
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    num_body_bytes: int = 0
    ended_at: float | None = None
    is_whole: bool = False
    is_dropped: bool = False
    is_reused: bool = False  # came over a connection that had served before
    fault: str = ""

    @property
    def body(self) -> bytes:
        """All that came, transfer coding removed."""
        return b"".join(piece for _, piece in self.pieces)

    def header(self, name: str) -> str | None:
        """The first header of that (lower case) name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def media_type(self) -> str:
        """Content-Type without parameters, in lower case."""
        return (self.header("content-type") or "").split(";")[0].strip().lower()

    @property
    def seconds(self) -> float:
        """From the sending to the end."""
        return (self.ended_at if self.ended_at is not None else self.sent_at) - self.sent_at

    def json(self) -> Any:
        """The body's value, or None when it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def summary(self) -> str:
        """Status and the beginning of the body, for evidence."""
        if self.status is None:
            return self.fault or "no answer"
        text = self.body[:160].decode("utf-8", "replace")
        return f"{self.status}{' (' + self.fault + ')' if self.fault else ''} {text}".strip()


class Exchanger(Protocol):
    """Carries requests to the one server and brings replies. Faults on the way stand in the reply; nothing is raised."""

    async def exchange(self, ask: Ask) -> Reply:
        """One request and its reply."""
        ...


class Clock(Protocol):
    """Time as the checks see it."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

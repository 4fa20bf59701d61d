"""One request over HTTP/1.1 -> its record, with times taken as bytes arrive. The one file that knows aiohttp.

Owns: connections, time stamps, the mapping of network faults to error kinds. Runs in: load tool (client process).
Must not know: when requests are due, processes, figures.
"""

import asyncio
import datetime
import email.utils
import functools
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self

from headrace.protocol.extras import how_to_install

try:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
except ImportError as missing:
    raise ImportError(f"headrace bench needs aiohttp: {how_to_install('bench')}") from missing

from headrace.loadtest.answers import StreamAnswer, end_with_status, fail, take_whole_answer
from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.sse_events import BadStreamError, SseParser, bounded, error_text, read_answer

# Idle connections are dropped before common servers drop theirs (5 s), so that none is written to just as it is closed.
IDLE_SECONDS = 4.0
TAIL_SECONDS = 1.0  # how long the body's end may follow its end mark before the connection is given up
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BODY_BYTES = 64 * 1024
WARM_TIMEOUT_SECONDS = 10.0

_WITH_USAGE = b',"stream":true,"stream_options":{"include_usage":true}}'
_WITHOUT_USAGE = b',"stream":true}'


class UnreachableError(Exception):
    """No connection to the server could be made; the text is the reason."""


class _StampingHandler(ResponseHandler):
    """Notes when bytes arrive, before anything is done with them.

    A server that makes a step for all its streams wakes many sockets at once. Their readers run one after another; the stamp
    of the last one must not carry the time that the others took.
    """

    __slots__ = ("arrived_at",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.arrived_at = 0.0

    def data_received(self, data: bytes) -> None:
        if data:
            self.arrived_at = time.monotonic()
        super().data_received(data)


class _StampedResponse(aiohttp.ClientResponse):
    """Keeps hold of the connection's protocol, which carries the stamp; aiohttp lets go of it at the body's end."""

    _stamps: _StampingHandler | None = None

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        if isinstance(connection.protocol, _StampingHandler):
            self._stamps = connection.protocol
        return await super().start(connection)

    @property
    def arrived_at(self) -> float:
        """When the newest bytes came, on the monotonic clock; now, should the connection not be a stamping one."""
        return self._stamps.arrived_at if self._stamps is not None else time.monotonic()


class LiveCounts:
    """What a live display shows of text that is still coming."""

    def __init__(self) -> None:
        self.num_texts = 0


class HttpClient:
    """Sends requests to one URL. `origin` is the run's start on the monotonic clock: set it before the first `perform`."""

    def __init__(self, url: str, headers: dict[str, str], *, timeout_seconds: float, opens_new_connections: bool) -> None:
        self.url = url
        self.origin = 0.0
        self.asks_usage = True  # until the server refuses stream_options
        self.server_header = ""
        self.live = LiveCounts()
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._opens_new_connections = opens_new_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if self._opens_new_connections:
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, keepalive_timeout=IDLE_SECONDS)
        # aiohttp has no public place for this. Should it go, responses fall back to stamps at reading time, and a test fails.
        connector._factory = functools.partial(_StampingHandler, asyncio.get_running_loop())  # type: ignore[assignment]
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=_StampedResponse,
            trace_configs=[self._tracing()],
            timeout=self._timeout,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def warm(self, url: str, num_connections: int) -> None:
        """Open connections ahead of the clock by as many small GETs at once. UnreachableError when none could be opened."""
        errors = await asyncio.gather(*(self._warm_one(url) for _ in range(num_connections)))
        if errors and all(error is not None for error in errors):
            raise UnreachableError(errors[0])

    async def perform(self, body: bytes, record: RequestRecord, headers: Mapping[str, str] | None = None) -> None:
        """Send one request and fill its record; faults end there, and nothing but cancellation is raised.

        `body`: a JSON object, not empty, without stream fields. `headers`: of this request, over those of all. A cancelled
        request keeps what came, as UNFINISHED.
        """
        asks_usage = record.is_stream and self.asks_usage
        detail = await self._attempt(body, record, headers, asks_usage=asks_usage)
        if asks_usage and record.status == 400 and ("stream_options" in detail or "include_usage" in detail):
            self.asks_usage = False
            _forget_attempt(record)
            await self._attempt(body, record, headers, asks_usage=False)

    async def _attempt(self, body: bytes, record: RequestRecord, headers: Mapping[str, str] | None, *, asks_usage: bool) -> str:
        """The text of an error body, if one came."""
        if record.is_stream:
            body = body[:-1] + (_WITH_USAGE if asks_usage else _WITHOUT_USAGE)
        try:
            async with self._open_session.post(
                self.url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=record
            ) as response:
                return await self._receive(response, record)
        except TimeoutError:
            where = "waiting for headers" if record.headers_at is None else "within the answer"
            fail(record, "timeout", f"after {self._timeout.total:g} s, {where}", self._now())
        except aiohttp.ClientConnectorError as error:
            fail(record, "connect", str(error), self._now())
        except BadStreamError as error:
            fail(record, "bad_stream", str(error), self._now())
        except aiohttp.ClientResponseError as error:
            fail(record, "bad_http", error.message, self._now())
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            where = "before the headers: " if record.headers_at is None else "within the answer: "
            fail(record, "cut", where + (str(error) or type(error).__name__), self._now())
        except aiohttp.ClientError as error:
            fail(record, "http_client", f"{type(error).__name__}: {error}", self._now())
        return ""

    async def _receive(self, response: aiohttp.ClientResponse, record: RequestRecord) -> str:
        record.status = response.status
        record.headers_at = self._arrived(response)
        if not self.server_header:
            self.server_header = bounded(response.headers.get("Server", ""), 100)
        if response.status != 200:
            record.retry_after = retry_after_seconds(response.headers.get("Retry-After"), time.time())
            data = await self._read_bounded(response, MAX_ERROR_BODY_BYTES)
            detail = _error_detail(data)
            end_with_status(record, response.status, detail, self._arrived(response))
            return data.decode("utf-8", "replace")
        is_event_stream = response.content_type == "text/event-stream"
        if record.is_stream and is_event_stream:
            await self._read_stream(response, record)
        elif record.is_stream:
            fail(record, "not_a_stream", f"asked for a stream, got {response.content_type}", self._arrived(response))
            response.close()
        else:
            data = await self._read_bounded(response, MAX_ANSWER_BYTES)
            take_whole_answer(record, data, self._arrived(response))
        return ""

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        parser, answer = SseParser(), StreamAnswer(record)
        read = response.content.readany
        has_limit = False
        try:
            async with asyncio.timeout(None) as limit:
                while data := await read():
                    at = self._arrived(response)
                    for event in parser.feed(data):
                        self.live.num_texts += answer.take(event, at)
                    if answer.is_done and not has_limit:
                        limit.reschedule(asyncio.get_running_loop().time() + TAIL_SECONDS)
                        has_limit = True
        except TimeoutError:
            if not answer.is_done:
                raise
            response.close()
        except aiohttp.ClientError:
            if not answer.is_done:  # a cut after the end mark harms nobody
                raise
        else:
            answer.close(self._now())

    async def _read_bounded(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        pieces, num_bytes = [], 0
        while num_bytes <= max_bytes and (data := await response.content.readany()):
            pieces.append(data)
            num_bytes += len(data)
        if num_bytes > max_bytes:
            response.close()
        return b"".join(pieces)[:max_bytes]

    async def _warm_one(self, url: str) -> str | None:
        """Why no connection could be made; None when one was (whatever the answer)."""
        timeout = aiohttp.ClientTimeout(total=WARM_TIMEOUT_SECONDS)
        try:
            async with self._open_session.get(url, allow_redirects=False, timeout=timeout) as response:
                await self._read_bounded(response, MAX_ERROR_BODY_BYTES)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            return str(error)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None  # it is there, and slow or odd: the requests will tell
        return None

    def _tracing(self) -> aiohttp.TraceConfig:
        """Hooks for what aiohttp does before an answer: it connects, and writes (the body's first piece goes with the head)."""

        async def note_begin(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
            context.connect_begin = time.monotonic()

        async def note_end(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
            if isinstance(record := context.trace_request_ctx, RequestRecord):
                record.connect_seconds = time.monotonic() - context.connect_begin

        async def note_write(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
            if isinstance(record := context.trace_request_ctx, RequestRecord) and not hasattr(context, "is_written"):
                record.sent = self._now()
                context.is_written = True

        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_start.append(note_begin)
        tracing.on_connection_create_end.append(note_end)
        tracing.on_request_chunk_sent.append(note_write)
        return tracing

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its context")
        return self._session

    def _now(self) -> float:
        return time.monotonic() - self.origin

    def _arrived(self, response: aiohttp.ClientResponse) -> float:
        stamp = response.arrived_at if isinstance(response, _StampedResponse) else time.monotonic()
        return stamp - self.origin


def _forget_attempt(record: RequestRecord) -> None:
    record.outcome, record.error_kind, record.error_detail = Outcome.UNFINISHED, "", ""
    record.status = record.headers_at = record.ended = record.connect_seconds = record.retry_after = None


def _error_detail(data: bytes) -> str:
    try:
        return read_answer(data).error or bounded(data.decode("utf-8", "replace"))
    except BadStreamError:
        return error_text(data.decode("utf-8", "replace"))


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """A Retry-After field (RFC 9110, 10.2.3: seconds or a date) as seconds from `now` (Unix time); None when absent or odd."""
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=datetime.UTC)
    return max(0.0, at.timestamp() - now)

"""A thin HTTP/1.1 client that keeps every byte and its arrival time, and can cut a connection at will.

Owns: RawClient. Runs in: audit. Must not know: OpenAI's API, judgements.

RFC 9112 framing. It follows no redirects, so that nothing but the given server is ever asked.
"""

import asyncio
import ssl
from dataclasses import dataclass

from headrace.loadtest.audit.wire import Ask, Clock, Reply, Target

MAX_LINE_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_BODY_BYTES = 16 * 1024 * 1024
READ_BYTES = 64 * 1024
NO_BODY_STATUSES = (204, 304)


class _MalformedError(Exception):
    """The reply breaks HTTP/1.1's framing."""


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_served: int = 0

    def abort(self) -> None:
        self.writer.transport.abort()


class RawClient:
    """The Exchanger over real sockets. Use `aclose` at the end."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        self._lanes: dict[str, _Connection] = {}
        self._ssl = ssl.create_default_context() if target.scheme == "https" else None

    async def exchange(self, ask: Ask) -> Reply:
        """One request and its reply; see Ask. Faults stand in the reply."""
        reply = Reply(f"{ask.method} {ask.path}", self._clock.now())
        work = asyncio.ensure_future(self._exchange(ask, reply))
        waits = {work}
        dropper = None
        if ask.drop is not None:
            dropper = asyncio.ensure_future(ask.drop.wait())
            waits = {work, dropper}  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, timeout=ask.timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = work.done()
            work.cancel()
            if dropper is not None:
                dropper.cancel()
        if not done:
            reply.is_dropped = dropper is not None and ask.drop is not None and ask.drop.is_set()
            reply.fault = "" if reply.is_dropped else f"timeout after {ask.timeout_seconds:g} s"
        await asyncio.gather(work, return_exceptions=not done)
        if reply.ended_at is None:
            reply.ended_at = self._clock.now()
        return reply

    async def aclose(self) -> None:
        """Close what is kept."""
        for connection in self._lanes.values():
            connection.abort()
        self._lanes.clear()

    async def _exchange(self, ask: Ask, reply: Reply) -> None:
        connection = None
        is_kept = False
        try:
            connection = await self._connection(ask, reply)
            reply.sent_at = self._clock.now()
            connection.writer.write(self._encoded(ask))
            await connection.writer.drain()
            is_kept = await self._read(connection, ask, reply)
        except asyncio.IncompleteReadError:
            reply.fault = "cut: the connection closed " + ("inside the body" if reply.status else "before a status line")
        except _MalformedError as error:
            reply.fault = f"malformed: {error}"
        except (OSError, ssl.SSLError, asyncio.LimitOverrunError, ValueError) as error:
            reply.fault = f"{'cut' if connection else 'connect'}: {type(error).__name__}: {error}"
        finally:
            reply.ended_at = self._clock.now()
            if connection is not None and ask.lane and is_kept:
                connection.num_served += 1
                self._lanes[ask.lane] = connection
            elif connection is not None:
                connection.abort()

    async def _connection(self, ask: Ask, reply: Reply) -> _Connection:
        kept = self._lanes.pop(ask.lane, None) if ask.lane else None
        if kept is not None:
            reply.is_reused = True
            return kept
        reader, writer = await asyncio.open_connection(
            self._target.host, self._target.port, ssl=self._ssl, limit=MAX_LINE_BYTES
        )
        return _Connection(reader, writer)

    def _encoded(self, ask: Ask) -> bytes:
        headers = [("Host", self._target.authority), *ask.headers]
        if ask.is_chunked:
            headers.append(("Transfer-Encoding", "chunked"))
        elif ask.body or ask.method not in ("GET", "HEAD", "OPTIONS"):
            headers.append(("Content-Length", str(len(ask.body))))
        if not ask.lane:
            headers.append(("Connection", "close"))
        head = f"{ask.method} {self._target.base_path}{ask.path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        body = ask.body if ask.body_limit is None else ask.body[: ask.body_limit]
        if ask.is_chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        return head.encode("latin-1") + body

    async def _read(self, connection: _Connection, ask: Ask, reply: Reply) -> bool:
        """Fill in the reply. Return whether the connection may serve again."""
        reader = connection.reader
        while True:
            await self._read_head(reader, reply)
            if reply.status is None or reply.status >= 200:
                break
            reply.headers.clear()  # an interim 1xx
        reply.headers_at = self._clock.now()
        if ask.on_piece is not None:
            ask.on_piece(reply)
        coding = (reply.header("transfer-encoding") or "").lower()
        length = reply.header("content-length")
        if ask.method == "HEAD" or reply.status in NO_BODY_STATUSES:
            reply.is_whole = True
        elif coding == "chunked":
            await self._read_chunked(reader, ask, reply)
        elif length is not None:
            if not length.isdecimal():
                raise _MalformedError(f"Content-Length {length!r}")
            await self._read_exactly(reader, int(length), ask, reply)
            reply.is_whole = True
        else:  # until the server closes
            while data := await reader.read(READ_BYTES):
                self._take(data, ask, reply)
            reply.is_whole = True
            return False
        says_close = "close" in (reply.header("connection") or "").lower()
        return reply.http_version == "HTTP/1.1" and not says_close

    async def _read_head(self, reader: asyncio.StreamReader, reply: Reply) -> None:
        line = (await reader.readuntil(b"\r\n")).decode("latin-1").rstrip("\r\n")
        version, _, rest = line.partition(" ")
        status = rest[:3]
        if not (version.startswith("HTTP/1.") and len(status) == 3 and status.isdecimal()):
            raise _MalformedError(f"status line {line[:80]!r}")
        reply.http_version = version
        reply.status = int(status)
        while line := (await reader.readuntil(b"\r\n")).decode("latin-1").rstrip("\r\n"):
            name, colon, value = line.partition(":")
            if not colon or len(reply.headers) >= MAX_HEADERS:
                raise _MalformedError(f"header {line[:80]!r}")
            reply.headers.append((name.strip().lower(), value.strip()))

    async def _read_chunked(self, reader: asyncio.StreamReader, ask: Ask, reply: Reply) -> None:
        while True:
            line = (await reader.readuntil(b"\r\n")).split(b";")[0].strip()
            try:
                size = int(line, 16)
            except ValueError:
                raise _MalformedError(f"chunk size {line[:40]!r}") from None
            if size < 0:
                raise _MalformedError(f"chunk size {line[:40]!r}")
            if size == 0:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass
                reply.is_whole = True
                return
            await self._read_exactly(reader, size, ask, reply)
            if await reader.readexactly(2) != b"\r\n":
                raise _MalformedError("a chunk is longer than it says")

    async def _read_exactly(self, reader: asyncio.StreamReader, size: int, ask: Ask, reply: Reply) -> None:
        left = size
        while left:
            data = await reader.read(min(left, READ_BYTES))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            self._take(data, ask, reply)

    def _take(self, data: bytes, ask: Ask, reply: Reply) -> None:
        reply.pieces.append((self._clock.now(), data))
        reply.num_body_bytes += len(data)
        if reply.num_body_bytes > MAX_BODY_BYTES:
            raise _MalformedError(f"the body is longer than {MAX_BODY_BYTES} bytes")
        if ask.on_piece is not None:
            ask.on_piece(reply)

"""One HTTP request and its answer, on bare ASGI.

Owns: reading a body within its bounds, writing an answer, the request id. Runs in: gateway. Must not know: any API.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from headrace.protocol.errors import ErrorCode, RequestError
from headrace.telemetry.reports import RequestReport

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DIGEST_BYTES = 16
STATUS_CLIENT_GONE = 499  # never sent; what logs and metrics call a request whose client went away

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Exchange:
    """What a handler gets. `route` is the path template for metrics; `status` what was answered, 0 before.

    `received_ns`: when the body was complete (CLOCK_MONOTONIC), 0 before. `body_digest`: BLAKE2b of the body in 16 bytes, b""
    before. `timeline`: what an error's answer tells as well.
    """

    __slots__ = (
        "allowed_methods",
        "body_digest",
        "headers",
        "ignored_fields",
        "method",
        "receive",
        "received_ns",
        "request_id",
        "route",
        "scope",
        "send",
        "status",
        "timeline",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = {name.lower(): value for name, value in scope["headers"]}
        self.request_id = _request_id(self.headers.get(b"x-request-id", b""))
        self.route = "unmatched"
        self.status = 0
        self.received_ns = 0
        self.body_digest = b""
        self.timeline: list[RequestReport] | None = None
        self.ignored_fields = b""
        self.allowed_methods = ""  # set with METHOD_NOT_ALLOWED

    @property
    def path_params(self) -> dict[str, Any]:
        """What the route's template took from the path."""
        params: dict[str, Any] = self.scope.get("path_params", {})
        return params

    def check_host(self) -> None:
        """Raise RequestError for more than one Host (RFC 9112, 3.2): this server and a proxy could each go by another one."""
        if sum(name.lower() == b"host" for name, _ in self.scope["headers"]) > 1:
            raise RequestError("The request has more than one Host header.")

    async def read_body(self, max_bytes: int, within_seconds: float) -> bytes:
        """The whole body. Raises RequestError for one that is too long or too slow, ClientGoneError when the client goes."""
        try:
            async with asyncio.timeout(within_seconds):
                body = await self._read_parts(max_bytes)
        except TimeoutError:
            message = f"The request body did not arrive within {within_seconds:g} seconds."
            raise RequestError(message, code=ErrorCode.REQUEST_TIMEOUT) from None
        self.received_ns = time.monotonic_ns()
        self.body_digest = hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
        return body

    async def _read_parts(self, max_bytes: int) -> bytes:
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def answer_headers(self, content_type: bytes) -> Headers:
        """Headers that every answer has."""
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id)]
        if self.ignored_fields:
            headers.append((b"x-headrace-ignored-fields", self.ignored_fields))
        return headers

    def allow_headers(self) -> Headers:
        """The Allow header of a 405; nothing otherwise."""
        return [(b"allow", self.allowed_methods.encode())] if self.allowed_methods else []

    async def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", headers: Headers | None = None
    ) -> None:
        """Send a whole answer."""
        all_headers = [*self.answer_headers(content_type), (b"content-length", b"%d" % len(body)), *(headers or [])]
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def start_stream(self, content_type: bytes, headers: Headers) -> None:
        """Send status 200 and the headers; the caller sends the body."""
        self.status = 200
        all_headers = [*self.answer_headers(content_type), *headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": all_headers})

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, cancelling it at once when the client goes; then ClientGoneError is raised.

        The body must have been read before: from then on the only thing that can be received is the client's going.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._wait_disconnect())

        def client_gone(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.exception()  # a connection that fails to be read is a connection that is gone
                task.cancel()

        watch.add_done_callback(client_gone)
        try:
            await task
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled() and task.cancelled():
                raise ClientGoneError from None
            task.cancel()
            raise
        finally:
            watch.cancel()

    async def _wait_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _request_id(offered: bytes) -> bytes:
    """The client's id when it is short and harmless, else one made here. Never a key to anything."""
    return offered if _REQUEST_ID.fullmatch(offered) else b"req-" + secrets.token_hex(12).encode()


def _too_large(max_bytes: int) -> RequestError:
    message = f"The request body is longer than {max_bytes} bytes, the most that this server takes."
    return RequestError(message, code=ErrorCode.CONTENT_TOO_LARGE)

"""The HTTP server under the ASGI application.

Owns: the listening socket, HttpServer; the only file that knows Granian. Runs in: gateway. Must not know: what is served.
"""

import errno
import socket
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings, HTTP2Settings
from granian.log import LogLevels
from granian.net import SocketHolder
from granian.server.embed import Server

from headrace.protocol.errors import ConfigurationError

MAX_PING_SECONDS = 30  # between two PINGs on an HTTP/2 connection
PING_ANSWER_SECONDS = 10  # after which a peer that has not answered one is taken for dead

_QUIET_LOGGING = {
    "disable_existing_loggers": False,
    "root": {},
    "handlers": {},
    "formatters": {},
    "loggers": {"_granian": {"propagate": True, "handlers": []}},
}


def bind_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket that no other process shares. Raises ConfigurationError that names the flag to change.

    The server's own way of binding would share a port with any other process that also allows it: two servers on one port
    would each get some of the connections.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=backlog)
    except socket.gaierror as error:
        raise ConfigurationError(f"Cannot resolve --host {host}: {error.strerror}.") from None
    except OSError as error:
        raise ConfigurationError(_why_not_bound(error, host, port)) from None
    listener.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # accepted sockets inherit it: no first token waits for an ACK
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL at which the socket is reached; for an address that means all interfaces, a local one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """HTTP/1.1, and HTTP/2 by prior knowledge, on a socket that listens already.

    Idle HTTP/1.1 connections are closed after `keep_alive_seconds`. HTTP/2 connections are asked by PING whether their peer
    lives, and closed when it does not answer; Granian has no way to close one that lives and is idle.
    """

    def __init__(
        self, app: Any, listener: socket.socket, *, backlog: int, max_connections: int, keep_alive_seconds: float
    ) -> None:
        self._server = _SocketServer(
            app,
            interface=Interfaces.ASGINL,  # no lifespan messages
            http=HTTPModes.auto,
            websockets=False,
            runtime_threads=1,
            backlog=backlog,
            backpressure=max_connections,
            # The time to read a request's head runs from the end of the answer before it: it is the idle timeout as well.
            http1_settings=HTTP1Settings(header_read_timeout=round(keep_alive_seconds * 1000)),
            http2_settings=HTTP2Settings(
                keep_alive_interval=round(min(keep_alive_seconds, MAX_PING_SECONDS) * 1000),
                keep_alive_timeout=PING_ANSWER_SECONDS,
            ),
            log_level=LogLevels.error,
            log_dictconfig=_QUIET_LOGGING,
            log_access=False,
        )
        self._server.listener = listener

    async def serve(self) -> None:
        """Serve until `stop`; then wait for the answers under way. RuntimeError when the server ends by itself."""
        await self._server.serve()
        if not self._server.interrupt_signal:
            raise RuntimeError("the HTTP server ended unexpectedly")

    def stop(self) -> None:
        """Close the listening socket and idle connections; let answers under way end."""
        self._server.stop()


class _SocketServer(Server):  # type: ignore[misc] # Granian is not followed by the type checker
    """Takes a socket that was bound here: Granian's own binding shares the port, and tells neither failure nor number."""

    listener: socket.socket

    def _init_shared_socket(self) -> None:
        self._sfd = self.listener.detach()  # Granian closes it
        self._shd = SocketHolder(self._sfd, False, self.backlog)
        self._ssp = None


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use by another process. Choose another with --port, or 0 for a free one."
    if error.errno == errno.EACCES:
        return f"No permission to listen on port {port}. Choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine. Choose another with --host."
    return f"Cannot listen on {host} port {port}: {error.strerror}. See --host and --port."

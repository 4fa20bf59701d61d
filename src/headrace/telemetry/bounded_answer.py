"""An HTTP answer that must be there within a time, however the server doles it out.

Owns: BoundedAnswer. Runs in: gateway (traces), CLI (the live view). Must not know: what is asked, or of whom.
"""

import http.client
import io
import socket
import time


class BoundedAnswer(http.client.HTTPResponse):
    """A response_class for http.client's connections: the socket's timeout bounds status line, headers and body together.

    By itself it bounds each read only, so that a byte now and then, or "100 Continue" again and again, would hold the caller
    for ever. The time counts from the making of this, which is when the request has gone. Raises TimeoutError. A socket
    without a timeout is not bounded.
    """

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None) -> None:
        super().__init__(sock, debuglevel, method, url)
        timeout_seconds = sock.gettimeout()
        if timeout_seconds is not None:
            self.fp.close()  # the file over the socket, not the socket
            self.fp = io.BufferedReader(_ReadsUntil(sock, time.monotonic() + timeout_seconds))


class _ReadsUntil(io.RawIOBase):
    """The socket's bytes until a moment of time.monotonic(); after it each read raises TimeoutError."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._file = sock.makefile("rb", buffering=0)  # it also keeps a closed connection open until it is read
        self._deadline = deadline

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: object) -> int | None:
        """As io.RawIOBase has it."""
        remaining_seconds = self._deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_seconds)
        return self._file.readinto(buffer)  # type: ignore[arg-type]  # no type for a writable buffer before Python 3.12

    def close(self) -> None:
        """Of the file; the socket when its connection was closed before."""
        self._file.close()
        super().close()

"""Control sockets between the supervisor and its children.

Owns: framing (a line of JSON for each message) and the notice that the peer is gone. Runs in: supervisor, gateway, worker.
Must not know: what a message leads to.
"""

import select
import socket
from typing import Any

import msgspec

from headrace.ipc.doorbell import timeout_ms
from headrace.protocol.control import ControlMessage
from headrace.protocol.errors import HeadraceError

MAX_LINE_BYTES = 64 << 10
MAX_BACKLOG_BYTES = 256 << 10  # what a peer that does not read may leave unsent, beyond the socket's own buffer
_RECEIVE_BYTES = 64 << 10


class ControlError(HeadraceError):
    """A line that is no control message, or a peer that does not read. The first is skipped; the second is a stuck process."""


class ControlEnd:
    """One end of a socket pair. Never blocks. `closed` turns True when the peer is seen to be gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._unsent = bytearray()
        self._pending: ControlError | None = None
        self._encode = msgspec.json.Encoder().encode
        self._decoder: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)
        self._can_send = True
        self.closed = False

    @classmethod
    def pair(cls) -> tuple["ControlEnd", "ControlEnd"]:
        """Two joined ends, closed on exec unless passed on by `fileno()`."""
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(first), cls(second)

    @classmethod
    def from_fd(cls, fd: int) -> "ControlEnd":
        """In a child: the end whose descriptor it inherited, closed on exec from now on. Raises OSError if it is no socket."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock)

    def fileno(self) -> int:
        """Readable when there is something to receive or the peer is gone."""
        return self._socket.fileno()

    def send(self, message: ControlMessage) -> bool:
        """Send, or keep for the next send or flush when the socket is full. False when the peer is gone.

        Raises ControlError when too much waits for a peer that does not read; the message is not taken then.
        """
        line = self._encode(message) + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ControlError(f"a control message of {len(line)} bytes is too long")
        self.flush()
        if len(self._unsent) + len(line) > MAX_BACKLOG_BYTES:
            raise ControlError(f"the peer does not read: {len(self._unsent)} bytes of control messages wait")
        self._unsent += line
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it. False when the peer is gone."""
        while self._unsent and self._can_send:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                # Not `closed` yet: what the peer said before it went (that it failed, and why) is still to be received.
                self._can_send = False
                self._unsent.clear()
                break
            del self._unsent[:num_sent]
        return self._can_send

    @property
    def has_unsent(self) -> bool:
        """Whether a flush is due (a process about to exit should wait for it a little)."""
        return bool(self._unsent)

    def receive_nowait(self) -> list[ControlMessage]:
        """What has arrived, oldest first; then, when the peer is gone, `closed` is True.

        Raises ControlError for a line that is no control message, after those before it were returned; it is skipped.
        """
        self._raise_pending()
        self._fill()
        messages: list[ControlMessage] = []
        while self._pending is None and (end := self._received.find(b"\n")) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            try:
                messages.append(self._decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._pending = ControlError(f"a line of {len(line)} bytes is no control message: {error}")
        if self._pending is None and len(self._received) > MAX_LINE_BYTES:
            self._pending = ControlError(f"a control message of more than {MAX_LINE_BYTES} bytes")
            self._received.clear()
        if not messages:
            self._raise_pending()
        return messages

    def wait_message(self, timeout_seconds: float) -> bool:
        """Sleep until there is something to receive, or the peer is gone (True), or the time is over (False)."""
        if self.closed or self._pending is not None or b"\n" in self._received:
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_ms(timeout_seconds)))

    def close(self) -> None:
        """Close this end; the peer reads end-of-file. Idempotent."""
        self.closed = True
        self._can_send = False
        self._socket.close()

    def __enter__(self) -> "ControlEnd":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _fill(self) -> None:
        """Move what the socket holds into the buffer, at most a few longest lines of it."""
        while not self.closed and len(self._received) <= 4 * MAX_LINE_BYTES:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
            self._received += data

    def _raise_pending(self) -> None:
        if (error := self._pending) is not None:
            self._pending = None
            raise error

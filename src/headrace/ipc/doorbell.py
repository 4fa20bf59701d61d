"""Wake-ups between processes without polling.

Owns: the file descriptors of one bell. Runs in: supervisor (makes it), gateway and worker (ring it, wait on it).
Must not know: what there is to be seen when it rings.
"""

import math
import os
import select
from contextlib import suppress

_PIPE_READ_BYTES = 65536


class Doorbell:
    """A bell that stays rung until cleared: any number of rings before a clear are one. Any process may ring, one waits.

    Whoever answers it clears first and looks second, so that a ring in between is not lost.
    An eventfd where there is one (Linux), else a pipe; neither side ever blocks, or minds that the other is gone.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    @classmethod
    def create(cls) -> "Doorbell":
        """A new bell. Its descriptors are closed on exec unless they are passed on (see `fds`)."""
        if hasattr(os, "eventfd"):
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(fd, fd)
        return cls._create_pipe()

    @classmethod
    def _create_pipe(cls) -> "Doorbell":
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        return cls(read_fd, write_fd)

    @classmethod
    def from_fds(cls, fds: tuple[int, int]) -> "Doorbell":
        """In a child: the bell whose `fds` it inherited, closed on exec from now on. Raises OSError for a closed one."""
        for fd in fds:
            os.set_inheritable(fd, False)
        return cls(*fds)

    @property
    def fds(self) -> tuple[int, int]:
        """(read, write), the same twice for an eventfd: for subprocess.Popen(pass_fds=...) and `from_fds` in the child."""
        return self._read_fd, self._write_fd

    def set_inheritable(self, inheritable: bool) -> None:
        """For ways of starting a child that know no pass_fds."""
        for fd in self.fds:
            os.set_inheritable(fd, inheritable)

    def fileno(self) -> int:
        """Readable while rung."""
        return self._read_fd

    def ring(self) -> None:
        """Ring. A bell that is full of rings, or whose reader is gone, is fine."""
        with suppress(BlockingIOError, BrokenPipeError):
            if self._read_fd == self._write_fd:
                os.eventfd_write(self._write_fd, 1)
            else:
                os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Forget all rings so far."""
        with suppress(BlockingIOError):
            if self._read_fd == self._write_fd:
                os.eventfd_read(self._read_fd)
            else:
                while len(os.read(self._read_fd, _PIPE_READ_BYTES)) == _PIPE_READ_BYTES:
                    pass

    def wait(self, timeout_seconds: float) -> bool:
        """Sleep until it is rung (True; it stays rung) or the time is over (False)."""
        return bool(self._poll.poll(timeout_ms(timeout_seconds)))

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in {self._read_fd, self._write_fd} - {-1}:
            os.close(fd)
        self._read_fd = self._write_fd = -1


def timeout_ms(timeout_seconds: float) -> int:
    """For poll(): rounded up, so that a short wait is not a busy one, and bounded to what poll takes (an hour)."""
    return math.ceil(min(max(timeout_seconds, 0.0), 3600.0) * 1000)

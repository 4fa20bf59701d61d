"""A client process as its coordinator sees it: start it, talk to it, know when it died.

Owns: the child process and its socket. Runs in: load tool (coordinating process). Must not know: plans, figures.
"""

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Self

from headrace.loadtest.client_messages import ToClient, ToCoordinator, receive_to_coordinator, send

CLIENT_COMMAND = (sys.executable, "-m", "headrace.loadtest.client_process")
SILENCE_SECONDS = 60.0  # a living process says something several times a second
END_SECONDS = 5.0  # from its last message to its end
MAX_COMPLAINT_LINES = 30


class ClientDiedError(Exception):
    """A client process ended, or fell silent, before its work was done."""


class ClientHandle:
    """One client process. Make it with `start`, and always `end` it."""

    def __init__(
        self, place: int, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.place = place
        self._process = process
        self._reader = reader
        self._writer = writer
        self._complaints: deque[str] = deque(maxlen=MAX_COMPLAINT_LINES)
        self._listening = asyncio.create_task(self._listen_to_complaints())

    @classmethod
    async def start(cls, place: int, command: Sequence[str] = CLIENT_COMMAND) -> Self:
        """Start a process in a session of its own (Ctrl-C reaches the coordinator alone); the socket's number is added."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(place, process, reader, writer)

    async def say(self, message: ToClient) -> None:
        """Send a message. A process that is gone is left to `hear` to report."""
        with contextlib.suppress(ConnectionError):
            await send(self._writer, message)

    async def hear(self) -> ToCoordinator:
        """Its next message. ClientDiedError when it is gone or silent."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                message = await receive_to_coordinator(self._reader)
        except TimeoutError:
            raise ClientDiedError(f"client process {self.place} said nothing for {SILENCE_SECONDS:.0f} s") from None
        if message is None:
            await self.end()
            words = "\n".join(self._complaints) or "it said nothing on stderr"
            raise ClientDiedError(f"client process {self.place} ended early (exit code {self._process.returncode}): {words}")
        return message

    async def end(self, *, at_once: bool = False) -> None:
        """See the process to its end: in END_SECONDS by itself (its socket is closed), then by force. May be called again."""
        self._writer.close()
        try:
            if at_once and self._process.returncode is None:
                self._process.kill()
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
            await self._listening

    async def _listen_to_complaints(self) -> None:
        stream = self._process.stderr
        if stream is None:
            return
        while data := await stream.read(4096):
            self._complaints.extend(data.decode("utf-8", "replace").splitlines())

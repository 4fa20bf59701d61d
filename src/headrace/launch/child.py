"""One supervised process: started with its configuration on standard input, told things over a control socket.

Owns: Child. Runs in: supervisor. Must not know: what the children do.
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable

from headrace.ipc.control import ControlEnd
from headrace.protocol.control import ChildFailed, ChildReady, ControlMessage, SetLogLevel

KILL_GRACE_SECONDS = 5.0


class Child:
    """A running child. `on_ready` is called with the child's line about itself; `failure` is why it gave up, if it said so.

    `on_log_level` is called with the level that a gateway's operator asked for.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        control: ControlEnd,
        on_ready: Callable[[str], None],
        on_log_level: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.was_ready = False
        self.failure: str | None = None
        self._process = process
        self._control = control
        self._on_ready = on_ready
        self._on_log_level = on_log_level
        self._loop = asyncio.get_running_loop()
        self._control_fd = control.fileno()
        self._detached = False
        self._loop.add_reader(self._control_fd, self._read_control)

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        make_configuration: Callable[[int], bytes],
        inherited_fds: Iterable[int],
        on_ready: Callable[[str], None],
        on_log_level: Callable[[str], None] | None = None,
    ) -> "Child":
        """Run `python -m module`. `make_configuration` takes the number of the child's control fd and gives its stdin."""
        ours, theirs = ControlEnd.pair()
        control_fd = theirs.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[*inherited_fds, control_fd],
        )
        child = cls(name, process, ours, on_ready, on_log_level)
        theirs.close()
        assert process.stdin is not None  # asked for above; for the type checker
        try:
            process.stdin.write(make_configuration(control_fd))
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died at once: wait() tells how
        finally:
            process.stdin.close()
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ControlMessage) -> None:
        """Tell the child something; nothing happens when it is gone (wait() will say so)."""
        if not self._control.closed:
            self._control.send(message)

    async def wait_exit(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        code = await self._process.wait()
        self._read_control()  # a last word may lie in the socket
        self._detach()
        return code

    async def stop_within(self, seconds: float) -> None:
        """Wait so long for its end, then kill it."""
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()

    def explain_exit(self, code: int) -> str:
        """One line for the log and for clients' error messages."""
        if self.failure is not None:
            return self.failure
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def _read_control(self) -> None:
        if self._detached:
            return
        for message in self._control.receive_nowait():
            if isinstance(message, ChildReady):
                self.was_ready = True
                self._on_ready(message.detail)
            elif isinstance(message, ChildFailed):
                self.failure = message.message
            elif isinstance(message, SetLogLevel) and self._on_log_level is not None:
                self._on_log_level(message.level)
        if self._control.closed:
            self._detach()

    def _detach(self) -> None:
        if not self._detached:
            self._detached = True
            self._loop.remove_reader(self._control_fd)
            self._control.close()

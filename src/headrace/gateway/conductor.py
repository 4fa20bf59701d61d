"""How a gateway's life ends: drained, stopped, or left alone by its supervisor.

Owns: Conductor, the handling of control messages. Runs in: gateway, on the event loop. Must not know: HTTP, rings.
"""

import asyncio
from typing import Protocol

from headrace.ipc.control import ControlError
from headrace.protocol.control import ControlMessage, Drain, SetLogLevel, Stop, WorkerExited, WorkerStarted
from headrace.telemetry.logs import get_logger, set_level

log = get_logger("gateway")


class DrainableService(Protocol):
    """What the conductor needs of the generation service."""

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        ...

    def worker_started(self, message: WorkerStarted) -> None:
        """A worker process was started."""
        ...

    def worker_exited(self, message: WorkerExited) -> None:
        """A worker process is gone."""
        ...

    def begin_drain(self, within_seconds: float) -> None:
        """Refuse new work."""
        ...

    async def wait_idle(self) -> None:
        """Wait until no stream is live."""
        ...

    def end_all(self) -> int:
        """End every stream with an error."""
        ...


class ControlReceiver(Protocol):
    """The child's end of the control socket."""

    closed: bool

    def send(self, message: ControlMessage) -> bool:
        """Tell the supervisor; False when it is gone. Raises ControlError when it does not read."""
        ...

    def receive_nowait(self) -> list[ControlMessage]:
        """What has arrived; afterwards `closed` says whether the peer is gone."""
        ...


class Conductor:
    """Turns control messages and signals into the end of the service. The end is `wait_end` returning: nothing runs then."""

    def __init__(self, service: DrainableService, control: ControlReceiver) -> None:
        self._service = service
        self._control = control
        self._has_ended = asyncio.Event()
        self._drain_task: asyncio.Task[None] | None = None
        self.is_control_open = True

    async def wait_end(self) -> None:
        """Wait until the service has been drained or stopped."""
        await self._has_ended.wait()

    def on_control(self) -> None:
        """The control socket can be read."""
        try:
            messages = self._control.receive_nowait()
        except ControlError as error:
            log.error("the supervisor's message could not be read", error=str(error))  # noqa: TRY400 - no traceback: the message says it
            return
        for message in messages:
            self._obey(message)
        if self._control.closed and self.is_control_open:
            self.is_control_open = False
            log.error("the supervisor is gone: stopping")
            self.stop()

    def ask_log_level(self, level: str) -> None:
        """An operator wants this level: it holds here at once, and in the other processes as soon as the supervisor heard."""
        set_level(level)
        try:
            self._control.send(SetLogLevel(level))
        except ControlError as error:
            log.error("the supervisor was not told of the log level", error=str(error))  # noqa: TRY400 - the message says it

    def drain(self, within_seconds: float) -> None:
        """Take no new work and end when what runs has ended, at the latest after this time. A second call changes nothing."""
        if self._drain_task is None and not self._has_ended.is_set():
            log.info("draining", num_running=self._service.num_running, within_seconds=within_seconds)
            self._service.begin_drain(within_seconds)
            self._drain_task = asyncio.create_task(self._drain_within(within_seconds))

    def stop(self) -> None:
        """End everything now. Idempotent, and cuts a drain short."""
        if not self._has_ended.is_set():
            self._service.begin_drain(0.0)
            num_streams = self._service.end_all()
            log.info("stopping", num_ended_streams=num_streams)
            self._has_ended.set()

    async def _drain_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._service.wait_idle(), seconds)
        except TimeoutError:
            num_streams = self._service.end_all()
            log.warning("the time for draining is over", num_ended_streams=num_streams)
        self._has_ended.set()

    def _obey(self, message: ControlMessage) -> None:
        if isinstance(message, WorkerStarted):
            self._service.worker_started(message)
        elif isinstance(message, WorkerExited):
            log.warning("worker exited", epoch=message.epoch, reason=message.reason)
            self._service.worker_exited(message)
        elif isinstance(message, Drain):
            self.drain(message.within_seconds)
        elif isinstance(message, Stop):
            self.stop()
        elif isinstance(message, SetLogLevel):
            set_level(message.level)
        else:
            log.error("a control message that is not for a gateway", message_type=type(message).__name__)

"""Starts the gateway and the worker, restarts what dies, and ends both in order.

Owns: Supervisor, Backoff. Runs in: the process of `headrace serve`. Must not know: requests, models, HTTP.

The supervisor does nothing per request: while all is well it sleeps. Who is told what:
    worker dies      -> the gateway hears WorkerExited at once and ends that worker's requests; a new worker follows
    gateway dies     -> a new gateway greets the worker over its ring, which cancels what the old one had asked for
    SIGTERM, SIGINT  -> gateway drains, then worker stops; a second signal stops both at once
    log level        -> a gateway asks; both children hear it, and those that are started later begin with it
"""

import asyncio
import signal
from collections.abc import Callable

from headrace.launch.child import KILL_GRACE_SECONDS, Child
from headrace.launch.wiring import Wiring
from headrace.protocol.control import Drain, SetLogLevel, Stop, WorkerExited, WorkerStarted
from headrace.telemetry.logs import get_logger, set_level

MAX_FIRST_STARTS = 3  # tries of a child that never was ready
HEALTHY_SECONDS = 60.0  # a child that lived so long starts the back-off anew

log = get_logger("supervisor")


class Backoff:
    """Seconds to wait before the next start: none after a first death, then 0.5, 1, 2 ... 30. Pure: uptime is told."""

    def __init__(self) -> None:
        self.num_failures = 0

    def next_delay_seconds(self, uptime_seconds: float) -> float:
        """The delay after a life of this length."""
        if uptime_seconds >= HEALTHY_SECONDS:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        return min(0.5 * 2.0 ** (self.num_failures - 2), 30.0)


class Supervisor:
    """One gateway and one worker. `on_serving` is called with the gateway's address once both are ready."""

    def __init__(
        self, wiring: Wiring, *, drain_seconds: float, hang_timeout_seconds: float, on_serving: Callable[[str], None]
    ) -> None:
        self._wiring = wiring
        self._hang_timeout_seconds = hang_timeout_seconds
        self._drain_seconds = drain_seconds
        self._on_serving = on_serving
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._worker: Child | None = None
        self._worker_epoch = 0
        self._gateway: Child | None = None
        self._address = ""
        self._greeted = False
        self._failure: str | None = None
        self._has_level_changed = False

    async def run(self) -> int:
        """Serve until told to stop. The exit code: 0 after an orderly end, 1 when it could not start or gave up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        keepers = [asyncio.create_task(keep()) for keep in (self._keep_worker, self._keep_gateway, self._watch_worker)]
        for keeper in keepers:
            keeper.add_done_callback(self._on_keeper_done)
        await self._stop_asked.wait()
        await self._end_children()
        await asyncio.gather(*keepers, return_exceptions=True)
        if self._failure is None:
            log.info("stopped")
        else:
            log.error("headrace stops", reason=self._failure)
        return 0 if self._failure is None else 1

    def _on_signal(self, number: int) -> None:
        if self._stop_asked.is_set():
            log.warning("second signal: stopping at once", signal=signal.Signals(number).name)
            self._stop_now.set()
        else:
            log.info("draining", signal=signal.Signals(number).name, within_seconds=self._drain_seconds)
            self._stop_asked.set()

    async def _keep_worker(self) -> None:
        backoff = Backoff()
        while not self._stop_asked.is_set():
            self._worker_epoch += 1
            epoch = self._worker_epoch
            started = asyncio.get_running_loop().time()
            self._worker = child = await self._wiring.start_worker(epoch, self._on_worker_ready)
            if self._stop_asked.is_set():
                await self._stop_late(child)
                return
            self._tell_level(child)
            self._tell_gateway(WorkerStarted(epoch, child.pid))
            code = await child.wait_exit()
            self._worker = None
            reason = child.explain_exit(code)
            if self._stop_asked.is_set():
                # Streams that the gateway lets end wait for this worker: they end now, not when the time for draining is over.
                self._tell_gateway(WorkerExited(epoch, reason, 0.0, gives_up=True))
                return
            delay = backoff.next_delay_seconds(asyncio.get_running_loop().time() - started)
            gives_up = not self._greeted and (child.failure is not None or backoff.num_failures >= MAX_FIRST_STARTS)
            self._tell_gateway(WorkerExited(epoch, reason, delay, gives_up))
            if gives_up:
                self._give_up(f"the worker cannot start: {reason}")
                return
            log.error("worker died", pid=child.pid, reason=reason, restart_in_seconds=delay)
            await self._pause(delay)

    async def _keep_gateway(self) -> None:
        backoff = Backoff()
        incarnation = 0
        while not self._stop_asked.is_set():
            incarnation += 1
            started = asyncio.get_running_loop().time()
            self._gateway = child = await self._wiring.start_gateway(incarnation, self._on_gateway_ready, self._on_log_level)
            if self._stop_asked.is_set():
                await self._stop_late(child)
                return
            self._tell_level(child)
            if self._worker is not None:
                self._tell_gateway(WorkerStarted(self._worker_epoch, self._worker.pid))
            code = await child.wait_exit()
            self._gateway = None
            if self._stop_asked.is_set():
                return
            reason = child.explain_exit(code)
            delay = backoff.next_delay_seconds(asyncio.get_running_loop().time() - started)
            if not self._greeted and (child.failure is not None or backoff.num_failures >= MAX_FIRST_STARTS):
                self._give_up(f"the gateway cannot start: {reason}")
                return
            log.error("gateway died", pid=child.pid, reason=reason, restart_in_seconds=delay)
            await self._pause(delay)

    async def _watch_worker(self) -> None:
        """Kill a worker that lives and does nothing: its requests end with an error and a new one follows."""
        interval = min(self._hang_timeout_seconds / 4, 10.0)
        while not self._stop_asked.is_set():
            await self._pause(interval)
            worker = self._worker
            if worker is None or not worker.was_ready:
                continue
            silence = self._wiring.silence_seconds(self._worker_epoch)
            if silence > self._hang_timeout_seconds:
                log.error("the worker hangs: killing it", pid=worker.pid, silent_seconds=round(silence))
                worker.kill()
                await self._pause(interval)

    def _on_keeper_done(self, task: asyncio.Task[None]) -> None:
        """A defect in the supervisor itself must end the server, not leave half of it running."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the supervisor failed", exc_info=error)
            self._give_up(f"{type(error).__name__} in the supervisor")

    def _on_worker_ready(self, detail: str) -> None:
        log.info("worker ready", detail=detail)
        self._greet()

    def _on_gateway_ready(self, address: str) -> None:
        self._address = address
        self._greet()

    def _on_log_level(self, level: str) -> None:
        log.info("log level changed", level_now=level)
        set_level(level)
        self._wiring.log_level = level
        self._has_level_changed = True
        for child in (self._worker, self._gateway):
            if child is not None:
                self._tell_level(child)

    def _tell_level(self, child: Child) -> None:
        """The child may have been started before the level changed."""
        if self._has_level_changed:
            child.send(SetLogLevel(self._wiring.log_level))

    def _greet(self) -> None:
        both = self._worker is not None and self._worker.was_ready and self._gateway is not None and self._gateway.was_ready
        if both and not self._greeted:
            self._greeted = True
            self._on_serving(self._address)

    def _tell_gateway(self, message: WorkerStarted | WorkerExited) -> None:
        if self._gateway is not None:
            self._gateway.send(message)

    def _give_up(self, reason: str) -> None:
        self._failure = reason
        self._stop_now.set()
        self._stop_asked.set()

    async def _pause(self, seconds: float) -> None:
        """Wait, but not past the wish to stop."""
        try:
            await asyncio.wait_for(self._stop_asked.wait(), seconds)
        except TimeoutError:
            return

    async def _end_children(self) -> None:
        gateway, worker = self._gateway, self._worker
        if gateway is not None and not self._stop_now.is_set():
            gateway.send(Drain(self._drain_seconds))
            await self._until_exit_or_stop_now(gateway, self._drain_seconds + KILL_GRACE_SECONDS)
        for child in (gateway, worker):
            if child is not None:
                child.send(Stop())
        for child in (gateway, worker):
            if child is not None:
                await child.stop_within(KILL_GRACE_SECONDS)

    async def _stop_late(self, child: Child) -> None:
        """End a child that was being started when the wish to stop came: `_end_children` may not have seen it."""
        child.send(Stop())
        await child.stop_within(KILL_GRACE_SECONDS)

    async def _until_exit_or_stop_now(self, child: Child, seconds: float) -> None:
        waits = [asyncio.create_task(child.wait_exit()), asyncio.create_task(self._stop_now.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

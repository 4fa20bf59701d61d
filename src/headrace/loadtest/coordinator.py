"""One run of several client processes: a common clock, feeding, collecting, the end.

Owns: the run while it lasts. Runs in: load tool (coordinating process). Must not know: HTTP, figures, how progress is drawn.
One task hears each client process, one feeds them, one ticks. An error in any ends the run.
"""

import asyncio
import contextlib
import datetime
import importlib.metadata
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence

import msgspec

from headrace.loadtest.client_handle import ClientDiedError, ClientHandle
from headrace.loadtest.client_load import CpuSample, Lags, TimedLag, judge_client, median_ttft_seconds
from headrace.loadtest.client_messages import (
    Bye,
    Feed,
    NoMore,
    Ready,
    Setup,
    Start,
    Stop,
    Unreachable,
    Update,
    WireRequest,
    unsent_record,
)
from headrace.loadtest.feeding import PlanReader, Share, max_ahead, neediest, split_clients
from headrace.loadtest.plan import DEFAULT_MAX_OUTSTANDING, LoadPlan, join_url
from headrace.loadtest.progress import LoadProgress, Phase, Tally, phase_at
from headrace.loadtest.records import RequestRecord, Run, RunSettings

TICK_SECONDS = 0.25
HEAD_START_SECONDS = 0.05  # from the word to start to time zero, so that each process has it in time
MAX_FEED_BATCH = 64  # conversations encoded between two looks at the sockets
MAX_WARM_CONNECTIONS = 64  # in all, open loop
WARM_PATH = "/v1/models"


class ServerUnreachableError(Exception):
    """No connection to the server could be made."""


class Coordinator:
    """Make one inside the event loop, `run` it once, then take its `result`."""

    def __init__(
        self,
        plan: LoadPlan,
        num_processes: int,
        on_progress: Callable[[LoadProgress], None] | None,
        drain_seconds: float | None,
    ) -> None:
        settings = plan.settings
        self._plan = plan
        self._num_processes = num_processes
        self._on_progress = on_progress
        self._drain_seconds = settings.timeout_seconds if drain_seconds is None else drain_seconds
        self._reader = PlanReader(plan)
        clients = split_clients(settings.num_clients or 0, num_processes)
        self._clients: list[int | None] = [*clients] if settings.arrival == "closed" else [None] * num_processes
        self._shares = [Share(max_ahead(num_clients)) for num_clients in self._clients]
        self._handles: list[ClientHandle] = []
        self._room = asyncio.Event()
        self._is_fed = False
        self._origin: float | None = None
        self._started_at = ""
        self._stopped_at: float | None = None
        self._stopping: list[asyncio.Task[None]] = []
        self._is_interrupted = False
        self._is_abandoned = False
        self._records: list[RequestRecord] = []
        self._tally = Tally(num_processes)
        self._num_held = [0] * num_processes
        self._samples: list[list[CpuSample]] = [[] for _ in range(num_processes)]
        self._own_samples: list[CpuSample] = []
        self._send_lags: list[TimedLag] = []
        self._loop_lags: list[TimedLag] = []
        self._environment: dict[str, str] = {}
        self._byes: list[Bye] = []

    async def run(self, client_command: Sequence[str]) -> None:
        """The whole run. ClientDiedError, ServerUnreachableError; what the plan or the progress callback raises."""
        is_whole = False
        try:
            with interrupts_to(self._interrupt):
                self._show_progress()
                for place in range(self._num_processes):
                    self._handles.append(await ClientHandle.start(place, client_command))
                    await self._handles[place].say(client_setup(self._plan, place, self._clients[place], self._num_processes))
                await self._start_together()
                await _until_all(
                    [self._hear(handle) for handle in self._handles],
                    meanwhile=[self._feed(), self._tick()],
                )
                self._take_own_sample()
                self._note_unfed()
                self._show_progress()
            is_whole = True
        except asyncio.CancelledError:
            if self._is_abandoned:
                raise KeyboardInterrupt from None
            raise
        finally:
            for handle in self._handles:
                await handle.end(at_once=not is_whole)

    def result(self, label: str) -> Run:
        """What the run left."""
        settings = msgspec.structs.replace(self._plan.settings, num_processes=self._num_processes, extra=load_extra(self._plan))
        ends = (record.ended for record in self._records if record.ended is not None)
        wall_seconds = max(ends, default=0.0) if self._stopped_at is None else self._stopped_at
        window = measured_window(settings, wall_seconds)
        headers = [bye.server_header for bye in self._byes if bye.server_header]
        return Run(
            label=label,
            settings=settings,
            started_at=self._started_at,
            wall_seconds=wall_seconds,
            window_begin=window[0],
            window_end=window[1],
            client=judge_client(
                client_samples=self._samples,
                coordinator_samples=self._own_samples,
                lags=Lags(send=self._send_lags, loop=self._loop_lags),
                median_ttft_seconds=median_ttft_seconds(self._records),
                window=window,
            ),
            server={"header": headers[0]} if headers else {},
            environment=self._environment,
            warnings=self._warnings(),
            was_interrupted=self._is_interrupted,
            requests=sorted(self._records, key=lambda record: record.index),
        )

    def stop(self, *, is_interrupt: bool) -> None:
        """End the run now: what is under way is UNFINISHED. Later calls, and calls before the start, do nothing."""
        if self._stopped_at is None and self._origin is not None:
            self._stopped_at = max(0.0, self._now())
            self._is_interrupted = is_interrupt
            self._stopping = [asyncio.ensure_future(handle.say(Stop())) for handle in self._handles]

    async def _start_together(self) -> None:
        await self._fill()
        await _until_all([self._hear_ready(handle) for handle in self._handles], meanwhile=[])
        self._origin = time.monotonic() + HEAD_START_SECONDS
        self._started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._take_own_sample()
        for handle in self._handles:
            await handle.say(Start(self._origin))

    async def _hear_ready(self, handle: ClientHandle) -> None:
        message = await handle.hear()
        if isinstance(message, Unreachable):
            raise ServerUnreachableError(f"no connection to {self._plan.settings.url}: {message.detail}")
        if not isinstance(message, Ready):
            raise ClientDiedError(f"client process {handle.place} said {type(message).__name__} before it was ready")
        self._environment = {
            **message.environment,
            "headrace": importlib.metadata.version("headrace"),
            "cpus": str(os.cpu_count() or 0),
        }

    async def _hear(self, handle: ClientHandle) -> None:
        while not isinstance(message := await handle.hear(), Bye):
            if not isinstance(message, Update):
                raise ClientDiedError(f"client process {handle.place} said {type(message).__name__} within the run")
            self._take_update(handle.place, message)
        self._byes.append(message)

    def _take_update(self, place: int, update: Update) -> None:
        self._shares[place].take(update.num_taken, update.num_taken_bytes)
        if update.num_taken:
            self._room.set()
        self._samples[place].append(CpuSample(update.at_monotonic - (self._origin or 0.0), update.cpu_seconds))
        self._send_lags += update.send_lags
        self._loop_lags += update.loop_lags
        self._num_held[place] = update.num_held
        self._tally.take(
            place,
            num_sent=update.num_sent,
            num_running=update.num_running,
            num_texts=update.num_texts,
            max_send_lag_seconds=max((lag for _, lag in update.send_lags), default=0.0),
        )
        for record in update.records:
            self._tally.end(record)
        self._records += update.records

    async def _feed(self) -> None:
        """Keep the client processes supplied until the plan or the run ends."""
        while not self._is_fed:
            self._room.clear()
            await self._fill()
            if not self._is_fed:
                await self._room.wait()

    async def _fill(self) -> None:
        while self._stopped_at is None and not self._is_fed and neediest(self._shares) is not None:
            batches: list[list[WireRequest]] = [[] for _ in self._handles]
            for _ in range(MAX_FEED_BATCH):
                place = neediest(self._shares)
                if place is None:
                    break
                request = self._reader.next()
                if request is None:
                    self._is_fed = True
                    break
                self._shares[place].give(request)
                batches[place].append(request)
            for handle, batch in zip(self._handles, batches, strict=True):
                if batch:
                    await handle.say(Feed(batch))
            await asyncio.sleep(0)
        if self._is_fed:
            for handle in self._handles:
                await handle.say(NoMore())

    def _note_unfed(self) -> None:
        """After a stop in open loop: requests due by then that no client process had got were offered too."""
        if self._stopped_at is None or self._plan.settings.arrival == "closed":
            return
        while (request := self._reader.next()) is not None and (request.due or 0.0) < self._stopped_at:
            record = unsent_record(request, process=0, is_stream=self._plan.settings.is_stream, at=self._stopped_at)
            self._records.append(record)
            self._tally.end(record)

    async def _tick(self) -> None:
        duration = self._plan.settings.duration_seconds
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._take_own_sample()
            self._show_progress()
            if duration is not None and self._now() > duration + self._drain_seconds:
                self.stop(is_interrupt=False)

    def _take_own_sample(self) -> None:
        self._own_samples.append(CpuSample(self._now(), time.process_time()))

    def _show_progress(self) -> None:
        if self._on_progress is None:
            return
        settings = self._plan.settings
        if self._origin is None:
            phase, elapsed_seconds = Phase.CONNECTING, 0.0
        else:
            elapsed_seconds = max(0.0, self._now())
            phase = phase_at(settings, elapsed_seconds)
        self._on_progress(
            self._tally.progress(
                phase, elapsed_seconds, max_requests=settings.num_requests, max_seconds=settings.duration_seconds
            )
        )

    def _now(self) -> float:
        return time.monotonic() - (self._origin or 0.0)

    def _interrupt(self) -> bool:
        if self._origin is None or self._stopped_at is not None:
            self._is_abandoned = True
            return False
        self.stop(is_interrupt=True)
        return True

    def _warnings(self) -> list[str]:
        plan, settings, warnings = self._plan, self._plan.settings, []
        if self._is_interrupted:
            warnings.append(f"the run was ended by its user after {self._stopped_at:.1f} s")
        elif self._stopped_at is not None:
            warnings.append(
                f"requests that still ran {self._drain_seconds:g} s after the run's end were given up as unfinished"
            )
        if num_held := sum(self._num_held):
            warnings.append(
                f"{num_held} requests waited in the client, as {plan.max_outstanding} were under way (max_outstanding): "
                "the loop was not open then, and the server's true queue would have been longer"
            )
        if settings.num_requests is not None and self._stopped_at is None and settings.duration_seconds is None:
            num_lacking = settings.num_requests - self._reader.num_read
            if num_lacking > 0:
                warnings.append(f"the workload ended {num_lacking} requests short of {settings.num_requests}")
        if settings.is_stream and not all(bye.asks_usage for bye in self._byes):
            warnings.append("the server refuses stream_options.include_usage: token counts rest on text events")
        return warnings


def measured_window(settings: RunSettings, wall_seconds: float) -> tuple[float, float]:
    """[begin, end): after the warm-up, and up to the cool-down.

    The cool-down is cut off the duration when that ended the run (what drains after it is not in the window), and off the
    whole run when its number of requests did. Empty (begin == end) when the run was shorter than what is cut off.
    """
    end = wall_seconds if settings.duration_seconds is None else min(wall_seconds, settings.duration_seconds)
    begin = min(settings.warm_up_seconds, end)
    return begin, max(begin, end - settings.cool_down_seconds)


def client_setup(plan: LoadPlan, place: int, num_clients: int | None, num_processes: int) -> Setup:
    """The first message to a client process. Open loop warms connections for about two seconds' requests."""
    settings = plan.settings
    if num_clients is None:
        expected = 16.0 if settings.rate is None else 2 * settings.rate
        num_warm = math.ceil(min(expected, MAX_WARM_CONNECTIONS) / num_processes)
    else:
        num_warm = num_clients
    return Setup(
        process=place,
        url=plan.url,
        warm_url=join_url(settings.url, WARM_PATH),
        headers=plan.headers,
        is_stream=settings.is_stream,
        num_clients=num_clients,
        num_warm_connections=0 if plan.opens_new_connections else num_warm,
        max_outstanding=math.ceil(plan.max_outstanding / num_processes),
        duration_seconds=settings.duration_seconds,
        timeout_seconds=settings.timeout_seconds,
        opens_new_connections=plan.opens_new_connections,
    )


def load_extra(plan: LoadPlan) -> dict[str, str]:
    """`settings.extra` with what repeats the plan's own options."""
    extra = dict(plan.settings.extra)
    if plan.opens_new_connections:
        extra["new_connections"] = "true"
    if plan.max_outstanding != DEFAULT_MAX_OUTSTANDING:
        extra["max_outstanding"] = str(plan.max_outstanding)
    return extra


@contextlib.contextmanager
def interrupts_to(handler: Callable[[], bool]) -> Iterator[None]:
    """Take Ctrl-C over, in the main thread: `handler` is asked, and when it says False the current task is cancelled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task, before = asyncio.get_running_loop(), asyncio.current_task(), signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        if not handler() and task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def _until_all(needed: list[Coroutine[None, None, None]], *, meanwhile: list[Coroutine[None, None, None]]) -> None:
    """Until all `needed` are done; the first error of any is raised. What still runs then is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in needed]
    others = [asyncio.ensure_future(work) for work in meanwhile]
    open_tasks = {*tasks, *others}
    try:
        while not all(task.done() for task in tasks):
            done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)

"""A client process: takes requests from its coordinator, sends each at its time, hands records back.

Owns: one event loop's worth of clients. Runs in: load tool (client process; `python -m headrace.loadtest.client_process`).
Must not know: the plan as a whole, figures, the terminal.
"""

import asyncio
import contextlib
import gc
import importlib.metadata
import importlib.util
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.loadtest.client_load import TimedLag, missed_probes
from headrace.loadtest.client_messages import (
    Bye,
    Feed,
    NoMore,
    Ready,
    Setup,
    Start,
    Unreachable,
    Update,
    WireRequest,
    receive_to_client,
    send,
    unsent_record,
)
from headrace.loadtest.http_client import HttpClient, UnreachableError
from headrace.loadtest.records import Outcome, RequestRecord

UPDATE_SECONDS = 0.2
GATHER_SECONDS = 0.005  # least time between two updates: a burst goes in one
PROBE_SECONDS = 0.02
# After a request that got no text at all, its client waits as Retry-After says, within a bound, or a moment: else a closed loop
# would spin against a server that refuses at once. Due times of an open loop do not move.
BACK_OFF_SECONDS = 0.1
MAX_BACK_OFF_SECONDS = 5.0


class ChainQueue:
    """Conversations that wait in this process, in order. Counts what was taken, so that the coordinator can feed more."""

    def __init__(self) -> None:
        self._waiting: deque[WireRequest] = deque()
        self._is_ended = False
        self._changed = asyncio.Event()
        self.num_taken = 0
        self.num_taken_bytes = 0

    def put(self, requests: list[WireRequest]) -> None:
        """Add conversations at the end."""
        self._waiting.extend(requests)
        self._changed.set()

    def end(self) -> None:
        """No more will come."""
        self._is_ended = True
        self._changed.set()

    async def take(self, on_taken: Callable[[], None]) -> WireRequest | None:
        """The next conversation; None at the end. `on_taken` is called at once, ahead of other tasks."""
        while not self._waiting:
            if self._is_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        request = self._waiting.popleft()
        self.num_taken += 1
        self.num_taken_bytes += request.num_bytes
        on_taken()
        return request

    def take_rest(self) -> list[WireRequest]:
        """All that still waits, as taken."""
        rest = list(self._waiting)
        self._waiting.clear()
        return rest


class ClientProcess:
    """The work of one process between Start and Bye."""

    def __init__(self, setup: Setup, client: HttpClient, queue: ChainQueue) -> None:
        self.setup = setup
        self.client = client
        self.queue = queue
        self.has_news = asyncio.Event()  # records to hand over, or room for more requests
        self._end = setup.duration_seconds if setup.duration_seconds is not None else float("inf")
        self._records: list[RequestRecord] = []
        self._send_lags: list[TimedLag] = []
        self._loop_lags: list[TimedLag] = []
        self._num_sent = 0
        self._num_running = 0
        self._num_held = 0
        self._unsent: dict[int, WireRequest] = {}  # open loop: taken from the queue, by index, and not yet begun

    async def run(self) -> None:
        """Send everything. Cancel it to end at once; then call `note_unsent`."""
        if self.setup.num_clients is None:
            await self._run_open_loop()
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.setup.num_clients):
                    group.create_task(self._run_client())

    async def probe_loop(self) -> None:
        """Measure how late the event loop wakes, for ever."""
        while True:
            due = time.monotonic() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            lag, at = max(0.0, time.monotonic() - due), due - self.client.origin
            self._loop_lags.extend((at, missed) for missed in missed_probes(lag, PROBE_SECONDS))

    def note_unsent(self) -> None:
        """After a stop: requests that were due by now and not sent (open loop) were offered too, and are UNFINISHED."""
        if self.setup.num_clients is not None:
            return
        now = self._now()
        for request in (*self._unsent.values(), *self.queue.take_rest()):
            if request.due is not None and request.due < min(now, self._end):
                setup = self.setup
                self._records.append(unsent_record(request, process=setup.process, is_stream=setup.is_stream, at=now))

    def take_update(self) -> Update:
        """What happened since the last call."""
        update = Update(
            at_monotonic=time.monotonic(),
            cpu_seconds=time.process_time(),
            records=self._records,
            num_taken=self.queue.num_taken,
            num_taken_bytes=self.queue.num_taken_bytes,
            num_sent=self._num_sent,
            num_running=self._num_running,
            num_texts=self.client.live.num_texts,
            num_held=self._num_held,
            send_lags=self._send_lags,
            loop_lags=self._loop_lags,
        )
        self.queue.num_taken = self.queue.num_taken_bytes = 0
        self._records, self._send_lags, self._loop_lags = [], [], []
        return update

    async def _run_client(self) -> None:
        """One client of a closed loop: a conversation at a time."""
        free_at = 0.0
        while free_at < self._end and (head := await self.queue.take(self.has_news.set)) is not None:
            free_at = await self._converse(head, free_at + head.think_seconds)

    async def _run_open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            running: set[asyncio.Task[float]] = set()
            has_room = asyncio.Event()
            held_until = 0.0

            def leave(task: asyncio.Task[float]) -> None:
                running.discard(task)
                has_room.set()

            while (head := await self.queue.take(self.has_news.set)) is not None:
                self._unsent[head.index] = head
                due = head.due if head.due is not None else 0.0
                if due >= self._end:
                    break
                await self._sleep_until(due)
                while len(running) >= self.setup.max_outstanding:
                    has_room.clear()
                    await has_room.wait()
                    held_until = self._now()
                is_held = due < held_until  # by others' holding too: those behind it in the line waited as well
                self._num_held += is_held
                task = group.create_task(self._converse(head, due, is_held=is_held))
                running.add(task)
                task.add_done_callback(leave)

    async def _converse(self, head: WireRequest, scheduled: float, *, is_held: bool = False) -> float:
        """A request and its later turns, one after another; returns when the last ended, its back-off included."""
        self._unsent.pop(head.index, None)
        ended = scheduled
        for turn in (head, *head.then):
            if turn is not head:
                scheduled = ended + turn.think_seconds
            if scheduled >= self._end:
                return scheduled
            await self._sleep_until(scheduled)
            record = await self._perform(turn, scheduled, is_measured=not is_held or turn is not head)
            ended = self._now() + back_off_seconds(record)
        return ended

    async def _perform(self, request: WireRequest, scheduled: float, *, is_measured: bool) -> RequestRecord:
        record = self._new_record(request, scheduled)
        asked_usage = self.client.asks_usage
        self._num_sent += 1
        self._num_running += 1
        try:
            await self.client.perform(request.body, record, request.headers)
        finally:
            self._num_running -= 1
            if is_measured and asked_usage == self.client.asks_usage:  # else it may have been sent a second time
                lag = record.sent - (record.connect_seconds or 0.0) - scheduled
                self._send_lags.append((scheduled, max(0.0, lag)))
            self._records.append(record)
            self.has_news.set()
        return record

    def _new_record(self, request: WireRequest, scheduled: float) -> RequestRecord:
        return RequestRecord(
            index=request.index,
            process=self.setup.process,
            group=request.group,
            is_stream=self.setup.is_stream,
            scheduled=scheduled,
            sent=self._now(),
            target_prompt_tokens=request.target_prompt_tokens,
            target_output_tokens=request.target_output_tokens,
        )

    async def _sleep_until(self, at: float) -> None:
        # Timers of the loop count in milliseconds, and may fire a little early.
        while (remaining := at - self._now()) > 0:
            await asyncio.sleep(remaining)

    def _now(self) -> float:
        return time.monotonic() - self.client.origin


def back_off_seconds(record: RequestRecord) -> float:
    """How long the client of this request waits before it sends another; 0 unless the request was refused or got nothing."""
    if record.outcome is Outcome.COMPLETED or record.chunk_times:
        return 0.0
    if record.retry_after is None:
        return BACK_OFF_SECONDS
    return min(max(record.retry_after, BACK_OFF_SECONDS), MAX_BACK_OFF_SECONDS)


class Commands:
    """What the coordinator says, taken in as it comes."""

    def __init__(self, reader: asyncio.StreamReader, queue: ChainQueue) -> None:
        self.started: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.stopped = asyncio.Event()
        self._reader = reader
        self._queue = queue

    async def listen(self) -> None:
        """Until the coordinator says stop, or is gone."""
        try:
            while True:
                message = await receive_to_client(self._reader)
                if isinstance(message, Feed):
                    self._queue.put(message.requests)
                elif isinstance(message, NoMore):
                    self._queue.end()
                elif isinstance(message, Start):
                    self.started.set_result(message.at_monotonic)
                else:
                    return
        finally:
            self.stopped.set()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The life of a client process, from Setup to Bye."""
    setup = await receive_to_client(reader)
    if not isinstance(setup, Setup):
        return
    queue = ChainQueue()
    commands = Commands(reader, queue)
    async with HttpClient(
        setup.url,
        setup.headers,
        timeout_seconds=setup.timeout_seconds,
        opens_new_connections=setup.opens_new_connections,
    ) as client:
        listening = asyncio.create_task(commands.listen())
        try:
            await client.warm(setup.warm_url, setup.num_warm_connections)
            about = environment()
            gc.collect()
            gc.freeze()  # pauses of later collections stay short
            await send(writer, Ready(about))
            await _either(commands.started, commands.stopped.wait())
            if commands.started.done():
                client.origin = commands.started.result()
                await _work(ClientProcess(setup, client, queue), commands, writer)
            await send(writer, Bye(client.server_header, client.asks_usage))
        except UnreachableError as error:
            await send(writer, Unreachable(str(error)))
        finally:
            if listening.done():
                listening.result()  # a broken message is an error, not an end
            listening.cancel()


async def _work(work: ClientProcess, commands: Commands, writer: asyncio.StreamWriter) -> None:
    reporting = asyncio.create_task(_report(work, writer))
    probing = asyncio.create_task(work.probe_loop())
    running = asyncio.create_task(work.run())
    await _either(running, commands.stopped.wait(), reporting)
    probing.cancel()
    if not running.done():
        running.cancel()
        await asyncio.wait([running])
        work.note_unsent()
    if not reporting.done():
        reporting.cancel()
        await asyncio.wait([reporting])
    if not reporting.cancelled():
        reporting.result()  # its error: the coordinator is gone
    if not running.cancelled():
        running.result()
    await send(writer, work.take_update())


async def _report(work: ClientProcess, writer: asyncio.StreamWriter) -> None:
    while True:
        work.has_news.clear()
        await send(writer, work.take_update())
        await asyncio.sleep(GATHER_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UPDATE_SECONDS):
                await work.has_news.wait()


async def _either(*waits: "asyncio.Future[Any] | Coroutine[Any, Any, Any]") -> None:
    """Until one is done. Coroutines among them are cancelled then; futures are left as they are."""
    futures = [(asyncio.ensure_future(wait), not asyncio.isfuture(wait)) for wait in waits]
    try:
        await asyncio.wait([future for future, _ in futures], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, is_ours in futures:
            if is_ours:
                future.cancel()


def environment() -> dict[str, str]:
    """What this process runs on."""
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "event_loop": f"uvloop {importlib.metadata.version('uvloop')}" if has_uvloop else "asyncio",
        "aiohttp": importlib.metadata.version("aiohttp"),
    }


def main(arguments: list[str]) -> None:
    """`arguments`: the number of the inherited socket's file descriptor."""
    connection = socket.socket(fileno=int(arguments[0]))

    async def live() -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(ConnectionError):  # the coordinator is gone, and nobody is left to tell
            await serve(reader, writer)

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(live())


if __name__ == "__main__":
    main(sys.argv[1:])

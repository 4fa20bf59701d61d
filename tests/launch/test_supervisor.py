"""The supervisor with children that are told what to do: no process is started."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from headrace.launch.supervisor import Supervisor
from headrace.protocol.control import ControlMessage, Drain, SetLogLevel, Stop, WorkerExited
from headrace.telemetry.logs import current_level, set_level


class FakeChild:
    """A child that ends when it is told to stop."""

    failure = None
    was_ready = False
    pid = 1

    def __init__(self) -> None:
        self.told: list[ControlMessage] = []
        self._gone = asyncio.Event()

    def send(self, message: ControlMessage) -> None:
        self.told.append(message)
        if isinstance(message, Stop):
            self._gone.set()

    def die(self) -> None:
        self._gone.set()

    async def wait_exit(self) -> int:
        await self._gone.wait()
        return 0

    async def stop_within(self, seconds: float) -> None:
        await self._gone.wait()

    def explain_exit(self, code: int) -> str:
        return "told to"


class FakeWiring:
    """Starting a child takes until `may_start` is set."""

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.log_level = "info"
        self.num_asked = 0
        self.started: list[FakeChild] = []

    async def start_worker(self, epoch: int, on_ready: Callable[[str], None]) -> FakeChild:
        return await self._start()

    async def start_gateway(
        self, incarnation: int, on_ready: Callable[[str], None], on_log_level: Callable[[str], None]
    ) -> FakeChild:
        return await self._start()

    async def _start(self) -> FakeChild:
        self.num_asked += 1
        await self.may_start.wait()
        self.started.append(FakeChild())
        return self.started[-1]


def test_children_that_are_being_started_when_the_server_is_told_to_stop_are_stopped_too() -> None:
    async def scenario() -> tuple[int, list[FakeChild]]:
        wiring = FakeWiring()
        supervisor = Supervisor(wiring, drain_seconds=1.0, hang_timeout_seconds=60.0, on_serving=print)  # type: ignore[arg-type]
        run = asyncio.create_task(supervisor.run())
        while wiring.num_asked < 2:
            await asyncio.sleep(0)
        supervisor._on_signal(15)
        for _ in range(10):
            await asyncio.sleep(0)
        wiring.may_start.set()
        return await asyncio.wait_for(run, 5), wiring.started

    code, children = asyncio.run(scenario())
    assert code == 0
    assert [type(child.told[-1]) for child in children] == [Stop, Stop]


def test_a_worker_that_dies_while_the_gateway_drains_is_told_of_at_once() -> None:
    """The streams that drain would otherwise be silent until the time for it is over."""

    async def scenario() -> list[ControlMessage]:
        wiring = FakeWiring()
        wiring.may_start.set()
        supervisor = Supervisor(wiring, drain_seconds=60.0, hang_timeout_seconds=60.0, on_serving=print)  # type: ignore[arg-type]
        run = asyncio.create_task(supervisor.run())
        while len(wiring.started) < 2:
            await asyncio.sleep(0)
        worker, gateway = wiring.started
        supervisor._on_signal(15)
        while not any(isinstance(message, Drain) for message in gateway.told):
            await asyncio.sleep(0)
        worker.die()
        for _ in range(20):
            await asyncio.sleep(0)
        told = list(gateway.told)
        gateway.die()
        assert await asyncio.wait_for(run, 5) == 0
        return told

    told = asyncio.run(scenario())
    assert isinstance(told[-1], WorkerExited)
    assert told[-1].gives_up


@pytest.fixture
def log_level() -> Iterator[None]:
    """The level of this process's logs as it was before."""
    before = current_level()
    yield
    set_level(before)


def test_a_new_log_level_reaches_every_process_and_those_started_later(log_level: None) -> None:
    async def scenario() -> tuple[FakeWiring, list[FakeChild]]:
        wiring = FakeWiring()
        wiring.may_start.set()
        supervisor = Supervisor(wiring, drain_seconds=60.0, hang_timeout_seconds=60.0, on_serving=print)  # type: ignore[arg-type]
        run = asyncio.create_task(supervisor.run())
        while len(wiring.started) < 2:
            await asyncio.sleep(0)
        worker, gateway = wiring.started
        assert not any(isinstance(message, SetLogLevel) for child in (worker, gateway) for message in child.told)
        supervisor._on_log_level("warning")
        worker.die()
        while len(wiring.started) < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        supervisor._on_signal(15)
        gateway.die()
        assert await asyncio.wait_for(run, 5) == 0
        return wiring, wiring.started

    wiring, children = asyncio.run(scenario())
    assert current_level() == wiring.log_level == "warning"
    assert [SetLogLevel("warning") in child.told for child in children] == [True, True, True]

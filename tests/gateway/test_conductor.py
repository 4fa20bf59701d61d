import asyncio

import pytest

from headrace.gateway.conductor import Conductor
from headrace.ipc.control import ControlError
from headrace.protocol.control import ChildReady, Drain, SetLogLevel, Stop, WorkerExited, WorkerStarted
from headrace.telemetry.logs import current_level, set_level


class FakeService:
    def __init__(self, num_running=0):
        self.num_running = num_running
        self.calls = []
        self.idle = asyncio.Event()
        if not num_running:
            self.idle.set()

    def worker_started(self, message):
        self.calls.append(message)

    def worker_exited(self, message):
        self.calls.append(message)

    def begin_drain(self, within_seconds):
        self.calls.append(("drain", within_seconds))

    async def wait_idle(self):
        await self.idle.wait()

    def end_all(self):
        self.calls.append("end_all")
        self.idle.set()
        return self.num_running


class FakeControl:
    def __init__(self):
        self.inbox = []
        self.closed = False
        self.error = None
        self.sent = []
        self.send_error = None

    def send(self, message):
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)
        return True

    def receive_nowait(self):
        if self.error is not None:
            raise self.error
        messages, self.inbox = self.inbox, []
        return messages


def deliver(conductor, control, *messages):
    control.inbox.extend(messages)
    conductor.on_control()


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 5))


def test_the_workers_life_is_passed_on():
    async def scenario():
        service, control = FakeService(), FakeControl()
        conductor = Conductor(service, control)
        messages = [WorkerExited(1, "killed", 0.0), WorkerStarted(2, 77)]
        deliver(conductor, control, *messages, ChildReady("not for me"))
        assert service.calls == messages

    run(scenario)


def test_an_idle_service_drains_at_once():
    async def scenario():
        service, control = FakeService(), FakeControl()
        conductor = Conductor(service, control)
        deliver(conductor, control, Drain(30.0))
        await conductor.wait_end()
        assert service.calls == [("drain", 30.0)]

    run(scenario)


def test_running_streams_may_finish_within_the_time():
    """OPS-01: running streams end by themselves; nothing is cut while there is time."""

    async def scenario():
        service, control = FakeService(num_running=2), FakeControl()
        conductor = Conductor(service, control)
        deliver(conductor, control, Drain(30.0), Drain(1.0))
        waiting = asyncio.create_task(conductor.wait_end())
        await asyncio.sleep(0)
        assert not waiting.done()
        service.idle.set()
        await waiting
        assert service.calls == [("drain", 30.0)]

    run(scenario)


def test_after_the_time_the_rest_is_ended_with_an_error():
    """OPS-01: expiry sends error frames, then the process goes."""

    async def scenario():
        service, control = FakeService(num_running=2), FakeControl()
        conductor = Conductor(service, control)
        deliver(conductor, control, Drain(0.0))
        await conductor.wait_end()
        assert service.calls == [("drain", 0.0), "end_all"]

    run(scenario)


@pytest.mark.parametrize("is_draining", [False, True])
def test_stop_ends_everything_at_once(is_draining):
    async def scenario():
        service, control = FakeService(num_running=2), FakeControl()
        conductor = Conductor(service, control)
        if is_draining:
            deliver(conductor, control, Drain(1000.0))
        deliver(conductor, control, Stop(), Stop())
        await conductor.wait_end()
        assert service.calls.count("end_all") == 1

    run(scenario)


def test_a_lost_supervisor_is_a_stop():
    async def scenario():
        service, control = FakeService(num_running=1), FakeControl()
        conductor = Conductor(service, control)
        control.closed = True
        conductor.on_control()
        conductor.on_control()
        await conductor.wait_end()
        assert service.calls.count("end_all") == 1
        assert not conductor.is_control_open

    run(scenario)


def test_an_unreadable_message_changes_nothing():
    async def scenario():
        service, control = FakeService(num_running=1), FakeControl()
        conductor = Conductor(service, control)
        control.error = ControlError("a line of 3 bytes is no control message")
        conductor.on_control()
        assert service.calls == []

    run(scenario)


@pytest.fixture
def log_level():
    """The level of this process's logs as it was before."""
    before = current_level()
    yield
    set_level(before)


def test_a_wish_for_a_log_level_holds_here_and_goes_to_the_supervisor(log_level):
    control = FakeControl()
    conductor = Conductor(FakeService(), control)
    conductor.ask_log_level("error")
    assert current_level() == "error"
    assert control.sent == [SetLogLevel("error")]


def test_the_supervisors_log_level_holds_and_is_not_sent_back(log_level):
    control = FakeControl()
    conductor = Conductor(FakeService(), control)
    deliver(conductor, control, SetLogLevel("warning"))
    assert current_level() == "warning"
    assert control.sent == []


def test_a_supervisor_that_does_not_read_fails_nothing(log_level):
    control = FakeControl()
    control.send_error = ControlError("the peer does not read")
    Conductor(FakeService(), control).ask_log_level("error")
    assert current_level() == "error"

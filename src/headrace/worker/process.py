"""The worker process: attaches to what the supervisor made, loads the model, works, and ends in order.

Owns: run_worker. Runs in: worker. Must not know: how an executor is built (it is given), HTTP, text.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from headrace.ipc.channel import RingEventSink, RingRequestSource
from headrace.ipc.control import ControlEnd, ControlError
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import Ring
from headrace.ipc.segment import Segment
from headrace.ipc.status import StatusPage
from headrace.protocol.control import ChildFailed, ChildReady, Drain, SetLogLevel, Stop
from headrace.protocol.errors import HeadraceError
from headrace.protocol.messages import WorkerHello
from headrace.protocol.ports import Executor
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.telemetry.logs import configure_logging, get_logger, set_level
from headrace.telemetry.status_fields import STATUS_FIELDS, WorkerState
from headrace.worker.clock import MonotonicClock
from headrace.worker.config import GatewayLink, WorkerConfig
from headrace.worker.garbage import collect_now, keep_pauses_short
from headrace.worker.loop import WorkerLoop
from headrace.worker.outbox import Outbox
from headrace.worker.report import WorkerReport
from headrace.worker.step_log import StepLog

EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_CANNOT_START = 2
_FLUSH_WAIT_SECONDS = 0.01

log = get_logger("worker")


def run_worker(config: WorkerConfig, make_executor: Callable[[], Executor], describe: Callable[[Executor], str]) -> int:
    """Live one life of a worker; the exit status. `describe` gives the operator's line about a loaded model.

    Faults that another try cannot mend (ConfigurationError, ModelError) are told to the supervisor as ChildFailed.
    """
    configure_logging(config.log_format, config.log_level)
    with ExitStack() as stack:
        control = stack.enter_context(ControlEnd.from_fd(config.control_fd))
        doorbell = Doorbell.from_fds(config.request_doorbell_fds)
        stop = StopSwitch(control, doorbell)
        stop.watch_signals()
        try:
            return _live(config, make_executor, describe, control, doorbell, stop, stack)
        except HeadraceError as error:
            log.error("the worker cannot start", reason=error.message)  # noqa: TRY400 - no traceback: the message says it
            control.send(ChildFailed(error.message))
            return EXIT_CANNOT_START
        except Exception:  # the last place where a crash can be reported
            log.exception("the worker crashed")
            return EXIT_CRASHED


class StopSwitch:
    """Whether this worker is to end: told by the supervisor, by its end, or by signals.

    SIGTERM drains, a second one stops: a service manager may send it to all processes at once, and streams that the gateway
    lets end need their worker. SIGINT is ignored: a terminal's Ctrl-C reaches the whole group, and the supervisor decides.
    """

    def __init__(self, control: ControlEnd, doorbell: Doorbell) -> None:
        self._control = control
        self._doorbell = doorbell
        self._is_stopping = False
        self.is_draining = False

    def watch_signals(self) -> None:
        """Install the handlers; in the main thread."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._on_signal())

    def is_stopping(self) -> bool:
        """Read what the supervisor said since the last call; cheap enough for every step."""
        if not self._is_stopping:
            self._read_control()
        return self._is_stopping

    def _on_signal(self) -> None:
        self._is_stopping = self.is_draining
        self.is_draining = True
        self._doorbell.ring()  # ends a wait that is under way

    def _read_control(self) -> None:
        try:
            messages = self._control.receive_nowait()
        except ControlError as error:
            log.error("the supervisor's message could not be read", error=str(error))  # noqa: TRY400 - no traceback: the message says it
            return
        for message in messages:
            if isinstance(message, Stop):
                self._is_stopping = True
            elif isinstance(message, SetLogLevel):
                set_level(message.level)
                log.debug("log level changed", level_now=message.level)
            elif isinstance(message, Drain):
                log.info("the server is draining")  # the gateway refuses new work; what is here runs to its end
            else:
                log.error("a control message that is not for a worker", message_type=type(message).__name__)
        if self._control.closed and not self._is_stopping:
            log.error("the supervisor is gone: stopping")
            self._is_stopping = True


def _live(
    config: WorkerConfig,
    make_executor: Callable[[], Executor],
    describe: Callable[[Executor], str],
    control: ControlEnd,
    doorbell: Doorbell,
    stop: StopSwitch,
    stack: ExitStack,
) -> int:
    page = StatusPage.attach(_attach(config.status_segment, stack).buffer, STATUS_FIELDS)
    stack.callback(page.close)
    report = WorkerReport(page.write, epoch=config.epoch, pid=os.getpid())
    clock = MonotonicClock()
    executor = make_executor()
    stack.callback(executor.close)
    scheduler = Scheduler(_scheduler_config(config), executor.spec)
    request_rings, sink = _attach_rings(config.gateways, stack)
    source = RingRequestSource(request_rings, doorbell, wake_fds=(control.fileno(),))
    num_discarded = source.discard_all()
    if num_discarded and config.epoch > 1:  # before the first worker there is only the gateway's greeting
        log.info("messages for an earlier worker dropped", num_messages=num_discarded)
    outbox = Outbox(sink, list(request_rings), WorkerHello(config.epoch, executor.spec.model_id, scheduler.limits))
    loop = WorkerLoop(
        scheduler,
        executor,
        source,
        outbox,
        clock,
        report,
        max_drain_messages=config.max_drain_messages,
        max_failed_steps=config.max_failed_steps,
        step_log=_open_step_log(config, scheduler, clock, stack),
        tidy=collect_now,
    )
    keep_pauses_short()
    loop.write_page(clock.now_ns())  # before the greeting: whoever reads it finds a sign of life
    control.send(ChildReady(describe(executor)))

    def is_stopping() -> bool:
        loop.is_draining = stop.is_draining
        return stop.is_stopping()

    loop.run(is_stopping)
    report.state = WorkerState.STOPPING
    loop.end_all()
    loop.write_page(clock.now_ns())
    _flush_within(outbox, config.stop_flush_seconds, clock)
    return EXIT_STOPPED


def _scheduler_config(config: WorkerConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.policy,
        step_time_budget=config.step_time_budget,
        min_chunk_tokens=config.min_chunk_tokens,
        class_aging_ns=round(config.class_aging_seconds * 1e9),
        traffic=config.traffic,
        stall_threshold_ns=max(1, round(config.stall_threshold_ms * 1e6)),
    )


def _open_step_log(config: WorkerConfig, scheduler: Scheduler, clock: MonotonicClock, stack: ExitStack) -> StepLog | None:
    if config.record is None:
        return None
    from headrace.telemetry.recorder import Recorder  # asyncio comes with it, which a worker otherwise does without

    recorder = Recorder(config.record)
    stack.callback(recorder.close)
    return StepLog(recorder, config.epoch, scheduler.limits, clock.now_ns())


def _flush_within(outbox: Outbox, seconds: float, clock: MonotonicClock) -> None:
    """Hand over the last events; a gateway that reads nothing for so long does without them (it hears that we are gone)."""
    deadline_ns = clock.now_ns() + round(seconds * 1_000_000_000)
    while not outbox.flush():
        if clock.now_ns() >= deadline_ns:
            log.warning("a gateway did not take the last events", num_events=outbox.num_pending_events)
            return
        time.sleep(_FLUSH_WAIT_SECONDS)


def _attach_rings(links: list[GatewayLink], stack: ExitStack) -> tuple[dict[int, Ring], RingEventSink]:
    request_rings = {}
    event_ends = {}
    for link in links:
        request_rings[link.index] = _attach_ring(link.request_ring, stack)
        event_ends[link.index] = (_attach_ring(link.event_ring, stack), Doorbell.from_fds(link.event_doorbell_fds))
    return request_rings, RingEventSink(event_ends)


def _attach_ring(name: str, stack: ExitStack) -> Ring:
    ring = Ring.attach(_attach(name, stack).buffer)
    stack.callback(ring.close)
    return ring


def _attach(name: str, stack: ExitStack) -> Segment:
    segment = Segment.attach(name)
    stack.callback(segment.close)
    return segment

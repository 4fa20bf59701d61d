"""The worker's life between start and stop: drain, schedule, execute, apply, publish.

Owns: WorkerLoop. Runs in: worker, one thread. Must not know: shared memory, signals, how the executor computes.
"""

from collections.abc import Callable

import msgspec

from headrace.ipc.channel import ChannelError
from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import (
    CancelRequest,
    GatewayHello,
    GatewayMessage,
    GenerationRequest,
    TokenEvent,
)
from headrace.protocol.ports import Clock, Executor, RequestSource
from headrace.protocol.step import StepPlan, StepResult
from headrace.scheduling import Scheduler
from headrace.telemetry.logs import get_logger
from headrace.worker.outbox import Outbox
from headrace.worker.report import WorkerReport
from headrace.worker.step_log import StepLog

HEARTBEAT_SECONDS = 1.0  # longest sleep of an idle worker
MIN_RETRY_SECONDS = 0.01  # first wait for room in a full event ring, doubled up to the next
MAX_RETRY_SECONDS = 0.25
ALL_REQUESTS = 2**63 - 1  # above every request id
_STOPPING = "The server is stopping. The request may be sent again."

log = get_logger("worker")


class WorkerFailedError(RuntimeError):
    """So many steps failed in a row that only a fresh process can help."""


class WorkerLoop:
    """Joins scheduler, executor and channels. Single-threaded: nothing here is called from elsewhere while it runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        source: RequestSource,
        outbox: Outbox,
        clock: Clock,
        report: WorkerReport,
        *,
        max_drain_messages: int = 64,
        max_failed_steps: int = 8,
        step_log: StepLog | None = None,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """`tidy` is called once after each time of work, when nobody has asked for anything for a heartbeat."""
        self._scheduler = scheduler
        self._executor = executor
        self._source = source
        self._outbox = outbox
        self._clock = clock
        self._report = report
        self._max_drain_messages = max_drain_messages
        self._max_failed_steps = max_failed_steps
        self._step_log = step_log
        self._tidy = tidy
        self._worked_ns = 0  # when the last step ended; 0: all is tidy since
        self._num_failed_steps = 0  # in a row
        self._retry_seconds = MIN_RETRY_SECONDS
        self.is_draining = False  # new requests are refused; `run` returns when the others have ended
        self.num_unreadable = 0  # records of gateways that were no valid message

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Work until told to stop, or drained. Raises WorkerFailedError, or whatever defect of the scheduler shows itself."""
        while not is_stopping():
            if self.step():
                continue
            if self.is_draining and self._outbox.is_empty:
                return
            self.wait_message()

    def step(self) -> bool:
        """One round. False when there was nothing to compute, so that the caller may wait."""
        clock = self._clock
        started_ns = clock.now_ns()
        self._receive(started_ns)
        received_ns = clock.now_ns()
        if not self._scheduler.has_work:
            self._publish(received_ns)
            return False
        plan = self._scheduler.schedule(received_ns)
        if not plan.rows:  # the time of all is over
            self._publish(received_ns)
            return True
        if self._scheduler.has_events:  # of those that have left: their clients do not wait for the step to end
            self._publish(received_ns)
        scheduled_ns = clock.now_ns()
        result = self._execute(plan)
        executed_ns = clock.now_ns()
        if result is not None:
            self._scheduler.apply(plan, result, executed_ns)
        applied_ns = clock.now_ns()
        self._publish(executed_ns)
        self._worked_ns = published_ns = clock.now_ns()
        forward_ns, sample_ns = (result.forward_ns, result.sample_ns) if result is not None else (0, 0)
        self._report.count_step(
            plan,
            (
                received_ns - started_ns,
                scheduled_ns - received_ns,
                max(executed_ns - scheduled_ns - forward_ns - sample_ns, 0),
                forward_ns,
                sample_ns,
                applied_ns - executed_ns,
                published_ns - applied_ns,
            ),
        )
        if self._step_log is not None and result is not None:
            self._step_log.step(plan, result, started_ns, published_ns - started_ns, self._scheduler.statistics())
        if self._report.is_due(published_ns):
            self.write_page(published_ns)
        return True

    def write_page(self, now_ns: int) -> None:
        """Show the numbers of now on the status page."""
        log = self._step_log
        self._report.write(
            self._scheduler.statistics(),
            now_ns,
            evictions=self._scheduler.take_evictions(),
            num_event_ring_full=self._outbox.num_refused,
            num_record_lines=log.num_lines if log is not None else 0,
            num_record_drops=log.num_drops if log is not None else 0,
        )

    def wait_message(self) -> None:
        """Sleep until a message comes.

        Wake for the heartbeat, sooner while events wait for room in a ring, and when a live request's time is over.
        """
        now_ns = self._clock.now_ns()
        if self._step_log is not None:
            self._step_log.flush_due(now_ns)
        self.write_page(now_ns)
        if self._worked_ns and now_ns - self._worked_ns >= HEARTBEAT_SECONDS * 1e9 and not self._scheduler.has_work:
            self._worked_ns = 0
            if self._tidy is not None:
                self._tidy()
        self._report.note_wait()
        if self._outbox.is_empty:
            self._retry_seconds = MIN_RETRY_SECONDS
            self._source.wait_message(self._seconds_to_expiry(now_ns, HEARTBEAT_SECONDS))
            return
        self._source.wait_message(self._seconds_to_expiry(now_ns, self._retry_seconds))
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)

    def _seconds_to_expiry(self, now_ns: int, most_seconds: float) -> float:
        """Until the next live request must leave, at most so many."""
        expiry_ns = self._scheduler.next_expiry_ns
        return most_seconds if expiry_ns is None else min(most_seconds, max(0, expiry_ns - now_ns) / 1e9)

    def end_all(self) -> None:
        """End every live request with an error that says that the server stops. Events wait in the outbox afterwards."""
        now_ns = self._clock.now_ns()
        self._receive(now_ns)  # a request already handed over is owed its end as well
        for reply_ring in self._outbox.reply_rings:
            self._scheduler.cancel_ring(reply_ring, ALL_REQUESTS, now_ns)
        for reply_ring, events in self._scheduler.take_events().items():
            self._outbox.add(reply_ring, [_as_stopped(event) for event in events], now_ns)

    def _receive(self, now_ns: int) -> None:
        """Take what has arrived, at most so many messages that steps go on."""
        try:
            messages = self._source.drain_nowait(self._max_drain_messages)
        except ChannelError as error:
            self._end_unreadable(error, now_ns)
            return
        for message in messages:
            self._take(message, now_ns)

    def _end_unreadable(self, error: ChannelError, now_ns: int) -> None:
        """A record is no message. Where it can be told which request it was about, that one ends: its client waits."""
        self.num_unreadable += 1
        log.error("a record from a gateway could not be read", error=error.message, request_id=error.request_id)
        if error.request_id is not None and error.ring in self._outbox.reply_rings:
            self._scheduler.cancel(error.request_id, now_ns)
            self._collect(now_ns)
            self._outbox.add(error.ring, [_unreadable_end(error.request_id)], now_ns)

    def _take(self, message: GatewayMessage, now_ns: int) -> None:
        if isinstance(message, CancelRequest):
            self._scheduler.cancel(message.request_id, now_ns)
        elif message.reply_ring not in self._outbox.reply_rings:
            self.num_unreadable += 1
            log.error("a message names an event ring that does not exist", reply_ring=message.reply_ring)
        elif not isinstance(message, GenerationRequest):
            self._greet_new_gateway(message, now_ns)
        elif self.is_draining:
            self._outbox.add(message.reply_ring, [_stopped_end(message.request_id)], now_ns)
        else:
            self._scheduler.add(message, now_ns)

    def _greet_new_gateway(self, message: GatewayHello, now_ns: int) -> None:
        """A gateway process began its life: what its predecessor left is cancelled, and it is told this worker's limits."""
        self._scheduler.cancel_ring(message.reply_ring, message.first_request_id, now_ns)
        self._collect(now_ns)
        self._outbox.greet_again(message.reply_ring, message.first_request_id)

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """The plan's result, or None when the step as a whole failed and its rows were ended with an error."""
        try:
            result = self._executor.execute(plan)
        except Exception as error:  # whatever an executor raises ends this step, not the worker
            self._num_failed_steps += 1
            log.exception("a step failed", num_rows=len(plan.rows), num_failed_steps=self._num_failed_steps)
            reason = f"{type(error).__name__}: {error}"
            message = "The model could not compute this step. The request may be sent again."
            self._scheduler.fail_step(plan, ErrorCode.EXECUTION_FAILED.value.code, message, self._clock.now_ns())
            if self._num_failed_steps >= self._max_failed_steps:
                now_ns = self._clock.now_ns()
                self._publish(now_ns)
                self.write_page(now_ns)
                raise WorkerFailedError(f"{self._num_failed_steps} steps failed in a row, the last with {reason}") from error
            return None
        self._num_failed_steps = 0
        return result

    def _collect(self, now_ns: int) -> None:
        for reply_ring, events in self._scheduler.take_events().items():
            self._outbox.add(reply_ring, events, now_ns)

    def _publish(self, emitted_ns: int) -> None:
        self._collect(emitted_ns)
        self._outbox.flush()


def _as_stopped(event: TokenEvent) -> TokenEvent:
    """The event with the server's stop as the reason, if it was cancelled."""
    if event.finish_reason is not FinishReason.CANCELLED:
        return event
    return msgspec.structs.replace(
        event, finish_reason=FinishReason.ERROR, error_code=ErrorCode.DRAINING.value.code, error_message=_STOPPING
    )


def _stopped_end(request_id: int) -> TokenEvent:
    return _error_end(request_id, ErrorCode.DRAINING, _STOPPING)


def _unreadable_end(request_id: int) -> TokenEvent:
    return _error_end(request_id, ErrorCode.INTERNAL, "The request was damaged on its way to the model.")


def _error_end(request_id: int, code: ErrorCode, message: str) -> TokenEvent:
    """The only event of a request that the scheduler never saw."""
    return TokenEvent(request_id, 0, [], FinishReason.ERROR, code.value.code, message)

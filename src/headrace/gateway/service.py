"""The generation service: prompt ids in, a stream of text out, whatever becomes of the worker meanwhile.

Owns: GatewayService. Runs in: gateway, on the event loop. Must not know: HTTP, processes, shared memory.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.gateway.admission import AdmissionControl
from headrace.gateway.deltas import CallOutline, GenerationSpec, ModelCard
from headrace.gateway.demux import Demultiplexer, incomplete_answer
from headrace.gateway.door import Door
from headrace.gateway.outbound import MessageSender, Outbound
from headrace.gateway.starting import RequestStarter
from headrace.gateway.stream import RequestStream
from headrace.gateway.tracking import RequestTracker
from headrace.gateway.worker_view import WorkerView
from headrace.ipc.channel import ChannelError
from headrace.ipc.ring import RingCorrupt
from headrace.protocol.control import WorkerExited, WorkerStarted
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import (
    CancelRequest,
    EventBatch,
    GatewayHello,
    WorkerHello,
    WorkerLimits,
    WorkerMessage,
)
from headrace.protocol.ports import Clock
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.journal import Journal
from headrace.telemetry.logs import get_logger
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.reports import DebugRequests, RequestReport
from headrace.text.tokenizer import TextTokenizer

log = get_logger("gateway")


class MessageReceiver(Protocol):
    """The gateway's end of the event ring."""

    def drain_nowait(self) -> list[WorkerMessage]:
        """What has arrived. Raises ChannelError and RingCorrupt when records are lost."""
        ...

    def discard_all(self) -> int:
        """Drop what is on the ring."""
        ...


class GatewayService:
    """Implements ports.GenerationService over the rings to one worker.

    Call `on_events` when the event doorbell rings, and the worker_* methods for the supervisor's messages. A stream ends
    exactly once: by the worker's last event, a stop string, cancel, the worker's death, or `end_all`.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: TextTokenizer,
        sender: MessageSender,
        receiver: MessageReceiver,
        admission: AdmissionControl,
        worker: WorkerView,
        meters: GatewayMeters,
        exporter: MetricsExporter,
        clock: Clock,
        *,
        reply_ring: int,
        incarnation: int,
        journal: Journal | None = None,
        log_prompts: bool = False,
    ) -> None:
        """`journal`: what keeps and tells of ended requests. `log_prompts`: each request's log line has its prompt's text."""
        self._card = card
        self._outbound = Outbound(sender)
        self._receiver = receiver
        self._door = Door(admission, meters.traffic)
        self._worker = worker
        self._meters = meters
        self._exporter = exporter
        self._clock = clock
        self._reply_ring = reply_ring
        self._tracker = RequestTracker(card, meters, journal or Journal(meters.faults), worker, clock)
        self._demux = Demultiplexer(
            self._cancel_sequence,
            self._note_idle,
            self._tracker.close,
            self._tracker.waiting_cause,
            admission.retry_after_seconds,
        )
        self._starter = RequestStarter(
            tokenizer,
            self._door,
            self._outbound,
            self._tracker,
            self._demux,
            reply_ring=reply_ring,
            incarnation=incarnation,
            log_prompts=log_prompts,
        )
        exporter.add_probe("headrace_ring_full_total", lambda: self._outbound.num_ring_full, "request")
        self._door.add_probes(exporter, clock)
        self._is_draining = False
        self._drain_retry_seconds = 1
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.num_stale_messages = 0  # of lives of the worker that are over

    @property
    def card(self) -> ModelCard:
        """The served model."""
        return self._card

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return self._demux.num_streams

    @property
    def demux(self) -> Demultiplexer:
        """The live streams (for statistics)."""
        return self._demux

    @property
    def outbound(self) -> Outbound:
        """What waits for room in the request ring (for statistics)."""
        return self._outbound

    def start(self) -> None:
        """Begin this gateway's life on the rings: what an earlier process left there is dropped and cancelled."""
        num_records = self._receiver.discard_all()
        log.debug("event ring taken over", num_records=num_records)
        self._outbound.send(GatewayHello(self._reply_ring, self._starter.next_request_id))

    def limits(self) -> WorkerLimits:
        """What a request may ask of the worker. Raises RequestError NOT_READY or DRAINING."""
        if self._is_draining:
            raise _draining_error(self._drain_retry_seconds)
        return self._worker.limits(self._clock.now_ns())

    def readiness(self) -> RequestError | None:
        """None when requests are welcome, else why they are not."""
        if self._is_draining:
            return _draining_error(self._drain_retry_seconds)
        return self._worker.problem(self._clock.now_ns())

    def submit(self, spec: GenerationSpec) -> RequestStream:
        """`submit_call` for a call of one sequence that was not checked before."""
        return self.submit_call([spec])[0]

    def check_admission(self, call: CallOutline) -> None:
        """Turn a call away before its prompts are tokenized, or let it pass on. Raises RequestError."""
        if (problem := self.readiness()) is not None:
            raise problem
        try:
            self._door.check(call, self._clock.now_ns())
        except RequestError as error:
            if error.reject_reason is not None:
                self._tracker.refuse_call(call, self._door.num_prompt_tokens(call), error)
            raise

    def submit_call(self, specs: Sequence[GenerationSpec], call: CallOutline | None = None) -> list[RequestStream]:
        """Start all sequences of a call, or none. `call`: as check_admission let it pass. Raises RequestError."""
        try:
            problem = self.readiness()
            epoch = self._worker.epoch
            if problem is not None or epoch is None:
                raise problem or RequestError("The model is not loaded.", code=ErrorCode.NOT_READY, retry_after_seconds=1)
            return self._starter.start_call(specs, call, self, epoch, self._clock.now_ns())
        except RequestError as error:
            for spec in specs:
                self._tracker.refuse(spec, error)
            raise

    def report_on(self, stream: RequestStream) -> RequestReport:
        """The stream's timeline as known now."""
        return self._tracker.report(stream)

    def debug_requests(self, limit: int) -> DebugRequests:
        """Live requests, the oldest first, and lately finished ones, the newest first; at most `limit` of each."""
        return self._tracker.debug_requests(self._demux.live_streams(), limit)

    def metrics_exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        return self._exporter.exposition()

    def count_http(self, route: str, status: int) -> None:
        """One answered HTTP request."""
        self._meters.count_http(route, status)

    def count_rejection(self, code: str, reason: str = "") -> None:
        """One request for generation that was refused before it started. `reason`: a RejectReason's value, if it has one."""
        self._meters.count_rejection(code, reason)

    def on_events(self) -> None:
        """The event doorbell rang: deliver what is on the ring."""
        self._meters.cpu.note()
        self._drain_once(self._clock.now_ns())
        self._outbound.flush()

    def worker_started(self, message: WorkerStarted) -> None:
        """The supervisor has started a worker process; it is ready when it greets."""
        now_ns = self._clock.now_ns()
        self._worker.note_started(message.epoch, now_ns)
        self._lose_streams(message.epoch - 1, now_ns)

    def worker_exited(self, message: WorkerExited) -> None:
        """A worker is gone: what it had still said is delivered, then its requests end."""
        now_ns = self._clock.now_ns()
        while self._drain_once(now_ns):
            pass
        self._worker.note_exited(message)
        if not message.gives_up:
            self._meters.count_worker_restart()
        if self._worker.epoch is None:
            self._exporter.worker_exited()
            self._outbound.discard()  # it was for the worker that died; a new one knows none of these requests
        self._lose_streams(message.epoch, now_ns)

    def begin_drain(self, within_seconds: float) -> None:
        """Refuse new work from now on; what runs goes on. `within_seconds`: when a client may find another server here."""
        self._is_draining = True
        self._drain_retry_seconds = min(60, max(1, round(within_seconds)))

    async def wait_idle(self) -> None:
        """Wait until no stream is live."""
        if self.num_running:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def end_all(self) -> int:
        """End every stream with an error that says that the server stops; how many there were."""
        streams = self._demux.live_streams()
        retry_seconds = self._drain_retry_seconds
        self._demux.fail_streams(streams, lambda: _stopping_error(retry_seconds), self._clock.now_ns(), cancel=True)
        return len(streams)

    def cancel_stream(self, stream: RequestStream) -> None:
        """The stream's consumer gave it up."""
        self._demux.cancel(stream, self._clock.now_ns())

    def _drain_once(self, now_ns: int) -> int:
        """Deliver what one look at the event ring gives; how many messages (a record that is lost counts)."""
        try:
            messages = self._receiver.drain_nowait()
        except (ChannelError, RingCorrupt) as error:
            self._recover(error, now_ns)
            return 1
        for message in messages:
            if isinstance(message, WorkerHello):
                self._on_hello(message, now_ns)
            else:
                self._on_batch(message, now_ns)
        return len(messages)

    def _on_batch(self, batch: EventBatch, now_ns: int) -> None:
        if batch.epoch == self._worker.epoch:
            self._demux.take(batch, now_ns)
        else:
            self.num_stale_messages += 1

    def _on_hello(self, hello: WorkerHello, now_ns: int) -> None:
        is_new = hello.epoch != self._worker.epoch
        if not self._worker.note_hello(hello, now_ns):
            self.num_stale_messages += 1
        elif is_new:
            log.info("worker greets", epoch=hello.epoch, max_model_len=hello.limits.max_model_len)
            self._exporter.worker_ready()
            self._lose_streams(hello.epoch - 1, now_ns)
            # What was sent while its predecessor was thought to live may have come to this one: nobody waits for it.
            self._outbound.send(GatewayHello(self._reply_ring, self._starter.next_request_id))

    def _recover(self, error: Exception, now_ns: int) -> None:
        """Records from the worker are lost, and nobody can tell whose: every stream ends, and the worker is greeted anew."""
        log.error("events from the worker are lost", error=str(error), num_streams=self.num_running)
        if isinstance(error, RingCorrupt):
            self._receiver.discard_all()
        self._demux.fail_streams(self._demux.live_streams(), incomplete_answer, now_ns)
        # This cancels them all and asks for a greeting.
        self._outbound.send(GatewayHello(self._reply_ring, self._starter.next_request_id))

    def _lose_streams(self, max_epoch: int, now_ns: int) -> None:
        """End the streams of workers up to this epoch: they are gone."""
        self._demux.fail_streams(self._demux.live_streams(max_epoch), _worker_lost, now_ns)

    def _cancel_sequence(self, request_id: int) -> None:
        self._outbound.send(CancelRequest(request_id))

    def _note_idle(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _draining_error(retry_seconds: int) -> RequestError:
    message = "The server is stopping and takes no new work."
    return RequestError(message, code=ErrorCode.DRAINING, retry_after_seconds=retry_seconds)


def _stopping_error(retry_seconds: int) -> RequestError:
    message = "The server is stopping. The request may be sent again."
    return RequestError(message, code=ErrorCode.DRAINING, retry_after_seconds=retry_seconds)


def _worker_lost() -> RequestError:
    return RequestError(
        "The model's process stopped while it worked on this request. The request may be sent again.",
        code=ErrorCode.WORKER_LOST,
        retry_after_seconds=1,
    )

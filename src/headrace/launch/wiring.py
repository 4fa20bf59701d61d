"""What joins the processes of one server: shared memory, doorbells, and each child's configuration.

Owns: Wiring. Runs in: supervisor. Must not know: when a child is started or stopped.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from headrace.gateway.config import GatewayConfig, ObservationConfig
from headrace.gateway.http.settings import HttpSettings
from headrace.ipc.channel import DEFAULT_EVENT_RING_BYTES, DEFAULT_REQUEST_RING_BYTES
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import Ring
from headrace.ipc.segment import Segment, new_instance
from headrace.ipc.status import StatusPage
from headrace.launch.child import Child
from headrace.launch.model import ServedModel
from headrace.launch.settings import Settings
from headrace.launch.worker_launch import WorkerLaunch
from headrace.protocol.record import RecordTarget
from headrace.telemetry.status_fields import STATUS_FIELDS
from headrace.worker.config import GatewayLink, WorkerConfig

BYTES_PER_TOKEN_ID = 5  # MessagePack's longest form of a 32-bit number
MIN_REQUESTS_IN_RING = 16  # of the longest prompts


def served_length(settings: Settings, model: ServedModel) -> int:
    """Most tokens of a sequence as far as settings and model decide it; the pool of KV blocks may lower it."""
    return min(settings.scheduler.max_model_len or model.manifest.max_model_len, model.manifest.max_model_len)


class Wiring:
    """The segments and bells of one server, for as long as it lives. A context manager: at the end the files are gone.

    `log_level`: of children that are started from now on.
    """

    def __init__(self, settings: Settings, model: ServedModel, record: RecordTarget | None = None) -> None:
        self._settings = settings
        self._model = model
        self._record = record
        self._traffic = settings.traffic()
        self.log_level: str = settings.operation.log_level
        self._stack = ExitStack()
        self._instance = new_instance()
        self.max_model_len = served_length(settings, model)

    def __enter__(self) -> "Wiring":
        with ExitStack() as stack:
            longest = self.max_model_len * BYTES_PER_TOKEN_ID
            self._request_ring = self._make_ring(
                stack, "requests0", max(DEFAULT_REQUEST_RING_BYTES, MIN_REQUESTS_IN_RING * longest)
            )
            self._event_ring = self._make_ring(stack, "events0", DEFAULT_EVENT_RING_BYTES)
            self._status = self._make_segment(stack, "status", StatusPage.size_bytes(STATUS_FIELDS))
            self._page = StatusPage.create(self._status.buffer, STATUS_FIELDS)
            stack.callback(self._page.close)
            self._request_bell = self._make_bell(stack)
            self._event_bell = self._make_bell(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def silence_seconds(self, epoch: int) -> float:
        """How long ago the worker of this epoch gave its last sign of life; 0 when it has not begun to."""
        values = self._page.read()
        if values["epoch"] != epoch:
            return 0.0
        return (time.monotonic_ns() - values["heartbeat_ns"]) / 1e9

    async def start_worker(self, epoch: int, on_ready: Callable[[str], None]) -> Child:
        """A new life of the worker."""
        settings = self._settings

        def configuration(control_fd: int) -> bytes:
            link = GatewayLink(0, self._request_ring.name, self._event_ring.name, self._event_bell.fds)
            worker = WorkerConfig(
                epoch=epoch,
                control_fd=control_fd,
                request_doorbell_fds=self._request_bell.fds,
                status_segment=self._status.name,
                gateways=[link],
                max_num_seqs=settings.scheduler.max_num_seqs,
                max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
                policy=settings.scheduler.policy,
                step_time_budget=settings.scheduler.step_time_budget,
                min_chunk_tokens=settings.scheduler.min_chunk_tokens,
                class_aging_seconds=settings.scheduler.class_aging_seconds,
                max_model_len=self.max_model_len,
                enable_prefix_caching=settings.cache.prefix_caching,
                log_format=settings.operation.log_format,
                log_level=self.log_level,
                traffic=self._traffic,
                stall_threshold_ms=settings.operation.stall_threshold_ms,
                record=self._record,
            )
            return msgspec.json.encode(WorkerLaunch(worker, settings.without_secrets(), self._model))

        fds = {*self._request_bell.fds, *self._event_bell.fds}
        return await Child.start("worker", "headrace.launch.worker_child", configuration, fds, on_ready)

    async def start_gateway(
        self, incarnation: int, on_ready: Callable[[str], None], on_log_level: Callable[[str], None]
    ) -> Child:
        """A new life of the gateway. `on_log_level`: an operator asked for this level."""
        settings = self._settings

        def configuration(control_fd: int) -> bytes:
            gateway = GatewayConfig(
                incarnation=incarnation,
                control_fd=control_fd,
                request_ring=self._request_ring.name,
                request_doorbell_fds=self._request_bell.fds,
                event_ring=self._event_ring.name,
                event_doorbell_fds=self._event_bell.fds,
                status_segment=self._status.name,
                model_folder=self._model.folder,
                served_model_name=settings.model.served_model_name or self._model.default_name,
                host=settings.server.host,
                port=settings.server.port,
                max_num_seqs=settings.scheduler.max_num_seqs,
                max_queued_requests=settings.server.max_queued_requests,
                forecasts_admission=settings.server.admission == "forecast",
                keep_alive_seconds=settings.server.keep_alive_seconds,
                drain_seconds=settings.operation.drain_seconds,
                progress_timeout_seconds=settings.operation.progress_timeout_seconds,
                http=HttpSettings(
                    max_body_bytes=settings.server.max_body_bytes,
                    max_choices=settings.server.max_choices,
                    keep_alive_seconds=settings.server.sse_ping_seconds,
                ),
                log_format=settings.operation.log_format,
                log_level=self.log_level,
                traffic=self._traffic,
                stall_threshold_ms=settings.operation.stall_threshold_ms,
                record=self._record,
                observation=ObservationConfig(
                    log_prompts=settings.operation.log_prompts,
                    debug_requests=settings.operation.debug_requests,
                    admin_token=settings.operation.admin_token,
                    otlp_endpoint=settings.operation.otlp_endpoint,
                    trace_sample_ratio=settings.operation.trace_sample_ratio,
                ),
            )
            return msgspec.json.encode(gateway)

        fds = {*self._request_bell.fds, *self._event_bell.fds}
        return await Child.start("gateway", "headrace.launch.gateway_child", configuration, fds, on_ready, on_log_level)

    def _make_segment(self, stack: ExitStack, role: str, size_bytes: int) -> Segment:
        segment = Segment.create(role, size_bytes, instance=self._instance)
        stack.callback(segment.close)
        stack.callback(segment.unlink)
        return segment

    def _make_ring(self, stack: ExitStack, role: str, capacity_bytes: int) -> Segment:
        segment = self._make_segment(stack, role, Ring.size_bytes(capacity_bytes))
        Ring.create(segment.buffer).close()
        return segment

    def _make_bell(self, stack: ExitStack) -> Doorbell:
        bell = Doorbell.create()
        stack.callback(bell.close)
        return bell

"""The gateway process: builds the service from the prepared folder and the rings, serves HTTP, and ends in order.

Owns: run_gateway. Runs in: gateway. Must not know: requests, what is on the rings.
"""

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from headrace.gateway.admission import AdmissionControl, AdmissionLimits
from headrace.gateway.clock import MonotonicClock
from headrace.gateway.conductor import Conductor
from headrace.gateway.config import GatewayConfig
from headrace.gateway.http.app import create_app
from headrace.gateway.observers import RequestObservers, request_observers
from headrace.gateway.served_model import ServedModel, load_served_model
from headrace.gateway.server import HttpServer, address_of, bind_socket
from headrace.gateway.service import GatewayService
from headrace.gateway.worker_view import WorkerView
from headrace.ipc.channel import EventReceiver, RequestSender
from headrace.ipc.control import ControlEnd
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import Ring
from headrace.ipc.segment import Segment
from headrace.ipc.status import StatusPage
from headrace.protocol.control import ChildFailed, ChildReady
from headrace.protocol.errors import HeadraceError
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.journal import Journal
from headrace.telemetry.logs import configure_logging, get_logger
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.status_fields import STATUS_FIELDS
from headrace.text.chat_template import encode_chat

EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_CANNOT_START = 2
LAST_WORDS_SECONDS = 2.0  # for the last frames to reach clients that read

log = get_logger("gateway")


def run_gateway(config: GatewayConfig) -> int:
    """Live one life of a gateway; the exit status.

    Faults that another try cannot mend (a port in use, a bad folder) are told to the supervisor as ChildFailed.
    """
    configure_logging(config.log_format, config.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group: the supervisor decides
    with ExitStack() as stack:
        control = stack.enter_context(ControlEnd.from_fd(config.control_fd))
        try:
            model = load_served_model(Path(config.model_folder), config.served_model_name)
            listener = stack.enter_context(bind_socket(config.host, config.port, config.listen_backlog))
            _raise_open_file_limit(config.max_connections)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_live(config, model, listener, control, stack))
        except HeadraceError as error:
            log.error("the gateway cannot start", reason=error.message)  # noqa: TRY400 - no traceback: the message says it
            control.send(ChildFailed(error.message))
            return EXIT_CANNOT_START
        except Exception:  # the last place where a crash can be reported
            log.exception("the gateway crashed")
            return EXIT_CRASHED


async def _live(
    config: GatewayConfig, model: ServedModel, listener: socket.socket, control: ControlEnd, stack: ExitStack
) -> int:
    with request_observers(config, model.card.id) as observers:
        return await _serve(config, model, listener, control, observers, stack)


async def _serve(
    config: GatewayConfig,
    model: ServedModel,
    listener: socket.socket,
    control: ControlEnd,
    observers: RequestObservers,
    stack: ExitStack,
) -> int:
    loop = asyncio.get_running_loop()
    service, receiver = _join_worker(config, model, observers, stack)
    conductor = Conductor(service, control)
    address = address_of(listener)
    server = HttpServer(
        _build_app(config, model, service, conductor),
        listener,
        backlog=config.listen_backlog,
        max_connections=config.max_connections,
        keep_alive_seconds=config.keep_alive_seconds,
    )
    configure_logging(config.log_format, config.log_level)  # anew: the HTTP server has set up logging for itself
    service.start()
    loop.add_reader(receiver.fileno(), service.on_events)
    loop.add_reader(control.fileno(), partial(_on_control, loop, conductor, control))
    loop.add_signal_handler(signal.SIGTERM, conductor.drain, config.drain_seconds)
    serving = asyncio.create_task(server.serve())
    ending = asyncio.create_task(conductor.wait_end())
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again
    control.send(ChildReady(address))
    log.info("listening", address=address)
    try:
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises: a server that ends by itself is a crash
        server.stop()
        with suppress(TimeoutError):  # clients that do not read their last frames do without them
            await asyncio.wait_for(serving, LAST_WORDS_SECONDS)
    finally:
        ending.cancel()
        for fd in (receiver.fileno(), control.fileno()):
            if fd >= 0:
                loop.remove_reader(fd)
    return EXIT_STOPPED


def _on_control(loop: asyncio.AbstractEventLoop, conductor: Conductor, control: ControlEnd) -> None:
    conductor.on_control()
    if not conductor.is_control_open:
        loop.remove_reader(control.fileno())  # at end-of-file it would stay readable for ever


def _join_worker(
    config: GatewayConfig, model: ServedModel, observers: RequestObservers, stack: ExitStack
) -> tuple[GatewayService, EventReceiver]:
    """The service over the rings that the supervisor made."""
    request_ring = _attach_ring(config.request_ring, stack)
    event_ring = _attach_ring(config.event_ring, stack)
    page = StatusPage.attach(_attach(config.status_segment, stack).buffer, STATUS_FIELDS)
    stack.callback(page.close)
    receiver = EventReceiver(event_ring, Doorbell.from_fds(config.event_doorbell_fds), index=config.reply_ring)
    meters = GatewayMeters(traffic=config.traffic, stall_threshold_ms=config.stall_threshold_ms)
    fills = {"request": _fill_of(request_ring), "event": _fill_of(event_ring)}
    exporter = MetricsExporter(meters, page.read, fills, model_name=model.card.id)
    observers.add_probes(exporter)
    service = GatewayService(
        model.card,
        model.tokenizer,
        RequestSender(request_ring, Doorbell.from_fds(config.request_doorbell_fds)),
        receiver,
        AdmissionControl(_admission_limits(config)),
        WorkerView(page.read, config.progress_timeout_seconds),
        meters,
        exporter,
        MonotonicClock(),
        reply_ring=config.reply_ring,
        incarnation=config.incarnation,
        journal=Journal(meters.faults, capacity=config.observation.debug_requests, listeners=observers.listeners),
        log_prompts=config.observation.log_prompts,
    )
    return service, receiver


def _admission_limits(config: GatewayConfig) -> AdmissionLimits:
    return AdmissionLimits(
        config.max_in_flight,
        config.max_queued_prompt_tokens,
        max_num_seqs=config.max_num_seqs,
        traffic=config.traffic,
        forecasts=config.forecasts_admission,
    )


def _build_app(config: GatewayConfig, model: ServedModel, service: GatewayService, conductor: Conductor) -> Any:
    encoder = partial(encode_chat, model.tokenizer, model.chat_template)
    return create_app(
        service,
        model.tokenizer,
        encoder,
        config.http,
        traffic=config.traffic,
        stall_threshold_ns=config.stall_threshold_ns,
        admin_token=config.observation.admin_token,
        ask_log_level=conductor.ask_log_level,
        max_token_chars=model.tokenizer.max_token_chars(),
    )


def _attach(name: str, stack: ExitStack) -> Segment:
    segment = Segment.attach(name)
    stack.callback(segment.close)
    return segment


def _attach_ring(name: str, stack: ExitStack) -> Ring:
    ring = Ring.attach(_attach(name, stack).buffer)
    stack.callback(ring.close)
    return ring


def _fill_of(ring: Ring) -> Callable[[], float]:
    return lambda: ring.statistics().fill_ratio


def _raise_open_file_limit(max_connections: int) -> None:
    """Every connection is an open file: allow as many, as far as the system lets us."""
    needed = max_connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < needed:
            log.warning("few open files are allowed", allowed=allowed, wanted=needed)

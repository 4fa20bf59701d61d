"""`headrace serve`: prepare, wire, supervise.

Owns: the order of a start, and what the operator reads. Runs in: supervisor. Must not know: what a child does.
"""

import asyncio
import signal
import sys
import time

from headrace.ipc.segment import remove_orphans
from headrace.launch.model import ServedModel, prepare_in_child
from headrace.launch.settings import Settings
from headrace.launch.supervisor import Supervisor
from headrace.launch.wiring import Wiring, served_length
from headrace.protocol.record import RecordHeader, RecordTarget
from headrace.telemetry.logs import configure_logging, get_logger
from headrace.telemetry.recorder import check_record_path, create_record

log = get_logger("supervisor")


async def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit code. Raises ConfigurationError and ModelError for what cannot be started."""
    configure_logging(settings.operation.log_format, settings.operation.log_level)
    if settings.operation.record is not None:
        check_record_path(settings.operation.record)
    for orphan in remove_orphans():
        log.info("removed what a dead server left", segment=orphan.name, size_bytes=orphan.size_bytes)
    model = await _prepare_unless_stopped(settings)
    if model is None:
        log.info("stopped while the model was being prepared")
        return 0
    name = settings.model.served_model_name or model.default_name

    def on_serving(address: str) -> None:
        log.info("serving", model=name, address=address, docs=f"{address}/docs")
        if sys.stderr.isatty():
            sys.stderr.write(f"\n  Headrace serves {name} at {address}/v1   (API: {address}/docs, stop: Ctrl-C)\n\n")

    record = _begin_record(settings, model, name)
    with Wiring(settings, model, record) as wiring:
        supervisor = Supervisor(
            wiring,
            drain_seconds=settings.operation.drain_seconds,
            hang_timeout_seconds=settings.operation.hang_timeout_seconds,
            on_serving=on_serving,
        )
        return await supervisor.run()


def _begin_record(settings: Settings, model: ServedModel, name: str) -> RecordTarget | None:
    """The new record's file with its first line, when one is wanted. Raises ConfigurationError."""
    if settings.operation.record is None:
        return None
    traffic = settings.traffic()
    header = RecordHeader(
        started_unix=time.time(),
        started_monotonic_ns=time.monotonic_ns(),
        model=name,
        classes=list(traffic.class_names),
        num_tenants=len(traffic.tenants),
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
        max_model_len=served_length(settings, model),
        enable_prefix_caching=settings.cache.prefix_caching,
    )
    target = create_record(settings.operation.record, header, settings.operation.record_max_mib * 2**20)
    log.info("recording traffic", path=target.path, max_mib=settings.operation.record_max_mib)
    return target


async def _prepare_unless_stopped(settings: Settings) -> ServedModel | None:
    """The model, or None when a signal to stop came first: the child that prepares must not outlive us. Raises ModelError."""
    loop = asyncio.get_running_loop()
    preparing = asyncio.ensure_future(prepare_in_child(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, preparing.cancel)  # the supervisor puts its own there
    try:
        return await preparing
    except asyncio.CancelledError:
        return None

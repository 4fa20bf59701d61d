"""Recorded traffic: a trace's or record's requests, with its own times, lengths and shared beginnings.

Owns: read_traffic, RecordedRun. Runs in: simulator. Must not know: policies, figures.
"""

from pathlib import Path

import msgspec

from headrace.loadtest.arrivals import trace as stretched
from headrace.loadtest.lengths import Lengths, cut_to_context, scaled
from headrace.loadtest.record_file import read_record
from headrace.loadtest.traces import TraceEntry, TraceError, read_trace
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import RecordArrival, RecordEnd, RecordHeader, RecordLine, RecordStep, RecordWorker
from headrace.protocol.traffic import DEFAULT_TENANT, TrafficPolicy
from headrace.simulation.limits import MAX_REQUESTS, RECORD_RANGES, check_range, nanoseconds_due
from headrace.simulation.requests import SimulatedRequest
from headrace.simulation.settings import ServerSettings, TrafficSettings
from headrace.simulation.traffic import Traffic, asked_tokens, cut_note


class RecordedRun(msgspec.Struct, frozen=True):
    """A record in parts. `arrivals` in order of time."""

    header: RecordHeader
    worker: RecordWorker | None
    arrivals: list[RecordArrival]
    steps: list[RecordStep]
    ends: list[RecordEnd]
    num_cut_lines: int

    def server(self) -> ServerSettings:
        """The recorded server's limits and memory. Raises ConfigurationError when its worker never started."""
        if self.worker is None:
            raise ConfigurationError("the record has no line of a worker: how much memory it had is not known.")
        return ServerSettings(
            max_num_seqs=self.header.max_num_seqs,
            max_num_batched_tokens=self.header.max_num_batched_tokens,
            max_model_len=self.header.max_model_len,
            num_blocks=self.worker.num_blocks,
            block_size=self.worker.block_size,
            prefix_caching=self.header.enable_prefix_caching,
        )


def is_record(path: Path) -> bool:
    """Whether it is a record of `headrace serve --record`, and no other kind of trace."""
    try:
        return isinstance(next(read_record(path), None), RecordHeader)
    except TraceError:
        return False


def read_run(path: Path) -> RecordedRun:
    """A whole record. Raises ConfigurationError for a file that is none, or that has numbers of no server."""
    lines: list[RecordLine] = []
    try:
        reader = read_record(path)
        for line in reader:
            lines.append(line)
            _check_line(line, path, len(lines) + reader.num_cut_lines)
    except TraceError as error:
        raise ConfigurationError(f"{error}.") from None
    header = lines[0] if lines else None
    if not isinstance(header, RecordHeader):
        raise ConfigurationError(f"{path}: no record.")
    return RecordedRun(
        header=header,
        worker=next((line for line in lines if isinstance(line, RecordWorker)), None),
        arrivals=sorted((line for line in lines if isinstance(line, RecordArrival)), key=lambda line: line.at_us),
        steps=[line for line in lines if isinstance(line, RecordStep)],
        ends=[line for line in lines if isinstance(line, RecordEnd)],
        num_cut_lines=reader.num_cut_lines,
    )


_CHECKED_FIELDS = {
    kind: tuple((name, RECORD_RANGES[name]) for name in kind.__struct_fields__ if name in RECORD_RANGES)
    for kind in (RecordHeader, RecordWorker, RecordArrival, RecordStep, RecordEnd)
}


def _check_line(line: RecordLine, path: Path, number: int) -> None:
    for name, allowed in _CHECKED_FIELDS[type(line)]:
        if not allowed.low <= getattr(line, name) <= allowed.high:
            check_range(name, getattr(line, name), allowed, f"{path}, line {number}: ")


def trace_path(settings: TrafficSettings) -> Path | None:
    """The file of a workload `trace:FILE`; None for another workload."""
    kind, _, argument = settings.workload.partition(":")
    if kind != "trace":
        return None
    if not argument:
        raise ConfigurationError("workload trace needs a file: trace:FILE.")
    return Path(argument)


def read_traffic(
    path: Path,
    settings: TrafficSettings,
    policy: TrafficPolicy,
    context_tokens: int,
    rate: float | None,
    *,
    at_once: bool = False,
    with_refused: bool = True,
) -> Traffic:
    """The requests of a trace. `rate`: stretch its times to that mean rate; `at_once`: all at time 0.

    Equal beginnings stay equal when lengths are scaled: the parts are scaled with them. Classes that the policy does not know
    are the default one. `with_refused`: those that the recorded server refused come as well, in the length that the load tool
    takes for likely. Raises ConfigurationError.
    """
    if settings.shared_prefix_tokens or settings.classes or settings.tenants:
        raise ConfigurationError("a trace has its own prefixes, classes and tenants: leave out options for them.")
    run = read_run(path) if is_record(path) else None
    entries = _entries(path, settings)
    arrivals: list[RecordArrival | None] = [None] * len(entries)
    if run is not None:
        arrivals[:] = run.arrivals[: len(entries)]
    try:
        moved = stretched([entry.at for entry in entries], None if at_once else rate)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}.") from None
    part_numbers: dict[int, int] = {}  # hashes -> small numbers
    requests: list[SimulatedRequest] = []
    num_cut = 0
    advice = "give a rate or rate_scale, or check the trace's times"
    for number, (at, entry, arrival) in enumerate(zip(moved, entries, arrivals, strict=True), start=1):
        at_seconds = 0.0 if at_once else at / settings.rate_scale
        if settings.duration_seconds is not None and at_seconds >= settings.duration_seconds:
            break
        if arrival is not None and arrival.refused and not with_refused:
            continue
        recorded = scaled(Lengths(entry.prompt_tokens, entry.output_tokens), settings.length_scale)
        lengths = cut_to_context(recorded, context_tokens)
        num_cut += lengths != recorded
        max_tokens, timeout_seconds = settings.max_tokens, settings.timeout_seconds or 0.0
        if arrival is not None:
            max_tokens = max_tokens or max(1, round(arrival.max_tokens * settings.length_scale))
            timeout_seconds = timeout_seconds or arrival.timeout_us / 1e6
        requests.append(
            SimulatedRequest(
                index=len(requests),
                due_ns=nanoseconds_due(at_seconds, number, f"{path}: ", advice),
                prompt_tokens=lengths.prompt_tokens,
                output_tokens=lengths.output_tokens,
                max_tokens=asked_tokens(lengths, max_tokens, context_tokens),
                service_class=_class_name(entry, policy),
                tenant_id=entry.tenant or DEFAULT_TENANT,
                priority=entry.priority,
                timeout_ns=round(timeout_seconds * 1e9),
                part_tokens=max(1, round(entry.part_tokens * settings.length_scale)),
                parts=tuple(part_numbers.setdefault(part, len(part_numbers)) for part in entry.part_ids),
            )
        )
    return Traffic(requests, [*cut_note(num_cut, len(requests), context_tokens), *_notes(settings, None if at_once else rate)])


def _notes(settings: TrafficSettings, rate: float | None) -> list[str]:
    notes = []
    if settings.length_scale != 1.0:
        notes.append(f"recorded lengths were multiplied by {settings.length_scale:g}")
    if rate is not None:
        notes.append(f"recorded times were stretched to {rate:.3g} requests/s")
    elif settings.rate_scale != 1.0:
        notes.append(f"requests come {settings.rate_scale:g} times as fast as recorded")
    return notes


def _entries(path: Path, settings: TrafficSettings) -> list[TraceEntry]:
    limit = MAX_REQUESTS if settings.num_requests is None else settings.num_requests
    try:
        entries = list(read_trace(path, limit, settings.seed))
    except TraceError as error:
        raise ConfigurationError(f"{error}.") from None
    if not entries:
        raise ConfigurationError(f"{path}: no request in it.")
    return entries


def _class_name(entry: TraceEntry, policy: TrafficPolicy) -> str:
    name = entry.service_class or entry.group
    return name if name in policy.class_names else policy.default_class

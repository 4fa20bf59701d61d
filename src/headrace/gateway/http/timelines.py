"""Timelines in answers, for those who ask for them.

Owns: who asked, the Server-Timing header, reports of sequences that were never run. Runs in: gateway.
Must not know: how a timeline is measured.
"""

import time
from collections.abc import Sequence

from headrace.gateway.deltas import GenerationSpec, RequestOrigin
from headrace.gateway.http.exchange import Exchange, Headers
from headrace.gateway.ports import GenerationStream
from headrace.protocol.errors import RequestError
from headrace.telemetry.logs import get_logger
from headrace.telemetry.reports import RequestReport, report_of
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot, TimelineStamps

TIMELINE_HEADER = b"x-headrace-timeline"
_WISHES = {b"true": True, b"1": True, b"false": False, b"0": False}

log = get_logger("http")


def header_wish(exchange: Exchange) -> bool:
    """Whether the header asks for a timeline. Raises RequestError for a value that says neither yes nor no."""
    value = exchange.headers.get(TIMELINE_HEADER)
    if value is None:
        return False
    wish = _WISHES.get(value.strip().lower())
    if wish is None:
        raise RequestError("The header x-headrace-timeline must be true or false.", param="x-headrace-timeline")
    return wish


def reports_of(streams: Sequence[GenerationStream]) -> list[RequestReport]:
    """A report for each choice. A fault of measuring costs the timeline, never the answer."""
    try:
        return [stream.timeline_report() for stream in streams]
    except Exception:
        log.exception("a timeline could not be made")
        return []


def server_timing(reports: Sequence[RequestReport]) -> Headers:
    """The Server-Timing header (W3C Server Timing) of the choice that took longest; milliseconds."""
    if not reports:
        return []
    slowest = max(reports, key=lambda report: report.age_ms)
    metrics = [f"{name};dur={duration_ms:.3f}" for name, duration_ms in slowest.phases.items()]
    return [(b"server-timing", ", ".join([*metrics, f"total;dur={slowest.age_ms:.3f}"]).encode())]


def early_server_timing(origin: RequestOrigin) -> Headers:
    """What is known when a stream's headers go."""
    return [(b"server-timing", b"tokenize;dur=%.3f" % ((origin.tokenized_ns - origin.received_ns) / 1e6))]


def unrun_report(spec: GenerationSpec, model: str) -> RequestReport:
    """Of a sequence that asked for no token, and so was never submitted."""
    origin = spec.origin
    identity = RequestIdentity(
        request_id=0,
        client_request_id=origin.client_request_id,
        choice_index=origin.choice_index,
        api=origin.api,
        model=model,
        service_class=spec.service_class,
        tenant=spec.tenant_id,
        priority=spec.priority,
        num_prompt_tokens=len(spec.prompt_token_ids),
        max_tokens=0,
    )
    now_ns = time.monotonic_ns()
    received_ns, tokenized_ns = origin.received_ns or now_ns, origin.tokenized_ns or now_ns
    snapshot = TimelineSnapshot(
        identity=identity,
        stamps=TimelineStamps(received_ns, tokenized_ns, 0, 0, 0, 0, max(received_ns, tokenized_ns)),
        state="finished",
        finished_reason="length",
        error_code="",
        num_output_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        stalls=(),
        num_stalls=0,
    )
    return report_of(snapshot, now_ns, time.time_ns() - now_ns)

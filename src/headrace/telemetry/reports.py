"""A request's timeline as JSON: what clients that ask for it, GET /debug/requests and `headrace top` see.

Owns: the JSON structs and how they follow from a snapshot. Runs in: gateway. Pure. Must not know: HTTP.
Milliseconds, counted from the request's arrival.
"""

import msgspec

from headrace.protocol.stalls import Stall
from headrace.telemetry.snapshot import TimelineSnapshot

_NS_PER_MS = 1e6


class StallReport(msgspec.Struct, frozen=True):
    """One wait over the threshold, and why (protocol/stalls.py has the causes)."""

    cause: str
    at_ms: float
    duration_ms: float


class RequestReport(msgspec.Struct, frozen=True, rename={"service_class": "class"}):
    """One sequence. `*_ms` stamps are null until it has come to that; `phases` are the durations between them."""

    request_id: str  # x-request-id
    choice: int
    api: str
    model: str
    service_class: str
    tenant: str
    priority: int
    state: str
    finish_reason: str | None
    error_code: str | None
    arrived_at: float  # Unix seconds
    age_ms: float  # until now, or until the end
    tokenized_ms: float | None
    queued_ms: float | None
    first_scheduled_ms: float | None
    first_token_ms: float | None
    last_token_ms: float | None
    end_ms: float | None
    phases: dict[str, float]  # tokenize, queue, prefill, decode, as far as it has come; they add up to last_token_ms
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    preemptions: int
    stalls: list[StallReport]
    num_stalls: int
    waiting_for: str | None  # of a live request that does not get on at the moment: the cause


class DebugRequests(msgspec.Struct, frozen=True):
    """GET /debug/requests: what runs or waits, the oldest first, and what ended lately, the newest first."""

    live: list[RequestReport]
    num_live: int  # also those beyond the limit
    finished: list[RequestReport]


def report_of(
    snapshot: TimelineSnapshot, now_ns: int, unix_minus_monotonic_ns: int, waiting_for: str | None = None
) -> RequestReport:
    """The JSON form. `unix_minus_monotonic_ns`: what makes a Unix time of a monotonic one."""
    identity, stamps = snapshot.identity, snapshot.stamps
    began = stamps.received_ns

    def since(at_ns: int) -> float | None:
        return _ms(at_ns - began) if at_ns else None

    return RequestReport(
        request_id=identity.client_request_id or str(identity.request_id),
        choice=identity.choice_index,
        api=identity.api,
        model=identity.model,
        service_class=identity.service_class,
        tenant=identity.tenant,
        priority=identity.priority,
        state=snapshot.state,
        finish_reason=snapshot.finished_reason or None,
        error_code=snapshot.error_code or None,
        arrived_at=round((began + unix_minus_monotonic_ns) / 1e9, 6),
        age_ms=_ms((stamps.end_ns or now_ns) - began),
        tokenized_ms=since(stamps.tokenized_ns),
        queued_ms=since(stamps.queued_ns),
        first_scheduled_ms=since(stamps.first_scheduled_ns),
        first_token_ms=since(stamps.first_token_ns),
        last_token_ms=since(stamps.last_token_ns) if stamps.first_token_ns else None,
        end_ms=since(stamps.end_ns),
        phases={name: _ms(end_ns - begin_ns) for name, begin_ns, end_ns in phases_of(snapshot)},
        prompt_tokens=identity.num_prompt_tokens,
        cached_tokens=snapshot.num_cached_tokens,
        output_tokens=snapshot.num_output_tokens,
        max_tokens=identity.max_tokens,
        preemptions=snapshot.num_preemptions,
        stalls=[_stall(stall, began) for stall in snapshot.stalls],
        num_stalls=snapshot.num_stalls,
        waiting_for=waiting_for,
    )


def phases_of(snapshot: TimelineSnapshot) -> list[tuple[str, int, int]]:
    """The phases that are over, as (name, begin_ns, end_ns), without gaps: each begins where the one before ended."""
    stamps = snapshot.stamps
    ends = (
        ("tokenize", stamps.tokenized_ns),
        ("queue", stamps.first_scheduled_ns),
        ("prefill", stamps.first_token_ns),
        ("decode", stamps.last_token_ns if snapshot.num_output_tokens > 1 else 0),
    )
    found = []
    begin_ns = stamps.received_ns
    for name, end_ns in ends:
        if not end_ns:
            break
        found.append((name, begin_ns, max(begin_ns, end_ns)))
        begin_ns = max(begin_ns, end_ns)
    return found


def _stall(stall: Stall, began_ns: int) -> StallReport:
    return StallReport(stall.cause.value, _ms(stall.began_ns - began_ns), _ms(stall.duration_ns))


def _ms(duration_ns: int) -> float:
    return round(duration_ns / _NS_PER_MS, 3)

"""One request as the gateway knows it at a moment: its stamps, its stalls, its tokens.

Owns: RequestIdentity, TimelineSnapshot. Runs in: gateway. Must not know: how it is shown (reports.py), logged or exported.
All times are CLOCK_MONOTONIC nanoseconds; 0: it has not come to that.
"""

from dataclasses import dataclass

from headrace.protocol.stalls import Stall


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What does not change over a request's life. No text."""

    request_id: int  # the gateway's number
    client_request_id: str  # x-request-id as answered
    choice_index: int
    api: str  # route template
    model: str  # served name
    service_class: str  # a name of the TrafficPolicy
    tenant: str  # a name of the TrafficPolicy
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class TimelineStamps:
    """When what happened, in this order."""

    received_ns: int  # the body was there: the arrival from which TTFT, queue time and E2E count
    tokenized_ns: int  # checked, rendered, tokenized
    queued_ns: int  # admitted, and on the request ring
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TimelineSnapshot:
    """`state`: queued, prefill, decode, preempted, finished. `finished_reason`: one of catalog.FINISHED_REASONS, or ""."""

    identity: RequestIdentity
    stamps: TimelineStamps
    state: str
    finished_reason: str
    error_code: str  # wire code, when it ended with an error
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    stalls: tuple[Stall, ...]  # the longest ones, in order of time
    num_stalls: int  # all of them

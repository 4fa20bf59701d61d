"""What `headrace top` shows: one frame, as numbers. `headrace top --once --json` prints exactly this (docs/top.md).

Owns: Frame and its parts. Runs in: CLI, pure. Must not know: where numbers come from, how they are drawn.

Names are stable: keys may be added. None is "not known": the server does not show it, there was no earlier look to make a
rate of, or nothing happened of which it could be said. Times are seconds, shares 0 to 1, rates per second of the window.
"""

import enum

import msgspec


class Status(enum.Enum):
    """How the server is."""

    READY = "ready"
    NOT_READY = "not_ready"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"  # it answers, but not whether it is ready


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of the values that came in the window."""

    count: int = 0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Over all requests, and by service class where the server tells classes apart."""

    all: Percentiles = Percentiles()
    by_class: dict[str, Percentiles] = msgspec.field(default_factory=dict)


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers. `reason`: why it is not ready, or not reached."""

    url: str
    status: Status
    reason: str | None = None
    model: str | None = None
    version: str | None = None
    worker_up: bool | None = None
    worker_restarts: int | None = None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens are those computed; `cached_share` is the part of all prompt tokens that the prefix cache gave."""

    output_tokens_per_second: float | None = None
    prompt_tokens_per_second: float | None = None
    cached_share: float | None = None
    started_per_second: float | None = None
    finished_per_second: dict[str, float] = msgspec.field(default_factory=dict)  # by reason
    refused_per_second: float | None = None


class LatencySeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token, between tokens, per output token of a request, and in the queue."""

    ttft: Latency = Latency()
    tbt: Latency = Latency()
    tpot: Latency = Latency()
    queue: Latency = Latency()


class ClassLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one service class now."""

    running: int = 0
    waiting: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The running batch. `blocked_by`: what keeps waiting requests out of it now."""

    running: int | None = None
    waiting: int | None = None
    blocked_by: list[str] = msgspec.field(default_factory=list)
    classes: dict[str, ClassLoad] = msgspec.field(default_factory=dict)
    steps_per_second: float | None = None
    rows_per_step: float | None = None
    tokens_per_step: float | None = None
    prefill_share: float | None = None  # of the steps' tokens
    padding_share: float | None = None  # of the positions computed, those computed in vain
    step_seconds: Percentiles = Percentiles()
    stage_shares: dict[str, float] = msgspec.field(default_factory=dict)  # of the steps' time


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory. `hit_rate`: of the prompt tokens looked up in the window."""

    usage: float | None = None
    hit_rate: float | None = None
    evictions_per_second: float | None = None
    preemptions_per_second: float | None = None
    recomputed_tokens_per_second: float | None = None


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's own work, and the rings between it and the worker (fill 0 to 1)."""

    cpu_seconds_per_token: float | None = None
    ring_fill: dict[str, float] = msgspec.field(default_factory=dict)
    ring_full_per_second: float | None = None


class StallSum(msgspec.Struct, frozen=True, kw_only=True):
    """Waits over the threshold that ended in the window, of one cause."""

    count: int = 0
    seconds: float = 0.0


class LongestStall(msgspec.Struct, frozen=True, kw_only=True):
    """The longest wait of a request so far."""

    cause: str
    seconds: float


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, rename={"service_class": "class"}):
    """One live request."""

    request_id: str
    service_class: str
    tenant: str
    state: str
    age_seconds: float
    prompt_tokens: int
    output_tokens: int
    last_token_seconds_ago: float | None
    waiting_for: str | None
    longest_stall: LongestStall | None


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Live requests: those that wait for something first, then the oldest. `error`: why they are not known."""

    error: str | None = None
    num_live: int | None = None
    slowest: list[RequestRow] = msgspec.field(default_factory=list)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `metrics_error`: why there are no numbers though the server answers."""

    unix_seconds: float
    window_seconds: float | None
    server: Server
    metrics_error: str | None = None
    throughput: Throughput = Throughput()
    latency_seconds: LatencySeconds = LatencySeconds()
    batch: Batch = Batch()
    cache: Cache = Cache()
    gateway: Gateway = Gateway()
    stalls: dict[str, StallSum] | None = None  # by cause, of those that occurred
    requests: Requests = Requests()

"""What one measured run leaves behind: a record of each request, the settings that repeat it, and the client's own state.

Owns: the data between load (client, engine), figures and reports. Runs in: load tool. Must not know: HTTP, statistics.
All times are seconds since the run's start on the client's monotonic clock (one clock for all client processes of a machine).
"""

import enum

import msgspec

RECORD_VERSION = 1


class Outcome(enum.Enum):
    """How a request ended, as its caller sees it. Each offered request has exactly one."""

    COMPLETED = "completed"  # whole: 200, and for a stream a finish_reason and the end marker
    REFUSED = "refused"  # the server said no before any output: 429, 503, 529
    FAILED = "failed"  # everything else: other statuses, error frames, cut connections, time-outs
    UNFINISHED = "unfinished"  # the run ended first; counted as failed in the denominator of goodput


class RequestRecord(msgspec.Struct, kw_only=True):
    """One offered request. `chunk_*` hold only events with non-empty text, in order of arrival."""

    index: int
    process: int  # which client process sent it
    group: str = ""  # class or tenant of a mix; "" when there is one kind
    is_stream: bool = True
    scheduled: float  # when it was due (open loop), or when its client became free (closed loop)
    sent: float  # just before the request's first byte was written, connection set-up included in `connect_seconds` only
    connect_seconds: float | None = None  # None: a kept connection was used
    headers_at: float | None = None
    first_event_at: float | None = None  # first event of any kind, such as an empty role chunk
    chunk_times: list[float] = []  # arrival of each non-empty text; for a whole answer one entry, its arrival
    chunk_chars: list[int] = []
    ended: float | None = None
    outcome: Outcome = Outcome.UNFINISHED
    error_kind: str = ""  # "http_429", "error_frame", "cut", "no_finish", "timeout", "connect", "bad_json" ...
    error_detail: str = ""  # bounded
    status: int | None = None
    finish_reasons: list[str] = []
    num_done_marks: int = 0
    target_prompt_tokens: int | None = None
    target_output_tokens: int | None = None
    prompt_tokens: int | None = None  # from usage
    output_tokens: int | None = None  # from usage
    cached_tokens: int | None = None
    counted_chunks: int = 0  # text events seen, a check on output_tokens
    retry_after: float | None = None


class ClientLoad(msgspec.Struct, kw_only=True):
    """How much the client itself was a bottleneck."""

    num_processes: int
    cpu_cores_used: float  # CPU seconds of all client processes per second of the measured window
    max_process_cpu_share: float  # busiest process, 1.0 = a full core
    send_lag_p50_seconds: float  # sent - scheduled less connection set-up; requests held by max_outstanding left out
    send_lag_p99_seconds: float
    loop_lag_p99_seconds: float  # how late the event loops woke
    was_bottleneck: bool = False
    why: str = ""  # for people; empty when it was not


class RunSettings(msgspec.Struct, kw_only=True):
    """Everything needed to repeat a run. Secrets never stand here."""

    url: str
    model: str
    api: str = "completions"  # or "chat"
    arrival: str = "closed"  # closed, poisson, bursty, constant, ramp, trace
    num_clients: int | None = None  # closed loop
    rate: float | None = None  # requests per second, open loop
    num_requests: int | None = None
    duration_seconds: float | None = None
    workload: str = "fixed"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    length_scale: float = 1.0  # lengths of a trace or shape were multiplied by this
    shared_prefix_tokens: int = 0
    is_salted: bool = True
    is_stream: bool = True
    temperature: float = 0.0
    ignores_eos: bool = True
    seed: int = 0
    num_processes: int = 2
    warm_up_seconds: float = 0.0
    cool_down_seconds: float = 0.0
    timeout_seconds: float = 600.0
    extra: dict[str, str] = {}  # workload- or study-specific, by name


class Run(msgspec.Struct, kw_only=True):
    """One run: what was offered and what came back. Saved whole (JSON) so that figures can be made anew."""

    version: int = RECORD_VERSION
    label: str = ""
    settings: RunSettings
    started_at: str = ""  # ISO 8601, wall clock
    wall_seconds: float
    window_begin: float  # requests scheduled within [begin, end) are measured; the rest is warm-up and cool-down
    window_end: float
    client: ClientLoad
    server: dict[str, str] = {}  # what /v1/models, /version, the Server header said
    environment: dict[str, str] = {}  # of the client: python, platform, headrace version
    warnings: list[str] = []  # of the load itself, for people: a bound was hit, usage could not be asked for
    was_interrupted: bool = False  # by the user: requests under way then are UNFINISHED
    requests: list[RequestRecord]

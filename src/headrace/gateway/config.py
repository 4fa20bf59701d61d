"""What a gateway process is told when it starts.

Owns: GatewayConfig. Runs in: supervisor (writes it), gateway (reads it). Must not know: flags, how a model is prepared.
"""

import msgspec

from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import RecordTarget
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.logs import LogFormat


class ObservationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is looked at, and who may see it."""

    log_prompts: bool = False  # each request's prompt goes into the log
    debug_requests: int = 256  # finished requests that are remembered
    admin_token: str | None = None  # opens /debug; None: to loopback clients only
    otlp_endpoint: str | None = None  # None: no traces
    trace_sample_ratio: float = 1.0  # of requests whose client does not decide it

    def __repr__(self) -> str:
        """Without the token, wherever it may be shown."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "admin_token"}
        return f"ObservationConfig({shown})"


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One life of a gateway. File descriptors are inherited and given by number; rings by the names of their segments.

    Raises ConfigurationError for values that cannot work.
    """

    incarnation: int  # counts up with every start of a gateway, over all gateways: the upper bits of its request ids
    reply_ring: int = 0  # which of the worker's event rings is this gateway's
    control_fd: int
    request_ring: str
    request_doorbell_fds: tuple[int, int]
    event_ring: str
    event_doorbell_fds: tuple[int, int]
    status_segment: str
    model_folder: str  # prepared: manifest, tokenizer, chat template
    served_model_name: str | None = None  # None: the manifest's
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    max_num_seqs: int  # most sequences that the worker runs at once
    max_queued_requests: int = 1024  # most requests beside those
    max_queued_prompt_tokens: int = 1_000_000  # of requests that have shown no token yet
    forecasts_admission: bool = True  # False: the bounds alone refuse
    keep_alive_seconds: float = 75.0  # how long an idle connection is kept: longer than what proxies keep theirs
    listen_backlog: int = 1024  # connections not yet accepted
    drain_seconds: float = 30.0  # on SIGTERM; the supervisor's message has its own
    progress_timeout_seconds: float = 30.0  # not ready when the worker has shown no sign of life for so long
    http: HttpSettings = HttpSettings()
    log_format: LogFormat = "auto"
    log_level: str = "info"
    traffic: TrafficPolicy = TrafficPolicy()
    stall_threshold_ms: float = 250.0  # who does not get on for so long has stalled
    record: RecordTarget | None = None  # where lines about the traffic go
    observation: ObservationConfig = ObservationConfig()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"--port must lie between 0 and 65535, not {self.port}.")
        if not 0 <= self.incarnation < 2**22:
            raise ConfigurationError(f"incarnation must lie between 0 and {2**22 - 1}, not {self.incarnation}.")
        for name in ("max_num_seqs", "max_queued_prompt_tokens", "listen_backlog"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1.")
        for name in ("max_queued_requests", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must not be negative.")
        for name in ("keep_alive_seconds", "progress_timeout_seconds", "stall_threshold_ms"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be greater than 0.")

    @property
    def stall_threshold_ns(self) -> int:
        """In nanoseconds."""
        return round(self.stall_threshold_ms * 1e6)

    @property
    def max_in_flight(self) -> int:
        """Most requests that run or wait."""
        return self.max_num_seqs + self.max_queued_requests

    @property
    def max_connections(self) -> int:
        """Most connections open at once: one for each request, and as many again for refused ones, probes and idle ones."""
        return max(4096, 2 * self.max_in_flight)

"""What a gateway process is told when it starts.

Owns: GatewayConfig. Runs in: supervisor (writes it), gateway (reads it). Must not know: flags, how a model is prepared.
"""

import msgspec

from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import ConfigurationError
from headrace.telemetry.logs import LogFormat


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
    keep_alive_seconds: float = 75.0  # how long an idle connection is kept: longer than what proxies keep theirs
    listen_backlog: int = 1024  # connections not yet accepted
    drain_seconds: float = 30.0  # on SIGTERM; the supervisor's message has its own
    progress_timeout_seconds: float = 30.0  # not ready when the worker has shown no sign of life for so long
    http: HttpSettings = HttpSettings()
    log_format: LogFormat = "auto"
    log_level: str = "info"

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
        for name in ("keep_alive_seconds", "progress_timeout_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be greater than 0.")

    @property
    def max_in_flight(self) -> int:
        """Most requests that run or wait."""
        return self.max_num_seqs + self.max_queued_requests

    @property
    def max_connections(self) -> int:
        """Most connections open at once: one for each request, and as many again for refused ones, probes and idle ones."""
        return max(4096, 2 * self.max_in_flight)

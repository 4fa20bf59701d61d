"""What a worker process is told when it starts.

Owns: WorkerConfig. Runs in: supervisor (writes it), worker (reads it). Must not know: how an executor is built.
"""

from typing import Literal

import msgspec

from headrace.protocol.record import RecordTarget
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.logs import LogFormat


class GatewayLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two rings shared with one gateway. `index` is what GenerationRequest.reply_ring names."""

    index: int
    request_ring: str  # segment name; the worker reads
    event_ring: str  # segment name; the worker writes
    event_doorbell_fds: tuple[int, int]  # rung after events were written


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One life of a worker. File descriptors are inherited and given by number."""

    epoch: int  # which life this is: counts up with every start
    control_fd: int
    request_doorbell_fds: tuple[int, int]  # one doorbell for the request rings of all gateways
    status_segment: str
    gateways: list[GatewayLink]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # the executor's own limit and the pool may lower it
    policy: Literal["headrace", "fcfs"] = "headrace"
    step_time_budget: bool = True
    min_chunk_tokens: int = 64
    class_aging_seconds: float = 30.0
    enable_prefix_caching: bool = True
    max_drain_messages: int = 64  # most messages taken between two steps, so that a flood cannot stall generation
    max_failed_steps: int = 8  # so many failed steps in a row, and the worker gives itself up for a restart
    stop_flush_seconds: float = 1.0  # how long an orderly stop tries to hand over the last events
    log_format: LogFormat = "auto"
    log_level: str = "info"
    traffic: TrafficPolicy = TrafficPolicy()
    stall_threshold_ms: float = 250.0  # who does not get on for so long has stalled
    record: RecordTarget | None = None  # where lines about steps go

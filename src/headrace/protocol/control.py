"""What the supervisor and its children tell one another over their control sockets.

Owns: the control messages. Runs in: supervisor, gateway, worker. Must not know: sockets.
A child that reads end-of-file has lost its supervisor and stops.
"""

import msgspec


class WorkerStarted(msgspec.Struct, frozen=True, tag="worker_started"):
    """To the gateway: a worker process is being started. It is ready when its WorkerHello comes over the event ring."""

    epoch: int
    pid: int


class WorkerExited(msgspec.Struct, frozen=True, tag="worker_exited"):
    """To the gateway: the worker of this epoch is gone; its requests end now. `gives_up`: it will not be started again."""

    epoch: int
    reason: str
    restart_in_seconds: float
    gives_up: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To a child: take no new work, let running streams end within the time, then stop."""

    within_seconds: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To a child: stop now; what still runs is ended with an error."""


class SetLogLevel(msgspec.Struct, frozen=True, tag="set_log_level"):
    """From a gateway: an operator asked for this least level of log lines. To a child: it holds from now on."""

    level: str  # one of telemetry.logs.LEVELS


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """From a child: serving. `detail` is one line for the operator, such as the address or the model's size and load time."""

    detail: str = ""


class ChildFailed(msgspec.Struct, frozen=True, tag="failed"):
    """From a child before it exits: it cannot start, and another try would not help (a bad model, a port in use)."""

    message: str


ControlMessage = WorkerStarted | WorkerExited | Drain | Stop | SetLogLevel | ChildReady | ChildFailed

"""What is compared: ways to schedule the same traffic.

Owns: Policy, its hooks, the built-in policies. Runs in: simulator. Must not know: traffic, figures.

A policy changes the scheduler's configuration, replaces the scheduler, rewrites requests, decides at the door, or holds
accepted requests before the scheduler. What it leaves alone is as configured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from headrace.gateway.admission import AdmissionControl, AdmissionLimits, Permit
from headrace.gateway.outlook import Applicant
from headrace.protocol.errors import ConfigurationError, RequestError
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.traffic import DEFAULT_TENANT, TrafficPolicy
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.simulation.requests import SimulatedRequest
from headrace.simulation.step_model import StepModel


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated: the server's configuration, its memory, and how fast it is."""

    config: SchedulerConfig
    spec: ExecutorSpec
    step_model: StepModel
    traffic: TrafficPolicy
    max_in_flight: int
    max_queued_prompt_tokens: int
    forecasts_admission: bool = True  # False: only full queues refuse


@dataclass(frozen=True, slots=True)
class Refusal:
    """No, and when to come again."""

    retry_after_ns: int


class Admission(Protocol):
    """Who may enter. Every accepted request's end is told, whatever it was; times never go back, though they may repeat."""

    def decide(self, request: SimulatedRequest, now_ns: int) -> Refusal | None:
        """None: it is accepted."""
        ...

    def note_step(self, decode_rows: int, prefill_tokens: int, context_tokens: int, duration_ns: int, now_ns: int) -> None:
        """A step has ended now."""
        ...

    def note_first_token(self, request: SimulatedRequest, now_ns: int) -> None:
        """Its prompt waits no longer."""
        ...

    def note_end(self, request: SimulatedRequest, now_ns: int, *, completed: bool) -> None:
        """It has left. `completed`: with all its output."""
        ...


class Gate(Protocol):
    """Holds accepted requests, in order of arrival, before the scheduler. With nobody inside, the first must be let in."""

    def has_room(self, request: SimulatedRequest) -> bool:
        """Whether it may go to the scheduler now."""
        ...

    def enter(self, request: SimulatedRequest) -> None:
        """It does."""
        ...

    def leave(self, request: SimulatedRequest) -> None:
        """One that entered has ended."""
        ...


class ServerAdmission:
    """The gateway's own admission: bounds, forecasts of first tokens, times to come again, places kept for the refused.

    `forecasts`: False leaves the bounds alone, those of the classes included; None is as configured.
    """

    def __init__(self, machine: Machine, *, forecasts: bool | None = None) -> None:
        self._traffic = machine.traffic
        self._control = AdmissionControl(
            AdmissionLimits(
                machine.max_in_flight,
                machine.max_queued_prompt_tokens,
                max_num_seqs=machine.config.max_num_seqs,
                traffic=machine.traffic,
                forecasts=machine.forecasts_admission if forecasts is None else forecasts,
            )
        )
        self._permits: dict[int, Permit] = {}

    def decide(self, request: SimulatedRequest, now_ns: int) -> Refusal | None:
        """Ask for a permit. Who comes again is known by its number, as callers are by their request's digest."""
        applicant = Applicant(
            self._traffic.class_of(request.service_class),
            self._traffic.tenant_name(request.tenant_id),
            request.index.to_bytes(8, "big"),
            request.timeout_ns,
        )
        try:
            self._permits[request.index] = self._control.admit(request.prompt_tokens, now_ns, applicant)
        except RequestError as error:
            return Refusal(round((error.retry_after_seconds or 0) * 1e9))
        return None

    def note_step(self, decode_rows: int, prefill_tokens: int, context_tokens: int, duration_ns: int, now_ns: int) -> None:
        """It goes by first tokens and ends alone."""

    def note_first_token(self, request: SimulatedRequest, now_ns: int) -> None:
        """Its tokens leave the queue."""
        self._permits[request.index].leave_queue(now_ns)

    def note_end(self, request: SimulatedRequest, now_ns: int, *, completed: bool) -> None:
        """Take the permit back."""
        self._permits.pop(request.index).release(now_ns, completed=completed)


class OpenDoor:
    """Refuses nobody: for requests that a server has let in already, and for a queue that is to be full."""

    def __init__(self, machine: Machine) -> None:
        """Nothing of the machine matters."""

    def decide(self, request: SimulatedRequest, now_ns: int) -> Refusal | None:
        """Come in."""
        return None

    def note_step(self, decode_rows: int, prefill_tokens: int, context_tokens: int, duration_ns: int, now_ns: int) -> None:
        """Nothing to account for."""

    def note_first_token(self, request: SimulatedRequest, now_ns: int) -> None:
        """Nothing to account for."""

    def note_end(self, request: SimulatedRequest, now_ns: int, *, completed: bool) -> None:
        """Nothing to account for."""


class OpenGate:
    """Holds nobody back."""

    def has_room(self, request: SimulatedRequest) -> bool:
        """Always."""
        return True

    def enter(self, request: SimulatedRequest) -> None:
        """Nothing to account for."""

    def leave(self, request: SimulatedRequest) -> None:
        """Nothing to account for."""


class ReservingGate:
    """Lets a request in when blocks for its prompt and all of its max_tokens are free of others' reservations.

    So reserved servers before paged memory (Orca, OSDI 2022; the "Orca (Max)" and "(Pow2)" of Kwon et al., SOSP 2023): whoever
    is in never waits for memory and is never preempted, and much of the memory is never used. Shared blocks are not discounted.
    """

    def __init__(self, machine: Machine) -> None:
        self._block_size = machine.spec.block_size
        self._max_model_len = min(machine.config.max_model_len, machine.spec.max_model_len)
        self._num_blocks_left = machine.spec.num_blocks
        self._num_places_left = machine.config.max_num_seqs
        self._reserved: dict[int, int] = {}

    def has_room(self, request: SimulatedRequest) -> bool:
        """A place, and all the memory that it may come to need."""
        return self._num_places_left > 0 and (not self._reserved or self._needed(request) <= self._num_blocks_left)

    def enter(self, request: SimulatedRequest) -> None:
        """Reserve."""
        needed = self._needed(request)
        self._reserved[request.index] = needed
        self._num_blocks_left -= needed
        self._num_places_left -= 1

    def leave(self, request: SimulatedRequest) -> None:
        """Give the reservation back."""
        self._num_blocks_left += self._reserved.pop(request.index)
        self._num_places_left += 1

    def _needed(self, request: SimulatedRequest) -> int:
        return -(-min(request.prompt_tokens + request.max_tokens, self._max_model_len) // self._block_size)


def _as_configured(machine: Machine) -> SchedulerConfig:
    return machine.config


def _real_scheduler(config: SchedulerConfig, spec: ExecutorSpec) -> Scheduler:
    return Scheduler(config, spec)


def _as_it_is(request: GenerationRequest, machine: Machine) -> GenerationRequest:
    return request


def _open_gate(machine: Machine) -> Gate:
    return OpenGate()


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to schedule. Hooks are called anew for each simulation, so that none sees another's state."""

    name: str
    description: str
    config: Callable[[Machine], SchedulerConfig] = _as_configured
    scheduler: Callable[[SchedulerConfig, ExecutorSpec], Scheduler] = _real_scheduler
    rewrite: Callable[[GenerationRequest, Machine], GenerationRequest] = _as_it_is
    admission: Callable[[Machine], Admission] = ServerAdmission
    gate: Callable[[Machine], Gate] = _open_gate


def _by_forecast(machine: Machine) -> Admission:
    return ServerAdmission(machine, forecasts=True)


def _bounds_only(machine: Machine) -> Admission:
    """Nothing is forecast: only full queues refuse, the server's and those of the classes."""
    return ServerAdmission(machine, forecasts=False)


def _headrace(machine: Machine) -> SchedulerConfig:
    return replace(machine.config, policy="headrace", step_time_budget=True)


def _first_come(machine: Machine) -> SchedulerConfig:
    """Chunks of a fixed number of tokens, in order of arrival."""
    return replace(machine.config, policy="fcfs", step_time_budget=False)


def _unchunked(machine: Machine) -> SchedulerConfig:
    """A budget that no step can reach."""
    config = _first_come(machine)
    return replace(config, max_num_batched_tokens=config.max_num_seqs * config.max_model_len)


def _anonymous(request: GenerationRequest, machine: Machine) -> GenerationRequest:
    return msgspec.structs.replace(request, priority=0, tenant_id=DEFAULT_TENANT, service_class=machine.traffic.default_class)


HEADRACE = Policy(
    "headrace",
    "classes, fair tenants with places kept for light ones, steps bounded in time, admission by forecast with times to come "
    "again",
    config=_headrace,
    admission=_by_forecast,
)
CURRENT = Policy("current", "scheduler and admission as configured")
EVERYBODY = Policy("everybody", "scheduler as configured; nobody is refused", admission=OpenDoor)
UNGUARDED = Policy(
    "unguarded", "as headrace, but nobody is refused before a queue is full", config=_headrace, admission=_bounds_only
)
FCFS = Policy(
    "fcfs",
    "in order of arrival alone: priorities, classes and tenants are hidden from the scheduler; only full queues refuse",
    config=_first_come,
    rewrite=_anonymous,
    admission=_bounds_only,
)
NO_CHUNKING = Policy(
    "no-chunking",
    "as fcfs, and prompts are computed whole, in one step",
    config=_unchunked,
    rewrite=_anonymous,
    admission=_bounds_only,
)
RESERVE_MAX = Policy(
    "reserve-max",
    "as fcfs, and a request joins when blocks for its prompt and all of max_tokens are free",
    config=_first_come,
    rewrite=_anonymous,
    admission=_bounds_only,
    gate=ReservingGate,
)
POLICIES: dict[str, Policy] = {policy.name: policy for policy in (HEADRACE, CURRENT, UNGUARDED, FCFS, NO_CHUNKING, RESERVE_MAX)}


def policies_of(names: Sequence[str]) -> tuple[Policy, ...]:
    """By name, in that order. Raises ConfigurationError for an unknown or repeated one."""
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigurationError(f"no policy {', '.join(map(repr, unknown))}; there are {', '.join(POLICIES)}.")
    if not names or len(set(names)) < len(names):
        raise ConfigurationError("give one or more policies, each once.")
    return tuple(POLICIES[name] for name in names)

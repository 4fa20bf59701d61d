"""One call of the simulator: the same traffic under each policy.

Owns: run_study, measure_capacity, SimulationReport. Runs in: simulator. Must not know: terminals, charts, files of results.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace import __version__
from headrace.protocol.errors import ConfigurationError
from headrace.simulation.engine import Clients, Simulation
from headrace.simulation.figures import PolicyResult, figures_of
from headrace.simulation.parallel import simulate_in_processes
from headrace.simulation.policies import EVERYBODY, Machine, Policy, policies_of
from headrace.simulation.recorded import read_traffic, trace_path
from headrace.simulation.settings import SimulationSettings
from headrace.simulation.step_model import StepFit
from headrace.simulation.traffic import Traffic, draw_traffic

REPORT_FORMAT = "headrace-simulation"
REPORT_VERSION = 1
MIN_CAPACITY_REQUESTS, MAX_CAPACITY_REQUESTS = 200, 4000
CAPACITY_ROUNDS = 8  # so many requests for each place

Progress = Callable[[str, int, int], None]  # (what is simulated, requests ended, requests)


class TrafficFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic as it was simulated."""

    num_requests: int
    rate: float  # mean, requests per second
    mean_prompt_tokens: float
    mean_output_tokens: float
    notes: list[str]  # what was cut, scaled or stretched


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved. It depends on the settings and the files that they name, and on nothing else."""

    format: str = REPORT_FORMAT
    version: int = REPORT_VERSION
    headrace: str = __version__
    settings: SimulationSettings
    fit: StepFit | None = None  # where the step model was fitted
    capacity_per_second: float | None = None  # where the load was given as a multiple of it
    traffic: TrafficFigures
    results: list[PolicyResult]


def run_study(
    settings: SimulationSettings,
    fit: StepFit | None = None,
    on_progress: Progress | None = None,
    *,
    num_processes: int = 1,
) -> SimulationReport:
    """Make the traffic, simulate it under each policy. Raises ConfigurationError, in words for the user.

    The report is the same for any number of processes.
    """
    settings.check()
    policies = policies_of(settings.policies)
    machine = settings.server.machine(settings.step_model, settings.policy)
    capacity = None
    rate = settings.traffic.rate
    if settings.traffic.load is not None:
        capacity = measure_capacity(settings, machine, on_progress)
        rate = capacity * settings.traffic.load
    traffic = _traffic(settings, rate)
    if not any(request.due_ns >= settings.warm_up_seconds * 1e9 for request in traffic.requests):
        raise ConfigurationError("every request is due within the warm-up: nothing would be measured.")
    total = len(traffic.requests)
    if num_processes > 1 and len(policies) > 1:

        def tell(number: int, num_ended: int) -> None:
            if on_progress is not None:
                on_progress(policies[number].name, num_ended, total)

        results = simulate_in_processes(
            _Task(settings, rate), len(policies), min(num_processes, len(policies)), tell if on_progress else None
        )
    else:
        results = [_simulate(policy, traffic, machine, settings, _told(policy.name, total, on_progress)) for policy in policies]
    return SimulationReport(
        settings=settings, fit=fit, capacity_per_second=capacity, traffic=_traffic_figures(traffic), results=results
    )


@dataclass(frozen=True)
class _Task:
    """One policy's simulation in another process, which makes the same traffic from the same settings."""

    settings: SimulationSettings
    rate: float | None

    def __call__(self, number: int, told: Callable[[int, int], None]) -> PolicyResult:
        settings = self.settings
        machine = settings.server.machine(settings.step_model, settings.policy)
        policy = policies_of(settings.policies)[number]
        return _simulate(policy, _traffic(settings, self.rate), machine, settings, told)


def measure_capacity(settings: SimulationSettings, machine: Machine, on_progress: Progress | None = None) -> float:
    """Requests per second of the scheduler as configured when more than it can take waits all the time.

    Requests all come at once and none is refused; what completes is counted in the middle three fifths of the time until the
    last one joined, so that neither the first filling nor the emptying counts.
    """
    num_requests = min(max(MIN_CAPACITY_REQUESTS, CAPACITY_ROUNDS * machine.config.max_num_seqs), MAX_CAPACITY_REQUESTS)
    traffic_settings = msgspec.structs.replace(
        settings.traffic, num_requests=num_requests, duration_seconds=None, timeout_seconds=None
    )
    traffic = _traffic(msgspec.structs.replace(settings, traffic=traffic_settings), None, at_once=True)
    simulation = Simulation(traffic.requests, EVERYBODY, machine)
    total = len(traffic.requests)
    finished = simulation.run(_told("capacity", total, on_progress)).finished
    joined_ns = max(item.first_scheduled_ns for item in finished)
    low_ns, high_ns = joined_ns // 5, joined_ns * 4 // 5
    num_ended = sum(low_ns < item.end_ns <= high_ns for item in finished)
    if num_ended < total // 10:  # nearly all fitted in at once
        return total / max(item.end_ns for item in finished) * 1e9
    return num_ended / (high_ns - low_ns) * 1e9


def _traffic(settings: SimulationSettings, rate: float | None, *, at_once: bool = False) -> Traffic:
    context_tokens = settings.server.context_tokens
    path = trace_path(settings.traffic)
    if path is not None:
        return read_traffic(path, settings.traffic, settings.policy, context_tokens, rate, at_once=at_once)
    if rate is None and not at_once:
        raise ConfigurationError("give a rate (requests a second) or a load (times the capacity).")
    return draw_traffic(settings.traffic, settings.policy, context_tokens, rate)


def _simulate(
    policy: Policy,
    traffic: Traffic,
    machine: Machine,
    settings: SimulationSettings,
    told: Callable[[int, int], None] | None,
) -> PolicyResult:
    outcome = Simulation(traffic.requests, policy, machine, Clients(settings.max_tries)).run(told)
    return figures_of(policy.name, outcome, settings)


def _told(name: str, total: int, on_progress: Progress | None) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    tell = on_progress
    tell(name, 0, total)
    return lambda num_ended, now_ns: tell(name, num_ended, total)


def _traffic_figures(traffic: Traffic) -> TrafficFigures:
    requests = traffic.requests
    return TrafficFigures(
        num_requests=len(requests),
        rate=traffic.rate,
        mean_prompt_tokens=sum(request.prompt_tokens for request in requests) / len(requests),
        mean_output_tokens=sum(request.output_tokens for request in requests) / len(requests),
        notes=traffic.notes,
    )

"""Is the simulation right? A record's own requests, simulated, beside how they ended in truth.

Owns: validate, ValidationReport. Runs in: simulator. Must not know: terminals, files of results.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace import __version__
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.record import RecordArrival, RecordEnd
from headrace.simulation.engine import Simulation
from headrace.simulation.figures import tail
from headrace.simulation.policies import EVERYBODY
from headrace.simulation.recorded import RecordedRun, read_run, read_traffic
from headrace.simulation.requests import FinishedRequest
from headrace.simulation.settings import ServerSettings, SimulationSettings, TrafficSettings
from headrace.simulation.step_model import StepFit, StepModel, fit_steps

VALIDATION_FORMAT = "headrace-simulation-validation"
_COMPLETED = (FinishReason.LENGTH.value, FinishReason.STOP.value)
_PERCENTILES = ("mean", "p50", "p90", "p99")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, in its own unit. `error`: simulated / recorded - 1; None where the recorded one is 0 or there is none."""

    name: str
    unit: str
    recorded: float | None
    simulated: float | None
    error: float | None


class ValidationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved. `num_compared`: requests that completed in truth; the others were load and are not compared.

    `left_out`: how many of the `num_requests` were not compared, by the reason in words. Requests that the recorded server
    refused are among neither.
    """

    format: str = VALIDATION_FORMAT
    version: int = 1
    headrace: str = __version__
    record: str
    server: ServerSettings
    step_model: StepModel
    fit: StepFit | None
    num_requests: int
    num_compared: int
    num_cut_lines: int
    comparisons: list[Comparison]
    left_out: dict[str, int] = {}


class _Times(msgspec.Struct, frozen=True):
    """Of one request that completed, from its arrival; its arrival itself from the simulation's or record's start."""

    arrival_ns: int
    queue_ns: int
    ttft_ns: int
    last_token_ns: int
    output_tokens: int
    cached_tokens: int


def validate(
    path: Path, step_model: StepModel | None = None, on_progress: Callable[[int, int], None] | None = None
) -> ValidationReport:
    """Simulate the record's server and requests. Without a step model it is fitted to the record's own steps.

    Requests that the recorded server refused are left out, since they never reached its scheduler. Requests are compared one
    set with the same set: those that completed in truth. Raises ConfigurationError.
    """
    run = read_run(path)
    server = run.server()
    fit = fit_steps(run.steps) if step_model is None else None
    model = fit.model if fit is not None else step_model or StepModel()
    settings = SimulationSettings(server=server, step_model=model)
    traffic_settings = TrafficSettings(workload=f"trace:{path}", arrival="trace")
    traffic = read_traffic(path, traffic_settings, settings.policy, server.context_tokens, None, with_refused=False)
    taken = [arrival for arrival in run.arrivals if not arrival.refused]
    finished = Simulation(traffic.requests, EVERYBODY, server.machine(model, settings.policy)).run(on_progress).finished
    recorded, simulated, left_out = _pairs(run, taken, finished)
    if not recorded:
        raise ConfigurationError(f"{path}: no request in it completed: there is nothing to compare.")
    return ValidationReport(
        record=path.name,
        server=server,
        step_model=model,
        fit=fit,
        num_requests=len(taken),
        num_compared=len(recorded),
        num_cut_lines=run.num_cut_lines,
        comparisons=_comparisons(recorded, simulated),
        left_out=dict(sorted(left_out.items())),
    )


def _pairs(
    run: RecordedRun, taken: Sequence[RecordArrival], finished: Sequence[FinishedRequest]
) -> tuple[list[_Times], list[_Times], Counter[str]]:
    """(recorded, simulated) times of the requests that completed in truth and in the simulation, and why others did not."""
    ends = {(end.gateway, end.id): end for end in run.ends}
    recorded, simulated = [], []
    left_out: Counter[str] = Counter()
    for arrival, item in zip(taken, finished, strict=True):
        end = ends.get((arrival.gateway, arrival.id))
        if end is None or end.reason not in _COMPLETED or end.ttft_us < 0 or item.reason not in _COMPLETED:
            left_out[_why_not(end, item)] += 1
            continue
        recorded.append(_recorded_times(arrival, end))
        simulated.append(
            _Times(
                arrival_ns=item.arrival_ns,
                queue_ns=item.first_scheduled_ns - item.arrival_ns,
                ttft_ns=item.token_ns[0] - item.arrival_ns,
                last_token_ns=item.token_ns[-1] - item.arrival_ns,
                output_tokens=len(item.token_ns),
                cached_tokens=item.num_cached_tokens,
            )
        )
    return recorded, simulated, left_out


def _why_not(end: RecordEnd | None, item: FinishedRequest) -> str:
    """Why a request cannot be compared, in words."""
    if end is None:
        return "whose end is not in the record"
    if end.reason not in _COMPLETED:
        return f"ended by {end.reason}"
    if end.ttft_us < 0:
        return "without a first token"
    return f"ended by {item.reason} in the simulation"


def _recorded_times(arrival: RecordArrival, end: RecordEnd) -> _Times:
    last_us = end.last_token_us if end.last_token_us >= 0 else end.at_us - arrival.at_us
    return _Times(
        arrival_ns=arrival.at_us * 1000,
        queue_ns=max(end.queue_us, 0) * 1000,
        ttft_ns=end.ttft_us * 1000,
        last_token_ns=last_us * 1000,
        output_tokens=end.output_tokens,
        cached_tokens=end.cached_tokens,
    )


def _comparisons(recorded: Sequence[_Times], simulated: Sequence[_Times]) -> list[Comparison]:
    found = []
    figures: tuple[tuple[str, Callable[[_Times], float | None]], ...] = (
        ("queue", lambda times: times.queue_ns),
        ("TTFT", lambda times: times.ttft_ns),
        ("TPOT", _tpot),
        ("E2E", lambda times: times.last_token_ns),
    )
    for name, figure in figures:
        sides = [tail([value for times in side if (value := figure(times)) is not None]) for side in (recorded, simulated)]
        found += [_compare(f"{name} {key}", "seconds", getattr(sides[0], key), getattr(sides[1], key)) for key in _PERCENTILES]
    found.append(_compare("output throughput", "tokens/s", _throughput(recorded), _throughput(simulated)))
    cached = [float(sum(times.cached_tokens for times in side)) for side in (recorded, simulated)]
    found.append(_compare("prompt tokens from cache", "tokens", *cached))
    return found


def _tpot(times: _Times) -> float | None:
    return (times.last_token_ns - times.ttft_ns) / (times.output_tokens - 1) if times.output_tokens > 1 else None


def _throughput(side: Sequence[_Times]) -> float:
    """From the first arrival to the last token."""
    span_ns = max(times.arrival_ns + times.last_token_ns for times in side) - min(times.arrival_ns for times in side)
    return sum(times.output_tokens for times in side) / span_ns * 1e9 if span_ns > 0 else 0.0


def _compare(name: str, unit: str, recorded: float | None, simulated: float | None) -> Comparison:
    error = simulated / recorded - 1 if recorded and simulated is not None else None
    return Comparison(name=name, unit=unit, recorded=recorded, simulated=simulated, error=error)

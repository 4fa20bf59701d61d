"""Load raised step by step, by clients or by rate: where throughput stops rising, and what more load costs.

Owns: the points of a sweep, when it stops, its report. Runs in: load tool. Must not know: HTTP, how figures are computed.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from headrace.loadtest.detection import SweepPoint, find_knee
from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget, summarize
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.report.model import Curve, Mark, Report, ReportSection, Verdict, VerdictKind
from headrace.loadtest.report.tables import number, percent
from headrace.loadtest.results import Distribution, RunResult
from headrace.loadtest.studies.alternation import Measure
from headrace.loadtest.studies.errors import Ending
from headrace.loadtest.studies.signs import blocking_verdicts, saturation_verdict

MIN_GAIN = 0.05  # a point that brings less throughput over the best before it brought nothing
NUM_FLAT_POINTS = 2  # so many in a row end the sweep: one may be noise
MIN_SERVED_SHARE = 0.9  # of the offered rate; below it the server is behind
MAX_LOST_SHARE = 0.5  # refused and failed, of offered


@dataclasses.dataclass(frozen=True)
class Point:
    """One load level."""

    load: float  # clients, or offered requests per second
    run: Run
    result: RunResult


def stop_reason(points: Sequence[Point], *, is_rate: bool) -> str:
    """Why more load would show nothing new, or "". Pure.

    By clients: the last two points each raised output throughput by less than 5 % over the best before them. By rate: the last
    two completed less than 90 % of what was offered. Either way: more than half of the last point's requests were lost.
    """
    if not points:
        return ""
    last = points[-1].result
    lost = last.requests.refused + last.requests.failed
    if last.requests.offered and lost > MAX_LOST_SHARE * last.requests.offered:
        return f"{lost} of {last.requests.offered} requests were refused or failed"
    if len(points) <= NUM_FLAT_POINTS:
        return ""
    tail = points[-NUM_FLAT_POINTS:]
    if is_rate:
        behind = [point.result.requests_per_second < MIN_SERVED_SHARE * point.result.offered_per_second for point in tail]
        share = last.requests_per_second / max(last.offered_per_second, 1e-9)
        return f"the server completes {percent(share)} of what is offered" if all(behind) else ""
    best = max(point.result.output_tokens_per_second for point in points[:-NUM_FLAT_POINTS])
    if all(point.result.output_tokens_per_second < best * (1 + MIN_GAIN) for point in tail):
        return f"throughput has not risen by {MIN_GAIN:.0%} over {len(tail)} points"
    return ""


def settings_at(settings: RunSettings, load: float, *, is_rate: bool, requests_per_client: int) -> RunSettings:
    """The settings of one point. Many clients need more requests than few, or a point would be all start and end."""
    if is_rate:
        arrival = settings.arrival if settings.arrival != "closed" else "poisson"
        return msgspec.structs.replace(settings, rate=load, num_clients=None, arrival=arrival)
    clients = int(load)
    wanted = None if settings.num_requests is None else max(settings.num_requests, requests_per_client * clients)
    return msgspec.structs.replace(settings, num_clients=clients, rate=None, arrival="closed", num_requests=wanted)


def run_sweep(
    settings: RunSettings,
    loads: Sequence[float],
    measure: Measure,
    *,
    is_rate: bool = False,
    targets: Sequence[GoodputTarget] = DEFAULT_TARGETS,
    requests_per_client: int = 4,
    is_stopped_early: bool = True,
    on_point: Callable[[Point], None] | None = None,
) -> Report:
    """Measure each load in rising order and say what the curve shows. Ctrl-C and errors keep the points that are whole.

    Raises ValueError without loads; KeyboardInterrupt or StudyError when not one point was finished.
    """
    if not loads:
        raise ValueError("a sweep needs loads")
    points: list[Point] = []
    ended = ""
    with Ending(lambda: bool(points)) as ending:
        for place, load in enumerate(sorted(set(loads))):
            at = settings_at(settings, load, is_rate=is_rate, requests_per_client=requests_per_client)
            at = msgspec.structs.replace(at, seed=settings.seed + place)
            label = f"{number(load)} requests/s" if is_rate else f"{load:.0f} client{'s' if load > 1 else ''}"
            run = measure(at, label)
            points.append(Point(load, run, summarize(run, targets)))
            if on_point is not None:
                on_point(points[-1])
            if is_stopped_early and (reason := stop_reason(points, is_rate=is_rate)) and load < max(loads):
                ended = f"Stopped at {label}, past saturation: {reason}. Loads above it were not tried."
                break
    made = report(points, is_rate=is_rate, ended=ended)
    if ending.by:
        text = ending.sentence(f"{len(points)} of {len(set(loads))} loads were measured.")
        made.sections[0].verdicts.insert(0, Verdict(VerdictKind.PROBLEM, text))
        made.figures |= ending.figures()
    return made


def report(points: Sequence[Point], *, is_rate: bool, ended: str = "") -> Report:
    """What the points show: the knee, over-saturation and head-of-line blocking, each said to be there or not."""
    unit = "offered requests/s" if is_rate else "clients"
    knee = find_knee([SweepPoint(point.load, point.result.output_tokens_per_second) for point in points])
    # No knee in view is neither good nor bad.
    verdicts = [Verdict(VerdictKind.INFO, knee.sentence)]
    if ended:
        verdicts.append(Verdict(VerdictKind.INFO, ended))
    verdicts += [verdict for point in points if (verdict := saturation_verdict(point.run, point.result.label)) is not None]
    verdicts += blocking_verdicts([point.run for point in points])
    marks = [Mark(knee.load, f"knee at {number(knee.load)}")] if knee.load is not None else []
    section = ReportSection(
        title="Load against throughput and latency",
        intro=f"One run for each load, in rising order; each with other requests of the same kind. Load is in {unit}.",
        results=[point.result for point in points],
        runs=[point.run for point in points],
        curves=curves(points, unit, marks),
        verdicts=verdicts,
    )
    figures = {"knee_load": knee.load, "knee_output_tokens_per_second": knee.tokens_per_second, "load_unit": unit}
    return Report(kind="sweep", title=f"Sweep over {unit}", figures=figures, sections=[section])


def curves(points: Sequence[Point], unit: str, marks: list[Mark]) -> list[Curve]:
    """Throughput, TTFT, TBT and goodput over the load."""

    def line(value: Callable[[RunResult], float | None]) -> list[tuple[float, float]]:
        pairs = [(point.load, value(point.result)) for point in points]
        return [(x, y) for x, y in pairs if y is not None]

    def band(which: Callable[[RunResult], Distribution], name: str) -> list[tuple[float, float, float]]:
        pairs = [(point.load, which(point.result).ci95.get(name)) for point in points]
        return [(x, *interval) for x, interval in pairs if interval is not None]

    def latency(title: str, which: Callable[[RunResult], Distribution]) -> Curve:
        return Curve(
            title=title,
            x_label=unit,
            y_label="seconds",
            series={
                "p50": line(lambda result: which(result).p50),
                "p90": line(lambda result: which(result).p90),
                "p99": line(lambda result: which(result).p99),
            },
            bands={name: found for name in ("p50", "p99") if (found := band(which, name))},
            marks=marks,
            is_x_log=True,
            is_y_log=True,
        )

    throughput = Curve(
        title="Output throughput",
        x_label=unit,
        y_label="output tokens/s",
        series={"output tokens/s": line(lambda result: result.output_tokens_per_second)},
        marks=marks,
        is_x_log=True,
    )
    names = [target.name for target in points[0].result.goodput_targets] if points else []
    goodput = Curve(
        title="Goodput",
        x_label=unit,
        y_label="share of offered requests",
        series={
            name: [(point.load, point.result.goodput_targets[place].share) for point in points]
            for place, name in enumerate(names)
        },
        marks=marks,
        is_x_log=True,
    )
    return [
        throughput,
        latency("TTFT", lambda result: result.ttft_seconds),
        latency("TBT (per token)", lambda result: result.tbt_seconds),
        goodput,
    ]

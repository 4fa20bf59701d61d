"""Capacity: the highest offered rate at which goodput still holds, between a rate that held and one that did not.

Owns: when a rate holds, the search, its report. Runs in: load tool. Must not know: HTTP, how figures are computed.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget, summarize
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.report.model import Curve, Mark, Report, ReportSection, Table, Verdict, VerdictKind
from headrace.loadtest.report.tables import number, percent
from headrace.loadtest.results import RunResult
from headrace.loadtest.studies.alternation import Measure, summarize_pooled
from headrace.loadtest.studies.errors import Ending
from headrace.loadtest.studies.rate_search import RateSearch, share_interval
from headrace.loadtest.studies.signs import is_growing

MIN_RATE = 0.01
MAX_RATE = 10_000.0
PROBE_CLIENTS = 4
PROBE_REQUESTS = 24
START_SHARE = 0.7  # of what a closed loop reached: likely to hold, near enough to the edge
OTHER_SHARES = (0.99, 0.9)  # also read off the same runs


@dataclasses.dataclass(frozen=True)
class Trial:
    """All runs at one rate, pooled."""

    rate: float
    runs: list[Run]
    result: RunResult
    growth: list[bool | None]  # of each run: did its queue grow all along; None: too short to tell

    @property
    def was_growing(self) -> bool:
        """In one of its runs requests in flight and TTFT rose all along: the queue had no end."""
        return any(self.growth)

    @property
    def num_met(self) -> int:
        """Requests that met the target."""
        return round(self.result.goodput * self.result.requests.offered)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, of the goodput."""
        return share_interval(self.num_met, self.result.requests.offered)

    def holds(self, min_goodput: float) -> bool:
        """Goodput as wanted, by requests that were answered as fast as they came."""
        return self.result.requests.offered > 0 and self.result.goodput >= min_goodput and not self.was_growing

    def is_marginal(self, min_goodput: float) -> bool:
        """The interval of its goodput holds the wanted share: more requests could turn the verdict."""
        low, high = self.interval
        return low < min_goodput < high and not self.was_growing

    def hangs_on_few(self, min_goodput: float) -> bool:
        """A close call with a miss in it. Without a miss only many times the requests could turn it, not as many again."""
        return self.is_marginal(min_goodput) and self.num_met < self.result.requests.offered


@dataclasses.dataclass
class CapacitySearch:
    """The search itself; `trials` in the order of time.

    A rate whose verdict hangs on a few requests is measured once more with other ones, and judged by both together.
    """

    settings: RunSettings
    measure: Measure
    target: GoodputTarget
    min_goodput: float
    max_runs: int
    tolerance: float
    on_trial: Callable[[Trial], None] | None = None
    trials: list[Trial] = dataclasses.field(default_factory=list)
    num_runs: int = 0
    ended: str = ""

    def __post_init__(self) -> None:
        self.ending = Ending(lambda: bool(self.trials))

    def run(self, start_rate: float | None) -> tuple[float | None, float | None]:
        """(held, did not). Ctrl-C and errors end the search with what it has; they are raised when that is nothing."""
        bracket: tuple[float | None, float | None] = (None, None)
        with self.ending:
            start = start_rate if start_rate is not None else self._probe()
            search = RateSearch(start, tolerance=self.tolerance, min_rate=MIN_RATE, max_rate=MAX_RATE)
            while (rate := search.next_rate()) is not None:
                if self.num_runs >= self.max_runs:
                    self.ended = f"The bound of {self.max_runs} runs was reached before the bracket was as narrow as wanted."
                    break
                trial = self._try(rate)
                search.record(rate, held=trial.holds(self.min_goodput))
                bracket = search.bracket
        if self.ending.by:
            self.ended = self.ending.sentence("the bracket is not as narrow as wanted.")
        return bracket

    def _probe(self) -> float:
        """Where to begin: a share of the rate that a few clients reach in a closed loop."""
        settings = msgspec.structs.replace(
            self.settings,
            arrival="closed",
            num_clients=PROBE_CLIENTS,
            rate=None,
            num_requests=PROBE_REQUESTS,
            duration_seconds=None,
            warm_up_seconds=0.0,
            cool_down_seconds=0.0,
        )
        self.num_runs += 1
        result = summarize(self.measure(settings, "probe"), [self.target])
        return min(max(result.requests_per_second * START_SHARE, MIN_RATE), MAX_RATE)

    def _try(self, rate: float) -> Trial:
        runs = [self._run_at(rate)]
        trial = self._judge(rate, runs)
        if trial.hangs_on_few(self.min_goodput) and self.num_runs < self.max_runs:
            runs.append(self._run_at(rate))
            trial = self._judge(rate, runs)
        self.trials.append(trial)
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def _run_at(self, rate: float) -> Run:
        self.num_runs += 1
        settings = msgspec.structs.replace(
            self.settings, arrival="poisson", num_clients=None, rate=rate, seed=self.settings.seed + self.num_runs
        )
        return self.measure(settings, _label(rate))

    def _judge(self, rate: float, runs: list[Run]) -> Trial:
        result = summarize_pooled(runs, _label(rate), [self.target])
        return Trial(rate, list(runs), result, [is_growing(run) for run in runs])


def run_capacity(
    settings: RunSettings,
    measure: Measure,
    *,
    target: GoodputTarget = DEFAULT_TARGETS[0],
    min_goodput: float = 0.99,
    start_rate: float | None = None,
    max_runs: int = 14,
    tolerance: float = 0.1,
    on_trial: Callable[[Trial], None] | None = None,
) -> Report:
    """Search, then report the bracket. Rates are Poisson whatever `settings.arrival` says: capacity is defined so."""
    if not 0 < min_goodput <= 1:
        raise ValueError("min_goodput is a share above 0 and at most 1")
    search = CapacitySearch(settings, measure, target, min_goodput, max_runs, tolerance, on_trial)
    low, high = search.run(start_rate)
    made = report(search.trials, low, high, target=target, min_goodput=min_goodput, ended=search.ended)
    made.figures |= search.ending.figures()
    return made


def bracket_for(trials: Sequence[Trial], min_goodput: float) -> tuple[float | None, float | None]:
    """The bracket at another share, off the same trials: the lowest rate that failed, and the highest below it that held."""
    failed = [trial.rate for trial in trials if not trial.holds(min_goodput)]
    high = min(failed) if failed else None
    held = [trial.rate for trial in trials if trial.holds(min_goodput) and (high is None or trial.rate < high)]
    return (max(held) if held else None), high


def bracket_sentence(low: float | None, high: float | None, goal: str) -> str:
    """The bracket in words; what was not found is said."""
    if low is not None and high is not None:
        return f"Capacity for {goal}: at least {number(low)} and below {number(high)} requests/s."
    if low is not None:
        return (
            f"Capacity for {goal}: at least {number(low)} requests/s; no rate was tried that failed, so there is no upper end."
        )
    if high is not None:
        return f"Capacity for {goal}: below {number(high)} requests/s; no rate that was tried held."
    return f"Capacity for {goal}: not found, no rate was tried."


def report(
    trials: Sequence[Trial], low: float | None, high: float | None, *, target: GoodputTarget, min_goodput: float, ended: str
) -> Report:
    """The bracket, how sure it is, and the curve of goodput over the offered rate."""
    ordered = sorted(trials, key=lambda trial: trial.rate)
    goal = f"goodput of at least {min_goodput:g} at {target.name}"
    verdicts = [Verdict(VerdictKind.OK if low is not None else VerdictKind.PROBLEM, bracket_sentence(low, high, goal))]
    if ended:
        verdicts.append(Verdict(VerdictKind.WARNING, ended))
    verdicts += [
        Verdict(
            VerdictKind.WARNING,
            f"{_label(trial.rate)} is a close call: goodput {trial.result.goodput:.3f} "
            f"{_bounds(trial)} of {trial.result.requests.offered} requests. Longer runs (--duration) narrow it.",
        )
        for trial in ordered
        if trial.rate in (low, high) and trial.is_marginal(min_goodput)
    ]
    verdicts += [
        Verdict(
            VerdictKind.INFO, f"{_label(trial.rate)} met the target so far, but its queue was growing: counted as not held."
        )
        for trial in ordered
        if trial.was_growing and trial.result.goodput >= min_goodput
    ]
    if any(trial.holds(min_goodput) and None in trial.growth for trial in trials):
        text = "Some runs were too short to see a queue grow: a rate that held may not hold for long. Use a longer --duration."
        verdicts.append(Verdict(VerdictKind.WARNING, text))
    for share in OTHER_SHARES:
        if share != min_goodput and trials:
            other = f"goodput of at least {share:g} (off the same runs)"
            verdicts.append(Verdict(VerdictKind.INFO, bracket_sentence(*bracket_for(ordered, share), other)))
    section = ReportSection(
        title=f"Capacity at {target.name}",
        intro="Open loop, Poisson arrivals. Refused, failed and unfinished requests count as misses.",
        results=[trial.result for trial in ordered],
        runs=[run for trial in ordered for run in trial.runs],
        curves=[_curve(ordered, low, high, min_goodput)],
        verdicts=verdicts,
        tables=[_table(ordered, min_goodput)],
    )
    figures: dict[str, float | str | None] = {
        "capacity_low_per_second": low,
        "capacity_high_per_second": high,
        "min_goodput": min_goodput,
        "target": target.name,
    }
    return Report(kind="capacity", title=f"Capacity at {target.name}", figures=figures, sections=[section])


def _curve(trials: Sequence[Trial], low: float | None, high: float | None, min_goodput: float) -> Curve:
    marks = [Mark(rate, name) for rate, name in ((low, "held"), (high, "did not hold")) if rate is not None]
    return Curve(
        title="Goodput over the offered rate",
        x_label="offered requests/s",
        y_label="share of offered requests",
        series={"goodput": [(trial.rate, trial.result.goodput) for trial in trials]},
        bands={"goodput": [(trial.rate, *trial.interval) for trial in trials]},
        marks=marks,
        is_x_log=True,
        note=f"Wanted: at least {min_goodput:g}. Bands are 95 % intervals of the share.",
    )


def _table(trials: Sequence[Trial], min_goodput: float) -> Table:
    rows = [
        [
            number(trial.rate),
            str(trial.result.requests.offered),
            f"{trial.result.goodput:.3f}",
            _bounds(trial),
            "yes" if trial.was_growing else "no" if None not in trial.growth else "cannot be told",
            percent(trial.result.requests.refused / trial.result.requests.offered) if trial.result.requests.offered else "-",
            "held" if trial.holds(min_goodput) else "did not hold",
        ]
        for trial in trials
    ]
    header = ["requests/s", "offered", "goodput", "95 % interval", "queue growing", "refused", "verdict"]
    return Table(title="Rates tried", header=header, rows=rows)


def _label(rate: float) -> str:
    return f"{number(rate)} requests/s"


def _bounds(trial: Trial) -> str:
    low, high = trial.interval
    return f"[{low:.3f}, {high:.3f}]"

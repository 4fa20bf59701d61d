"""Run: one load, its figures, and the signs in it.

Owns: the report of a single run. Runs in: load tool. Must not know: HTTP, how figures are computed.
"""

from collections.abc import Sequence

from headrace.loadtest.figures import DEFAULT_TARGETS, GoodputTarget, summarize
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.report.model import Report, ReportSection
from headrace.loadtest.studies.alternation import Measure
from headrace.loadtest.studies.signs import blocking_verdict, saturation_verdict


def run_single(settings: RunSettings, measure: Measure, *, targets: Sequence[GoodputTarget] = DEFAULT_TARGETS) -> Report:
    """Measure once and report."""
    return report(measure(settings, ""), targets)


def report(run: Run, targets: Sequence[GoodputTarget] = DEFAULT_TARGETS) -> Report:
    """The report of a run that was made."""
    verdicts = []
    if (saturation := saturation_verdict(run)) is not None:
        verdicts.append(saturation)
    if run.settings.is_stream:
        verdicts.append(blocking_verdict(run))
    section = ReportSection(
        title="Run",
        intro=_load_in_words(run.settings),
        results=[summarize(run, targets)],
        runs=[run],
        verdicts=verdicts,
    )
    return Report(kind="run", title=f"Load on {run.settings.url}, model {run.settings.model}", sections=[section])


def _load_in_words(settings: RunSettings) -> str:
    if settings.arrival == "closed":
        load = f"Closed loop: {settings.num_clients} clients, each waiting for its answer before it asks again."
    else:
        rate = f" at {settings.rate:g} requests/s" if settings.rate is not None else ""
        load = f"Open loop: {settings.arrival} arrivals{rate}, sent when they are due whatever is outstanding."
    return f"{load} Workload: {settings.workload}, answers {'streamed' if settings.is_stream else 'whole'}."

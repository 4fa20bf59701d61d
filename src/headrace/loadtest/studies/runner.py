"""The real way to measure: settings become a plan, the plan a load on a server, the load a Run.

Owns: LoadRunner, which studies call as their `measure`. Runs in: load tool. Must not know: figures, reports, terminals.
"""

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from headrace.loadtest.calibration import calibrate_against
from headrace.loadtest.engine import LoadError, run_load
from headrace.loadtest.progress import LoadProgress
from headrace.loadtest.prompts import ASSUMED, Calibration
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.studies.errors import StudyError
from headrace.loadtest.studies.server_facts import ServerFacts
from headrace.loadtest.workloads import make_plan

Progress = Callable[[LoadProgress], None]


@contextlib.contextmanager
def _unshown(_label: str) -> Iterator[Progress | None]:
    yield None


class LoadRunner:
    """Measures one server. Calling it makes one run with a new salt, so that no run finds the prompts of another in a cache.

    `watching(label)` is entered for each run and gives what to call with its progress. With `ends_on_interrupt` a run that
    Ctrl-C ended raises KeyboardInterrupt, which ends a study of several runs; without it the run is returned as it is.
    """

    def __init__(
        self,
        facts: ServerFacts,
        *,
        key: str | None = None,
        calibration: Calibration = ASSUMED,
        opens_new_connections: bool = False,
        max_outstanding: int | None = None,
        drain_seconds: float | None = None,
        ends_on_interrupt: bool = True,
        watching: Callable[[str], contextlib.AbstractContextManager[Progress | None]] = _unshown,
    ) -> None:
        self._facts = facts
        self._headers = key_headers(key)
        self._calibration = calibration
        self._opens_new_connections = opens_new_connections
        self._max_outstanding = max_outstanding
        self._drain_seconds = drain_seconds
        self._ends_on_interrupt = ends_on_interrupt
        self._watching = watching

    def __call__(self, settings: RunSettings, label: str) -> Run:
        """Make the run. StudyError when it cannot be made, KeyboardInterrupt as said above."""
        length = self._facts.facts.get("max_model_len")
        try:
            plan = make_plan(
                settings,
                headers=self._headers,
                calibration=self._calibration,
                context_tokens=int(length) if length else None,
                opens_new_connections=self._opens_new_connections,
                max_outstanding=self._max_outstanding if settings.arrival != "closed" else None,
            )
            with self._watching(label) as on_progress:
                run = run_load(plan, on_progress=on_progress, label=label, drain_seconds=self._drain_seconds)
        except (LoadError, ValueError) as error:
            raise StudyError(str(error)) from error
        if run.was_interrupted and self._ends_on_interrupt:
            raise KeyboardInterrupt
        if run.window_end <= run.window_begin:
            cut = settings.warm_up_seconds + settings.cool_down_seconds
            raise StudyError(
                f"Nothing is left to measure: the run took {run.wall_seconds:.1f} s, warm-up and cool-down are {cut:g} s."
            )
        return msgspec.structs.replace(run, server=self._facts.facts | run.server)


def key_headers(key: str | None) -> dict[str, str]:
    """The header that carries a key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def calibration_for(facts: ServerFacts, settings: RunSettings, key: str | None) -> Calibration:
    """How many tokens the server makes of a word, by one or two small requests; not asked where prompts are one's own."""
    if settings.workload.partition(":")[0] in ("prompts", "sharegpt"):
        return ASSUMED
    return calibrate_against(facts.url, facts.model, settings.api, key_headers(key))

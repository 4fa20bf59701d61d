"""Send a plan's requests from several client processes, and collect what came back.

Owns: the run: start of the processes, the common clock, feeding, collecting, the end. Runs in: load tool (coordinating process).
Must not know: HTTP, how figures are computed, how progress is drawn.
"""

from collections.abc import Callable, Sequence

from headrace.loadtest.plan import LoadPlan
from headrace.loadtest.progress import LoadProgress
from headrace.loadtest.records import Run


class LoadError(Exception):
    """The run could not be made: the server cannot be reached, or a client process died. Says in words what to do."""


def run_load(
    plan: LoadPlan,
    *,
    num_processes: int | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
    label: str = "",
    drain_seconds: float | None = None,
    client_command: Sequence[str] | None = None,
) -> Run:
    """Make the run and return it. Synchronous; call it from no event loop. Ctrl-C ends it with what there is."""
    raise NotImplementedError

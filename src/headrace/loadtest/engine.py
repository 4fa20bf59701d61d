"""Send a plan's requests from several client processes, and collect what came back.

Owns: the call that makes a run, and what it asks of settings. Runs in: load tool (coordinating process).
Must not know: HTTP, how figures are computed, how progress is drawn.
"""

import asyncio
import importlib.util
import math
from collections.abc import Callable, Sequence

from headrace.loadtest.client_handle import CLIENT_COMMAND, ClientDiedError
from headrace.loadtest.coordinator import Coordinator, ServerUnreachableError
from headrace.loadtest.plan import LoadPlan
from headrace.loadtest.progress import LoadProgress
from headrace.loadtest.records import Run, RunSettings
from headrace.protocol.extras import how_to_install


class LoadError(Exception):
    """The run could not be made: the server cannot be reached, or a client process died. Says in words what happened."""


def run_load(
    plan: LoadPlan,
    *,
    num_processes: int | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
    label: str = "",
    drain_seconds: float | None = None,
    client_command: Sequence[str] = CLIENT_COMMAND,
) -> Run:
    """Make the run and return it. Synchronous; call it from no event loop.

    `num_processes`: None: as the settings say; never more than there are clients.
    `on_progress`: called in this thread a few times a second.
    `drain_seconds`: how long requests that run when the duration is over may go on, before they are UNFINISHED; None: until
    they end or time out.
    Ctrl-C (in the main thread) ends the run with what there is, marked `was_interrupted`; before the start, and the second
    time, it raises KeyboardInterrupt.
    LoadError when the run cannot be made; ValueError for settings or a plan that make no sense.
    """
    check_settings(plan.settings)
    if importlib.util.find_spec("aiohttp") is None:
        raise LoadError(f"headrace bench needs aiohttp: {how_to_install('bench')}")
    if num_processes is None:
        num_processes = plan.settings.num_processes
    if num_processes < 1:
        raise ValueError(f"num_processes is {num_processes}; it must be at least 1")
    if plan.settings.num_clients is not None and plan.settings.arrival == "closed":
        num_processes = min(num_processes, plan.settings.num_clients)
    try:
        return asyncio.run(_run(plan, num_processes, on_progress, label, drain_seconds, client_command))
    except (ClientDiedError, ServerUnreachableError) as error:
        raise LoadError(str(error)) from None


async def _run(
    plan: LoadPlan,
    num_processes: int,
    on_progress: Callable[[LoadProgress], None] | None,
    label: str,
    drain_seconds: float | None,
    client_command: Sequence[str],
) -> Run:
    coordinator = Coordinator(plan, num_processes, on_progress, drain_seconds)
    await coordinator.run(client_command)
    return coordinator.result(label)


def check_settings(settings: RunSettings) -> None:
    """ValueError, in words for the user, when the engine cannot run these."""
    if settings.arrival == "closed" and (settings.num_clients is None or settings.num_clients < 1):
        raise ValueError("a closed loop needs a number of clients of at least 1")
    if settings.num_requests is not None and settings.num_requests < 1:
        raise ValueError("the number of requests must be at least 1")
    if settings.duration_seconds is not None and not 0 < settings.duration_seconds < math.inf:
        raise ValueError("the duration must be a positive number of seconds")
    if not 0 < settings.timeout_seconds < math.inf:
        raise ValueError("the time-out must be a positive number of seconds")
    if min(settings.warm_up_seconds, settings.cool_down_seconds) < 0:
        raise ValueError("warm-up and cool-down must not be negative")
    cut_seconds = settings.warm_up_seconds + settings.cool_down_seconds
    if settings.duration_seconds is not None and cut_seconds >= settings.duration_seconds:
        raise ValueError(f"warm-up and cool-down ({cut_seconds:g} s) leave nothing of {settings.duration_seconds:g} s")

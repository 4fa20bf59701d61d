"""Several simulations at once, each in a process of its own, with their progress.

Owns: simulate_in_processes. Runs in: simulator. Must not know: what is simulated.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any, TypeVar

_POLL_SECONDS = 0.2
_counters: Any = None  # of the child: requests ended, one number for each task

Result = TypeVar("Result")
Told = Callable[[int, int], None]


def simulate_in_processes(
    task: Callable[[int, Told], Result],
    num_tasks: int,
    num_processes: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """`task(number, told)` for each number, in child processes; the results in order of the numbers.

    `task` and what it holds must be picklable. What it tells (requests ended, anything) reaches `on_progress` as (number,
    requests ended) about five times a second. The first error of a task is raised, and the other tasks are given up.
    """
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", num_tasks)
    with ProcessPoolExecutor(num_processes, context, initializer=_keep, initargs=(counters,)) as pool:
        futures = [pool.submit(_run, task, number) for number in range(num_tasks)]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if on_progress is not None:
                    for number in range(num_tasks):
                        on_progress(number, counters[number])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _keep(counters: Any) -> None:
    global _counters  # a pool hands its children only by an initializer what cannot be pickled
    _counters = counters


def _run(task: Callable[[int, Told], Result], number: int) -> Result:
    def told(num_ended: int, _: int) -> None:
        _counters[number] = num_ended

    return task(number, told)

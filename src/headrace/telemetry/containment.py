"""Keeps faults of the measuring away from the requests that are measured.

Owns: the counter of such faults. Runs in: gateway. Must not know: what is measured.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from headrace.telemetry.accumulate import Counter
from headrace.telemetry.logs import get_logger


class Faults:
    """Counts faults; the first at each place is logged with its traceback, later ones are only counted."""

    def __init__(self, counter: Counter | None = None) -> None:
        self.counter = counter or Counter()
        self._logged: set[str] = set()
        self._log = get_logger("telemetry")

    def note(self, place: str, error: Exception) -> None:
        """Take note of an error caught at a place (a name from the program's text, so that their number is bounded)."""
        self.counter.add()
        if place not in self._logged:
            self._logged.add(place)
            with suppress(Exception):  # a log that cannot be written (a closed stderr) is no reason to fail either
                self._log.error("metrics_fault", place=place, exc_info=error)


class HasFaults(Protocol):
    """An object whose methods may be contained."""

    faults: Faults


Self = TypeVar("Self", bound=HasFaults)
Parameters = ParamSpec("Parameters")


def contained(
    method: Callable[Concatenate[Self, Parameters], None],
) -> Callable[Concatenate[Self, Parameters], None]:
    """For a method that measures: an exception in it is noted in self.faults and goes no further."""

    @functools.wraps(method)
    def wrapper(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - that is its purpose
            self.faults.note(method.__qualname__, error)

    return wrapper

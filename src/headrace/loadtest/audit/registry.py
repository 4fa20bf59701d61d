"""The table of checks: id, title, group, weight, how many requests it may use, and what to do when it fails.

Owns: Check, the decorator that adds one, the groups. Runs in: audit. Must not know: what a check does.
"""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.loadtest.audit.findings import Finding
from headrace.loadtest.audit.session import Session

CheckFunction = Callable[[Session], Awaitable[Finding]]
_CHECKS: dict[str, "Check"] = {}


class Group(enum.Enum):
    """Parts of the report, in its order."""

    FIELDS = "Request fields"
    ANSWERS = "Answers"
    STREAMING = "Streaming"
    ERRORS = "Errors"
    OVERLOAD = "Overload"
    HEALTH = "Health and models"
    METRICS = "Metrics"
    CONNECTIONS = "Connections"
    CANCELLATION = "Cancellation"  # last: what a server fails to cancel would disturb the others


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `weight` 0: shown, not scored. `is_heavy`: left out of a quick audit."""

    id: str
    title: str
    group: Group
    weight: int
    max_requests: int
    hint: str
    run: CheckFunction
    is_heavy: bool = False


def check(
    check_id: str, title: str, group: Group, *, weight: int, requests: int, hint: str, heavy: bool = False
) -> Callable[[CheckFunction], CheckFunction]:
    """Add the decorated function as a check. Raise ValueError for an id that exists."""

    def add(function: CheckFunction) -> CheckFunction:
        if check_id in _CHECKS:
            raise ValueError(f"Two checks are called {check_id}.")
        _CHECKS[check_id] = Check(check_id, title, group, weight, requests, hint, function, heavy)
        return function

    return add


def registered() -> list[Check]:
    """All checks that are loaded, by group, in the order of their definition."""
    order = list(Group)
    return sorted(_CHECKS.values(), key=lambda item: order.index(item.group))

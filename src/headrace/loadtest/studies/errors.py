"""What ends a study early: an error for people, or Ctrl-C; what was measured by then is kept.

Owns: StudyError, Ending. Runs in: load tool. Must not know: what is measured.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

ENDED_BY = "ended_by"  # in the figures of a report: why a study ended before it was whole, "interrupt" or "error"


class StudyError(Exception):
    """The study cannot start, or cannot go on. Its text says what is wrong and what to do."""


class Ending:
    """Lets a study keep what it has when it cannot go on: Ctrl-C and StudyError end the block, if `has_something()` says so.

    Without anything to keep they are raised as they are. Afterwards `by` is "", "interrupt" or "error", `why` the error's text.
    """

    def __init__(self, has_something: Callable[[], bool]) -> None:
        self._has_something = has_something
        self.by = ""
        self.why = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        if not isinstance(error, KeyboardInterrupt | StudyError) or not self._has_something():
            return False
        self.by = "error" if isinstance(error, StudyError) else "interrupt"
        self.why = str(error)
        return True

    def sentence(self, what: str) -> str:
        """`Interrupted: ...` or `Ended by an error (...): ...`; "" when it came to its own end."""
        if not self.by:
            return ""
        return f"Interrupted: {what}" if self.by == "interrupt" else f"Ended by an error ({self.why}): {what}"

    def figures(self) -> dict[str, float | str | None]:
        """For the report's JSON."""
        return {ENDED_BY: self.by} if self.by else {}

"""A clock that moves when told.

Owns: ManualClock. Runs in: tests, simulation.
Must not know: real time.
"""


class ManualClock:
    """Implements protocol.ports.Clock; `sleep` has the shape of time.sleep and takes no time."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Nanoseconds."""
        return self._now_ns

    def advance_ns(self, duration_ns: int) -> int:
        """Move forward and return the new time. Raises ValueError for a step back."""
        if duration_ns < 0:
            raise ValueError(f"a monotonic clock does not go back {-duration_ns} ns")
        self._now_ns += duration_ns
        return self._now_ns

    def advance(self, seconds: float) -> int:
        """Move forward by seconds and return the new time in nanoseconds."""
        return self.advance_ns(round(seconds * 1e9))

    def sleep(self, seconds: float) -> None:
        """Move forward, as a sleeper would find it."""
        self.advance(seconds)

"""Time for the worker.

Owns: MonotonicClock. Runs in: worker. Must not know: anything else.
"""

import time


class MonotonicClock:
    """CLOCK_MONOTONIC: one clock for all processes of a machine, so the gateway's stamps can be compared with ours."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start, never backwards."""
        return time.monotonic_ns()

"""What the gateway's processor time is spent on: seconds for each output token, over the last seconds.

Owns: GatewayCpu. Runs in: gateway. Must not know: what tokens are, who asks.
"""

import time
from collections import deque
from collections.abc import Callable

WINDOW_NS = 10_000_000_000
SAMPLE_NS = 500_000_000


class GatewayCpu:
    """Processor time of this process, and its share for each token over the last 10 seconds.

    Call `note` before tokens are counted; it takes a sample at most twice a second, and at most 21 are kept.
    """

    def __init__(
        self,
        count_tokens: Callable[[], int],
        now_ns: Callable[[], int] = time.monotonic_ns,
        process_ns: Callable[[], int] = time.process_time_ns,
    ) -> None:
        """`count_tokens`: how many there were since the start."""
        self._count_tokens = count_tokens
        self._now_ns = now_ns
        self._process_ns = process_ns
        self._next_sample_ns = 0
        self._samples: deque[tuple[int, int, int]] = deque(maxlen=WINDOW_NS // SAMPLE_NS + 1)

    def note(self) -> None:
        """Tokens are about to be counted."""
        now_ns = self._now_ns()
        if now_ns >= self._next_sample_ns:
            self._next_sample_ns = now_ns + SAMPLE_NS
            self._samples.append((now_ns, self._process_ns(), self._count_tokens()))

    def process_ns(self) -> int:
        """Processor time of all threads since the process started."""
        return self._process_ns()

    def num_tokens(self) -> int:
        """Tokens since the start."""
        return self._count_tokens()

    def seconds_per_token(self) -> float:
        """Over the last 10 seconds; 0 when they had no token."""
        oldest_ns = self._now_ns() - WINDOW_NS
        for at_ns, process_ns, num_tokens in self._samples:
            if at_ns >= oldest_ns:
                num_since = self._count_tokens() - num_tokens
                return (self._process_ns() - process_ns) / num_since / 1e9 if num_since else 0.0
        return 0.0

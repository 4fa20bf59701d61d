"""Bounded channels inside one process, in place of rings.

Owns: InMemoryRequestSource, InMemoryEventSink. Runs in: tests, simulation.
Must not know: shared memory, processes.
"""

from collections import deque
from collections.abc import Iterable

from headrace.protocol.messages import EventBatch, GatewayMessage
from headrace.testing.clock import ManualClock


class InMemoryRequestSource:
    """Implements protocol.ports.RequestSource. Waiting takes no real time: with nothing there, the clock moves on instead."""

    def __init__(self, max_messages: int = 1024, clock: ManualClock | None = None) -> None:
        self.waits_seconds: list[float] = []  # every timeout that was waited with nothing there
        self._max_messages = max_messages
        self._clock = clock
        self._messages: deque[GatewayMessage] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def push_nowait(self, message: GatewayMessage) -> bool:
        """What a gateway does; False when the channel is full."""
        if len(self._messages) >= self._max_messages:
            return False
        self._messages.append(message)
        return True

    def drain_nowait(self, max_messages: int) -> list[GatewayMessage]:
        """The oldest messages, at most so many."""
        return [self._messages.popleft() for _ in range(min(max_messages, len(self._messages)))]

    def wait_message(self, timeout_seconds: float) -> bool:
        """Whether a message is there; if not, the time is over at once."""
        if self._messages:
            return True
        self.waits_seconds.append(timeout_seconds)
        if self._clock is not None:
            self._clock.advance(timeout_seconds)
        return False


class InMemoryEventSink:
    """Implements protocol.ports.EventSink for the given rings. It refuses when a ring is full, or when told to."""

    def __init__(self, reply_rings: Iterable[int] = (0,), max_batches: int = 1024) -> None:
        self.num_refused = 0
        self._max_batches = max_batches
        self._batches: dict[int, list[EventBatch]] = {reply_ring: [] for reply_ring in reply_rings}
        self._refusing: set[int] = set()

    def refuse(self, reply_ring: int, refusing: bool = True) -> None:
        """From now on refuse (or take again) what is meant for this ring. Raises KeyError for a ring that does not exist."""
        _ = self._batches[reply_ring]
        if refusing:
            self._refusing.add(reply_ring)
        else:
            self._refusing.discard(reply_ring)

    def publish_nowait(self, reply_ring: int, batch: EventBatch) -> bool:
        """Take a batch; False when there is no room. Raises KeyError for a ring that does not exist."""
        batches = self._batches[reply_ring]
        if reply_ring in self._refusing or len(batches) >= self._max_batches:
            self.num_refused += 1
            return False
        batches.append(batch)
        return True

    def drain_nowait(self, reply_ring: int) -> list[EventBatch]:
        """What a gateway does: take all batches of its ring, oldest first."""
        batches = self._batches[reply_ring]
        taken = batches[:]
        batches.clear()
        return taken

"""Messages to the worker: handed over at once, or kept until the request ring has room.

Owns: Outbound. Runs in: gateway, on the event loop. Must not know: streams, the ring's bytes.
"""

from collections import deque
from typing import Protocol

from headrace.protocol.messages import CancelRequest, GatewayHello, GatewayMessage, GenerationRequest


class MessageSender(Protocol):
    """The gateway's end of the request ring."""

    def send_nowait(self, message: GatewayMessage) -> bool:
        """Hand over one message; False when the ring is full."""
        ...


class Outbound:
    """Keeps what may not be lost (greetings, cancellations) and refuses what may be (new requests).

    Bounded: while something waits no new request is taken, so at most one cancellation for each request in flight can wait.
    """

    def __init__(self, sender: MessageSender) -> None:
        self._sender = sender
        self._waiting: deque[CancelRequest | GatewayHello] = deque()
        self.num_ring_full = 0  # messages that found no room when they came

    @property
    def num_waiting(self) -> int:
        """Messages that found the ring full."""
        return len(self._waiting)

    def flush(self) -> bool:
        """Hand over what waits, as far as there is room; True when nothing is left."""
        while self._waiting:
            if not self._sender.send_nowait(self._waiting[0]):
                return False
            self._waiting.popleft()
        return True

    def send(self, message: CancelRequest | GatewayHello) -> None:
        """Hand over the message now or as soon as there is room. A greeting cancels all: it replaces what waits."""
        if isinstance(message, GatewayHello):
            self._waiting.clear()
        if not (self.flush() and self._sender.send_nowait(message)):
            self.num_ring_full += 1
            self._waiting.append(message)

    def offer(self, request: GenerationRequest) -> bool:
        """Hand over a request now; False when the ring is full. Raises RecordTooLarge for one that never fits."""
        is_taken = self.flush() and self._sender.send_nowait(request)
        if not is_taken:
            self.num_ring_full += 1
        return is_taken

    def discard(self) -> None:
        """Forget what waits: the worker that it was meant for is gone."""
        self._waiting.clear()

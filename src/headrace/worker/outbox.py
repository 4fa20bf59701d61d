"""Events that wait for room in an event ring, merged per request: a slow gateway costs memory for its tokens, nothing else.

Owns: the events of every ring that are not yet handed over. Runs in: worker. Must not know: the scheduler, the model.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from headrace.protocol.messages import EventBatch, TokenEvent, WorkerHello
from headrace.protocol.ports import EventSink
from headrace.protocol.stalls import Stall

MAX_BATCH_BYTES = 65_536  # of one batch, as _event_bytes estimates it: a small part of a ring
_ID_BYTES = 5  # most that a token id takes as MessagePack
_FRAME_BYTES = 96  # numbers, names and usage around the ids of an event
_CHARACTER_BYTES = 4
_STALL_BYTES = 32  # a cause's name and two numbers
MAX_STALLS = 16  # told with one event, the longest


class WorkerSink(EventSink, Protocol):
    """An event sink that also carries the greeting of a worker's life."""

    def hello(self, hello: WorkerHello) -> bool:
        """Greet every gateway not yet greeted; False while some ring has no room."""
        ...

    def forget_greeting(self, reply_ring: int) -> None:
        """A new gateway process reads this ring: the next hello() greets it again."""
        ...


class Outbox:
    """Hands events to the sink in order and keeps, merged, what a full ring refuses.

    Bounded by what the sequences can still produce: a request never has more than one event here.
    """

    def __init__(self, sink: WorkerSink, reply_rings: Collection[int], hello: WorkerHello) -> None:
        self._sink = sink
        self._hello = hello
        self._must_greet = True
        self._pending: dict[int, dict[int, TokenEvent]] = {ring: {} for ring in reply_rings}
        self._emitted_ns: dict[int, int] = dict.fromkeys(reply_rings, 0)
        self.num_refused = 0  # publishes that met a full ring

    @property
    def reply_rings(self) -> Collection[int]:
        """The rings that exist."""
        return self._pending.keys()

    @property
    def is_empty(self) -> bool:
        """True when everything was handed over."""
        return not self._must_greet and not any(self._pending.values())

    @property
    def num_pending_events(self) -> int:
        """Merged events that wait, over all rings."""
        return sum(len(events) for events in self._pending.values())

    def add(self, reply_ring: int, events: list[TokenEvent], emitted_ns: int) -> None:
        """Take a step's events for one ring. Raises KeyError for a ring that does not exist."""
        pending = self._pending[reply_ring]
        self._emitted_ns[reply_ring] = emitted_ns
        for event in events:
            earlier = pending.get(event.request_id)
            pending[event.request_id] = event if earlier is None else merge_events(earlier, event)

    def greet_again(self, reply_ring: int, first_request_id: int) -> None:
        """A new gateway process reads this ring: greet it, and drop what waits for its predecessor's requests."""
        pending = self._pending[reply_ring]
        for stale_id in [request_id for request_id in pending if request_id < first_request_id]:
            del pending[stale_id]
        self._sink.forget_greeting(reply_ring)
        self._must_greet = True

    def flush(self) -> bool:
        """Hand over what the rings take; True when nothing is left.

        A gateway asks for nothing before it was greeted, so a greeting needs no place ahead of the events.
        """
        if self._must_greet:
            self._must_greet = not self._sink.hello(self._hello)
        drained = not self._must_greet
        for reply_ring, pending in self._pending.items():
            if pending and not self._flush_ring(reply_ring, pending):
                drained = False
        return drained

    def _flush_ring(self, reply_ring: int, pending: dict[int, TokenEvent]) -> bool:
        emitted_ns = self._emitted_ns[reply_ring]
        for batch in _batches(list(pending.values())):
            if not self._sink.publish_nowait(reply_ring, EventBatch(self._hello.epoch, emitted_ns, batch)):
                self.num_refused += 1
                return False
            for event in batch:
                del pending[event.request_id]
        return True


def merge_events(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """One event for two of a request, the later one continuing where the earlier ended.

    That a request has been preempted is told only by an event without tokens: who reads tokens and this word together could
    not know which came last.
    """
    has_tokens = bool(earlier.token_ids or later.token_ids)
    return TokenEvent(
        request_id=earlier.request_id,
        first_index=earlier.first_index,
        token_ids=[*earlier.token_ids, *later.token_ids],
        finish_reason=later.finish_reason,
        error_code=later.error_code,
        error_message=later.error_message,
        usage=later.usage or earlier.usage,
        first_scheduled_ns=earlier.first_scheduled_ns or later.first_scheduled_ns,
        stalls=_merge_stalls(earlier.stalls, later.stalls),
        is_preempted=later.is_preempted and not has_tokens,
    )


def _merge_stalls(earlier: tuple[Stall, ...], later: tuple[Stall, ...]) -> tuple[Stall, ...]:
    """In the order in which they began; of too many, the longest."""
    stalls = earlier + later
    if len(stalls) <= MAX_STALLS:
        return stalls
    longest = sorted(stalls, key=lambda stall: -stall.duration_ns)[:MAX_STALLS]
    return tuple(sorted(longest, key=lambda stall: stall.began_ns))


def _event_bytes(event: TokenEvent) -> int:
    """An upper estimate of the event's size in a record."""
    num_more = _CHARACTER_BYTES * len(event.error_message) + _STALL_BYTES * len(event.stalls)
    return _FRAME_BYTES + _ID_BYTES * len(event.token_ids) + num_more


def _batches(events: list[TokenEvent]) -> Iterator[list[TokenEvent]]:
    """The events in order, in lists of about MAX_BATCH_BYTES; an event larger than that stands alone."""
    batch: list[TokenEvent] = []
    num_bytes = 0
    for event in events:
        size = _event_bytes(event)
        if batch and num_bytes + size > MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(event)
        num_bytes += size
    if batch:
        yield batch

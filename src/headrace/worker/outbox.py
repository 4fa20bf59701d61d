"""Events that wait for room in an event ring, merged per request: a slow gateway costs memory for its tokens, nothing else.

Owns: the pending hellos and events of every ring. Runs in: worker. Must not know: the scheduler, the model.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from headrace.protocol.messages import EventBatch, TokenEvent, WorkerHello
from headrace.protocol.ports import EventSink

MAX_BATCH_BYTES = 32_768  # of one record, as _event_bytes estimates it: the bound that rings are sized for
_ID_BYTES = 5  # most that a token id takes as MessagePack
_FRAME_BYTES = 96  # numbers, names and usage around the ids of an event
_CHARACTER_BYTES = 4
_MAX_EVENT_TOKENS = (MAX_BATCH_BYTES // 2) // _ID_BYTES
_MAX_MESSAGE_CHARACTERS = 1024


class WorkerSink(EventSink, Protocol):
    """An event sink that also carries the greeting of a worker's life."""

    def hello(self, reply_ring: int, hello: WorkerHello) -> bool:
        """Hand over the greeting to one gateway; False when there is no room."""
        ...


class Outbox:
    """Hands events to the sink in order, ring by ring, and keeps and merges what a full ring refuses.

    Bounded by what the sequences can still produce: a request never has more than one merged event here. A ring's greeting
    goes before any of its events.
    """

    def __init__(self, sink: WorkerSink, reply_rings: Collection[int], epoch: int) -> None:
        self._sink = sink
        self._epoch = epoch
        self._hellos: dict[int, WorkerHello] = {}
        self._pending: dict[int, dict[int, TokenEvent]] = {ring: {} for ring in reply_rings}
        self._emitted_ns: dict[int, int] = dict.fromkeys(reply_rings, 0)
        self.num_refused = 0  # publishes that met a full ring

    @property
    def is_empty(self) -> bool:
        """True when everything was handed over."""
        return not self._hellos and not any(self._pending.values())

    @property
    def num_pending_events(self) -> int:
        """Merged events that wait, over all rings."""
        return sum(len(events) for events in self._pending.values())

    def greet(self, reply_ring: int, hello: WorkerHello) -> None:
        """Have the greeting sent to this gateway before any further event."""
        self._hellos[reply_ring] = hello

    def add(self, reply_ring: int, events: list[TokenEvent], emitted_ns: int) -> None:
        """Take a step's events for one ring. Raises KeyError for a ring that does not exist."""
        pending = self._pending[reply_ring]
        self._emitted_ns[reply_ring] = emitted_ns
        for event in events:
            earlier = pending.get(event.request_id)
            pending[event.request_id] = event if earlier is None else merge_events(earlier, event)

    def forget_below(self, reply_ring: int, request_id: int) -> None:
        """Drop what waits for requests of an earlier gateway process: nobody will read it."""
        pending = self._pending[reply_ring]
        for stale_id in [pending_id for pending_id in pending if pending_id < request_id]:
            del pending[stale_id]

    def flush(self) -> bool:
        """Hand over what the rings take; True when nothing is left."""
        drained = True
        for reply_ring, pending in self._pending.items():
            if self._hellos and not self._flush_hello(reply_ring):
                drained = False
            elif pending and not self._flush_ring(reply_ring, pending):
                drained = False
        return drained

    def _flush_hello(self, reply_ring: int) -> bool:
        hello = self._hellos.get(reply_ring)
        if hello is None:
            return True
        if not self._sink.hello(reply_ring, hello):
            self.num_refused += 1
            return False
        del self._hellos[reply_ring]
        return True

    def _flush_ring(self, reply_ring: int, pending: dict[int, TokenEvent]) -> bool:
        for batch in _batches(list(pending.values())):
            if not self._sink.publish_nowait(reply_ring, EventBatch(self._epoch, self._emitted_ns[reply_ring], batch)):
                self.num_refused += 1
                return False
            for event in batch:
                _forget_published(pending, event)
        return True


def merge_events(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """One event for two of a request, the later one continuing where the earlier ended."""
    return TokenEvent(
        request_id=earlier.request_id,
        first_index=earlier.first_index,
        token_ids=[*earlier.token_ids, *later.token_ids],
        finish_reason=later.finish_reason,
        error_code=later.error_code,
        error_message=later.error_message,
        usage=later.usage or earlier.usage,
        first_scheduled_ns=earlier.first_scheduled_ns or later.first_scheduled_ns,
    )


def _forget_published(pending: dict[int, TokenEvent], published: TokenEvent) -> None:
    """Take what was published out of the waiting events: all of a request's event, or its first part."""
    whole = pending[published.request_id]
    num_tokens = len(published.token_ids)
    if num_tokens == len(whole.token_ids):
        del pending[published.request_id]
    else:
        pending[published.request_id] = _tail(whole, num_tokens)


def _tail(event: TokenEvent, num_tokens: int) -> TokenEvent:
    """The event without its first so many tokens."""
    return TokenEvent(
        request_id=event.request_id,
        first_index=event.first_index + num_tokens,
        token_ids=event.token_ids[num_tokens:],
        finish_reason=event.finish_reason,
        error_code=event.error_code,
        error_message=event.error_message,
        usage=event.usage,
    )


def _event_bytes(event: TokenEvent) -> int:
    """An upper estimate of the event's size in a record."""
    return _FRAME_BYTES + _ID_BYTES * len(event.token_ids) + _CHARACTER_BYTES * len(event.error_message)


def _batches(events: list[TokenEvent]) -> Iterator[list[TokenEvent]]:
    """The events in order, in lists that fit a record. Only very long merged events are cut."""
    batch: list[TokenEvent] = []
    num_bytes = 0
    for whole in events:
        for event in _cut(whole):
            size = _event_bytes(event)
            if batch and num_bytes + size > MAX_BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(event)
            num_bytes += size
    if batch:
        yield batch


def _cut(event: TokenEvent) -> Iterator[TokenEvent]:
    """The event as it is when it fits a record; else in parts, the last of which carries the end."""
    if len(event.error_message) > _MAX_MESSAGE_CHARACTERS:
        event = merge_events(event, _shortened_end(event))
    while len(event.token_ids) > _MAX_EVENT_TOKENS:
        yield TokenEvent(
            request_id=event.request_id,
            first_index=event.first_index,
            token_ids=event.token_ids[:_MAX_EVENT_TOKENS],
            first_scheduled_ns=event.first_scheduled_ns,
        )
        event = _tail(event, _MAX_EVENT_TOKENS)
    yield event


def _shortened_end(event: TokenEvent) -> TokenEvent:
    return TokenEvent(
        request_id=event.request_id,
        first_index=event.first_index + len(event.token_ids),
        token_ids=[],
        finish_reason=event.finish_reason,
        error_code=event.error_code,
        error_message=event.error_message[:_MAX_MESSAGE_CHARACTERS],
        usage=event.usage,
    )

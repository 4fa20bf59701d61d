"""Typed channels: the protocol's messages over rings and doorbells.

Owns: encoding, fair draining, waking. Runs in: gateway and worker. Must not know: what is done with a message.
Nothing is dropped in silence: a record that cannot be decoded is a ChannelError, after the messages before it were handed out.
"""

import select
from collections.abc import Mapping, Sequence

import msgspec

from headrace.ipc.doorbell import Doorbell, timeout_ms
from headrace.ipc.ring import RecordTooLarge, Ring
from headrace.protocol.errors import HeadraceError
from headrace.protocol.messages import EventBatch, GatewayMessage, TokenEvent, WorkerHello, WorkerMessage

DEFAULT_REQUEST_RING_BYTES = 8 << 20  # a token id takes 1 to 5 bytes: a prompt of 100,000 tokens fits many times
DEFAULT_EVENT_RING_BYTES = 4 << 20  # a step's events for 64 sequences take about 1 kB

MAX_MESSAGES_PER_DRAIN = 1024


class ChannelError(HeadraceError):
    """A record that is no message: a defect, or two versions of the program on one ring. The channel goes on behind it.

    `request_id` is what the record seems to be about, if it can be told: that request must be ended, since its client waits.
    """

    def __init__(self, message: str, *, ring: int, num_undecodable: int, request_id: int | None) -> None:
        super().__init__(message)
        self.ring = ring
        self.num_undecodable = num_undecodable  # on this channel so far
        self.request_id = request_id


class _Undecodable:
    """What both receiving ends do with bad records: count them, keep the error until it is its turn."""

    def __init__(self) -> None:
        self.count = 0
        self.pending: ChannelError | None = None

    def note(self, record: bytes, ring: int, error: Exception) -> None:
        """Remember the error for this record."""
        self.count += 1
        self.pending = ChannelError(
            f"ring {ring}: a record of {len(record)} bytes is no message ({error}); {self.count} such so far",
            ring=ring,
            num_undecodable=self.count,
            request_id=_request_id_of(record),
        )

    def raise_pending(self) -> None:
        """Raise what was remembered, once."""
        if (error := self.pending) is not None:
            self.pending = None
            raise error


class RequestSender:
    """Gateway side: messages to the worker."""

    def __init__(self, ring: Ring, doorbell: Doorbell) -> None:
        self._ring = ring
        self._doorbell = doorbell
        self._encode = msgspec.msgpack.Encoder().encode

    def send_nowait(self, message: GatewayMessage) -> bool:
        """Hand over one message; False when the ring is full. Raises RecordTooLarge for one that never fits."""
        taken = self._ring.try_push(self._encode(message))
        self._doorbell.ring()  # also when refused: whoever is to make room may have missed a ring
        return taken


class RingRequestSource:
    """Worker side (ports.RequestSource): messages of all gateways, one ring each, all ringing the same bell.

    Rings are drained in turns, a message each, so that one gateway's flood does not hold up the others.
    `wake_fds`: descriptors that end wait_message as well when they can be read (the control socket).
    RingCorrupt passes through: requests are lost then, and only a new worker (discard_all) makes that known to the gateways.
    """

    def __init__(self, rings: Mapping[int, Ring], doorbell: Doorbell, *, wake_fds: Sequence[int] = ()) -> None:
        self._rings = list(rings.items())
        self._doorbell = doorbell
        self._turn = 0
        self._undecodable = _Undecodable()
        self._decoder: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
        self._poll = select.poll()
        for fd in (doorbell.fileno(), *wake_fds):
            self._poll.register(fd, select.POLLIN)

    def drain_nowait(self, max_messages: int) -> list[GatewayMessage]:
        """What has arrived, oldest first within each ring. Raises ChannelError (see there) and RingCorrupt."""
        self._undecodable.raise_pending()
        self._doorbell.clear()  # before looking: a ring after the last look stays
        messages: list[GatewayMessage] = []
        num_rings = len(self._rings)
        num_empty = 0
        while num_empty < num_rings and len(messages) < max_messages:
            index, ring = self._rings[self._turn]
            self._turn = (self._turn + 1) % num_rings
            record = ring.try_pop()
            if record is None:
                num_empty += 1
                continue
            num_empty = 0
            try:
                messages.append(self._decoder.decode(record))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._undecodable.note(record, index, error)
                break
        if not messages:
            self._undecodable.raise_pending()
        return messages

    def wait_message(self, timeout_seconds: float) -> bool:
        """Sleep until something has arrived or the bell was rung (True) or the time is over (False)."""
        if self._undecodable.pending is not None or any(ring.has_records for _, ring in self._rings):
            return True
        return bool(self._poll.poll(timeout_ms(timeout_seconds)))

    def discard_all(self) -> int:
        """Drop what is on the rings, for a new worker; returns how many records. Messages sent from now on arrive."""
        self._undecodable.pending = None
        return sum(ring.discard_all() for _, ring in self._rings)


class RingEventSink:
    """Worker side (ports.EventSink): events to the gateways, by the index of their ring."""

    def __init__(self, rings: Mapping[int, tuple[Ring, Doorbell]]) -> None:
        self._rings = dict(rings)
        self._encode = msgspec.msgpack.Encoder().encode
        self._greeted: dict[int, WorkerHello] = {}

    def publish_nowait(self, reply_ring: int, batch: EventBatch) -> bool:
        """Hand over one batch, all of it or nothing. Raises KeyError for an unknown ring.

        A batch larger than a record may be goes as several. Raises RecordTooLarge when it is more than the whole ring holds.
        """
        ring, doorbell = self._rings[reply_ring]
        record = self._encode(batch)
        if len(record) <= ring.max_record_bytes:
            taken = ring.try_push(record)
        else:
            taken = ring.try_push_all([self._encode(part) for part in self._parts(batch, ring.max_record_bytes)])
        doorbell.ring()  # also when refused: whoever is to make room may have missed a ring
        return taken

    def hello(self, hello: WorkerHello) -> bool:
        """Greet every gateway; False while some ring has no room (call again: those that were greeted are left out)."""
        record = self._encode(hello)
        for index, (ring, doorbell) in self._rings.items():
            if self._greeted.get(index) != hello and ring.try_push(record):
                self._greeted[index] = hello
                doorbell.ring()
        return all(self._greeted.get(index) == hello for index in self._rings)

    def forget_greeting(self, reply_ring: int) -> None:
        """A new gateway process reads this ring and has not seen the greeting: the next hello() greets it again."""
        self._greeted.pop(reply_ring, None)

    def _parts(self, batch: EventBatch, max_bytes: int) -> list[EventBatch]:
        """The batch cut into halves until each part fits. Raises RecordTooLarge when one event of one token does not."""
        if len(self._encode(batch)) <= max_bytes:
            return [batch]
        events = batch.events
        if len(events) > 1:
            first, second = events[: len(events) // 2], events[len(events) // 2 :]
        elif events and len(events[0].token_ids) > 1:
            first, second = ([event] for event in _halves(events[0]))
        else:
            raise RecordTooLarge(f"an event that cannot be cut is larger than {max_bytes} bytes")
        return [
            part for half in (first, second) for part in self._parts(msgspec.structs.replace(batch, events=half), max_bytes)
        ]


class EventReceiver:
    """Gateway side: the worker's messages. `fileno()` is readable when there may be some (loop.add_reader)."""

    def __init__(self, ring: Ring, doorbell: Doorbell, *, index: int = 0) -> None:
        self._ring = ring
        self._doorbell = doorbell
        self._index = index
        self._undecodable = _Undecodable()
        self._decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)

    def fileno(self) -> int:
        """Of the doorbell."""
        return self._doorbell.fileno()

    def drain_nowait(self, max_messages: int = MAX_MESSAGES_PER_DRAIN) -> list[WorkerMessage]:
        """What has arrived, oldest first. If more is left, fileno() stays readable. Raises ChannelError and RingCorrupt.

        After RingCorrupt, or a ChannelError, tokens are missing: every stream that sees a gap must end.
        """
        self._undecodable.raise_pending()
        self._doorbell.clear()  # before looking: a ring after the last look stays
        messages: list[WorkerMessage] = []
        while len(messages) < max_messages and (record := self._ring.try_pop()) is not None:
            try:
                messages.append(self._decoder.decode(record))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._undecodable.note(record, self._index, error)
                break
        if self._ring.has_records or (messages and self._undecodable.pending is not None):
            self._doorbell.ring()  # come again
        if not messages:
            self._undecodable.raise_pending()
        return messages

    def discard_all(self) -> int:
        """Drop what is on the ring, for a new gateway; returns how many records."""
        self._undecodable.pending = None
        return self._ring.discard_all()


def _halves(event: TokenEvent) -> tuple[TokenEvent, TokenEvent]:
    """One event as two: the first has what belongs to the first token, the second carries the end."""
    middle = len(event.token_ids) // 2
    num_before = event.first_index + middle
    usage = event.usage
    if usage is not None:
        usage = msgspec.structs.replace(usage, num_output_tokens=num_before) if event.first_index == 0 else None
    first = TokenEvent(
        event.request_id,
        event.first_index,
        event.token_ids[:middle],
        usage=usage,
        first_scheduled_ns=event.first_scheduled_ns,
        stalls=event.stalls,
    )
    second = msgspec.structs.replace(
        event, first_index=num_before, token_ids=event.token_ids[middle:], first_scheduled_ns=0, stalls=()
    )
    return first, second


def _request_id_of(record: bytes) -> int | None:
    """The number behind the tag in a record of the wire format, if there is one."""
    try:
        value = msgspec.msgpack.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(value, list) and len(value) > 1 and value[0] in ("g", "c") and isinstance(value[1], int):
        return value[1]
    return None

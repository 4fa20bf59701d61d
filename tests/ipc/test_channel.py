"""The typed channels over real rings: the ports' contracts, fairness, bad records, large batches."""

import itertools

import msgspec
import pytest

from headrace.ipc.channel import ChannelError, EventReceiver, RequestSender, RingEventSink, RingRequestSource
from headrace.ipc.control import ControlEnd
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import RecordTooLarge, Ring, RingCorrupt
from headrace.protocol.control import Stop
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import CancelRequest, EventBatch, TokenEvent, Usage, WorkerHello, WorkerLimits
from headrace.protocol.stalls import Stall, StallCause
from tests.contracts.event_sink_contract import EventSinkContract, SinkLink, batch
from tests.contracts.request_source_contract import RequestSourceContract, SourceLink, request

HELLO = WorkerHello(3, "model", WorkerLimits(49152, 8192, 64, 1000, 32))


def new_ring(capacity=1 << 14, **options):
    return Ring.create(bytearray(Ring.size_bytes(capacity)), **options)


@pytest.fixture
def bell():
    bell = Doorbell.create()
    yield bell
    bell.close()


class TestRequestSource(RequestSourceContract):
    @pytest.fixture
    def source_link(self, bell):
        rings = {0: new_ring(), 1: new_ring()}
        return SourceLink(RingRequestSource(rings, bell), RequestSender(rings[1], bell).send_nowait)


class TestEventSink(EventSinkContract):
    @pytest.fixture
    def sink_link(self):
        links = {index: (new_ring(), Doorbell.create()) for index in (0, 1)}
        receivers = {index: EventReceiver(*link) for index, link in links.items()}
        yield SinkLink(RingEventSink(links), lambda index: receivers[index].drain_nowait())
        for _, doorbell in links.values():
            doorbell.close()


class TestSeveralGateways:
    def test_rings_are_drained_in_turns(self, bell):
        rings = {index: new_ring() for index in (0, 1, 2)}
        source = RingRequestSource(rings, bell)
        for index, count in ((0, 100), (1, 2), (2, 1)):
            sender = RequestSender(rings[index], bell)
            for number in range(count):
                assert sender.send_nowait(CancelRequest(index * 1000 + number))
        drained = [message.request_id for message in source.drain_nowait(6)]
        assert drained == [0, 1000, 2000, 1, 1001, 2]

    def test_the_turn_goes_on_in_the_next_drain(self, bell):
        rings = {0: new_ring(), 1: new_ring()}
        source = RingRequestSource(rings, bell)
        for index, ring in rings.items():
            for _ in range(4):
                RequestSender(ring, bell).send_nowait(CancelRequest(index))
        assert [source.drain_nowait(1)[0].request_id for _ in range(6)] == [0, 1, 0, 1, 0, 1]

    def test_a_new_worker_drops_what_was_meant_for_the_last_one(self, bell):
        rings = {0: new_ring(), 1: new_ring()}
        for ring in rings.values():
            RequestSender(ring, bell).send_nowait(request(1))
        source = RingRequestSource(rings, bell)
        assert source.discard_all() == 2
        assert source.drain_nowait(10) == []
        RequestSender(rings[0], bell).send_nowait(request(2))
        assert source.drain_nowait(10) == [request(2)]

    def test_other_descriptors_end_the_wait(self, bell):
        supervisor, child = ControlEnd.pair()
        with supervisor, child:
            source = RingRequestSource({0: new_ring()}, bell, wake_fds=[child.fileno()])
            assert source.wait_message(0) is False
            supervisor.send(Stop())
            assert source.wait_message(60) is True
            child.receive_nowait()
            assert source.wait_message(0) is False
            supervisor.close()
            assert source.wait_message(60) is True


BAD_RECORDS = [
    (b"\xc1", None),
    (b"", None),
    (msgspec.msgpack.encode(["x", 1]), None),
    (msgspec.msgpack.encode({"g": 1}), None),
    (msgspec.msgpack.encode(["g", 77, "tenant", "no number"]), 77),
    (msgspec.msgpack.encode(["c", "no number"]), None),
    (msgspec.msgpack.encode(["g", 77, 5]), 77),
    (b"\x93\xa1g\x05\xa1\xff", 5),  # a string that is not UTF-8
]


class TestBadRecords:
    @pytest.mark.parametrize(("record", "request_id"), BAD_RECORDS[:-1])
    def test_a_source_says_so_in_its_turn_and_goes_on(self, bell, record, request_id):
        ring = new_ring()
        source = RingRequestSource({4: ring}, bell)
        sender = RequestSender(ring, bell)
        sender.send_nowait(request(1))
        ring.try_push(record)
        sender.send_nowait(request(2))
        assert source.drain_nowait(10) == [request(1)]
        assert source.wait_message(0) is True
        with pytest.raises(ChannelError, match=f"ring 4: a record of {len(record)} bytes") as caught:
            source.drain_nowait(10)
        assert (caught.value.ring, caught.value.num_undecodable) == (4, 1)
        assert caught.value.request_id == request_id
        assert source.drain_nowait(10) == [request(2)]
        ring.try_push(record)
        with pytest.raises(ChannelError, match="2 such so far"):
            source.drain_nowait(10)

    @pytest.mark.parametrize(("record", "_request_id"), BAD_RECORDS)
    def test_a_receiver_says_so_in_its_turn_and_goes_on(self, bell, record, _request_id):
        ring = new_ring()
        receiver = EventReceiver(ring, bell)
        sink = RingEventSink({0: (ring, bell)})
        sink.publish_nowait(0, batch(1))
        ring.try_push(record)
        sink.publish_nowait(0, batch(2))
        assert receiver.drain_nowait() == [batch(1)]
        assert bell.wait(0), "the event loop must come back for the rest"
        with pytest.raises(ChannelError):
            receiver.drain_nowait()
        assert bell.wait(0)
        assert receiver.drain_nowait() == [batch(2)]
        assert not bell.wait(0)

    def test_a_string_that_is_not_utf8_is_a_bad_record_too(self, bell):
        ring = new_ring()
        ring.try_push(b"\x93\xa1g\x05\xa1\xff")
        with pytest.raises(ChannelError):
            RingRequestSource({0: ring}, bell).drain_nowait(1)

    def test_a_corrupt_ring_wakes_until_it_is_called_corrupt(self, bell):
        """A record whose bytes are not there yet must not be slept over: its bell was rung already."""
        buffer = bytearray(Ring.size_bytes(64))
        ring = Ring.create(buffer)
        receiver = EventReceiver(ring, bell)
        ring.try_push(b"record")
        buffer[Ring.size_bytes(64) - 64] ^= 1
        bell.ring()

        def come_again():
            for _ in range(1000):
                assert bell.wait(0)
                assert receiver.drain_nowait() == []

        with pytest.raises(RingCorrupt):
            come_again()


class TestEvents:
    def test_a_limited_drain_leaves_the_bell_rung(self, bell):
        ring = new_ring()
        sink, receiver = RingEventSink({0: (ring, bell)}), EventReceiver(ring, bell)
        for number in range(3):
            sink.publish_nowait(0, batch(number))
        assert receiver.fileno() == bell.fileno()
        assert receiver.drain_nowait(2) == [batch(0), batch(1)]
        assert bell.wait(0)
        assert receiver.drain_nowait(2) == [batch(2)]
        assert not bell.wait(0)

    def test_hello_is_tried_again_only_where_it_was_refused(self, bell):
        rings = {0: new_ring(), 1: new_ring(256)}
        sink = RingEventSink({index: (ring, bell) for index, ring in rings.items()})
        while rings[1].try_push(b"x" * 8):
            pass
        assert sink.hello(HELLO) is False
        assert sink.hello(HELLO) is False
        rings[1].discard_all()
        assert sink.hello(HELLO) is True
        assert sink.hello(HELLO) is True
        for ring in rings.values():
            assert EventReceiver(ring, bell).drain_nowait() == [HELLO]
        later = msgspec.structs.replace(HELLO, epoch=4)
        assert sink.hello(later) is True
        assert EventReceiver(rings[0], bell).drain_nowait() == [later]

    def test_a_batch_larger_than_a_record_goes_as_several_at_once(self, bell):
        """What piled up while a gateway did not read: many events, one of them long; nothing of it may be lost."""
        ring = new_ring(4096, max_record_bytes=256)
        sink, receiver = RingEventSink({0: (ring, bell)}), EventReceiver(ring, bell)
        usage = Usage(1, 600, 0, 0)
        events = [TokenEvent(number, 5, [1, 2, 3]) for number in range(40)]
        events.append(TokenEvent(99, 10, list(range(300)), FinishReason.LENGTH, usage=usage, first_scheduled_ns=5))
        assert sink.publish_nowait(0, EventBatch(7, 8, events))
        received = receiver.drain_nowait()
        assert {(part.epoch, part.emitted_ns) for part in received} == {(7, 8)}
        arrived = [event for part in received for event in part.events]
        assert arrived[:40] == events[:40]
        pieces = arrived[40:]
        assert [token for piece in pieces for token in piece.token_ids] == list(range(300))
        for before, after in itertools.pairwise(pieces):
            assert after.first_index == before.first_index + len(before.token_ids)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [FinishReason.LENGTH]
        assert [piece.usage for piece in pieces] == [None] * (len(pieces) - 1) + [usage]
        assert [piece.first_scheduled_ns for piece in pieces] == [5] + [0] * (len(pieces) - 1)

    def test_the_first_piece_of_a_cut_event_has_the_first_token_s_usage_and_stalls(self, bell):
        """INV-3: whoever ends the request after the first piece (a stop string) knows what was cached."""
        ring = new_ring(4096, max_record_bytes=256)
        sink, receiver = RingEventSink({0: (ring, bell)}), EventReceiver(ring, bell)
        stalls = (Stall(StallCause.NO_SLOT, 1, 2),)
        usage = Usage(50, 300, 32, 1)
        event = TokenEvent(9, 0, list(range(300)), FinishReason.STOP, usage=usage, first_scheduled_ns=5, stalls=stalls)
        assert sink.publish_nowait(0, EventBatch(7, 8, [event]))
        pieces = [piece for part in receiver.drain_nowait() for piece in part.events]
        assert len(pieces) > 2
        assert pieces[0].usage == Usage(50, len(pieces[0].token_ids), 32, 1)
        assert [piece.usage for piece in pieces[1:]] == [None] * (len(pieces) - 2) + [usage]
        assert [piece.stalls for piece in pieces] == [stalls] + [()] * (len(pieces) - 1)

    def test_a_large_batch_is_refused_whole(self, bell):
        ring = new_ring(1024, max_record_bytes=128)
        sink, receiver = RingEventSink({0: (ring, bell)}), EventReceiver(ring, bell)
        ring.try_push_all([b"x" * 120] * 4)
        large = EventBatch(7, 8, [TokenEvent(number, 5, [1, 2, 3]) for number in range(40)])
        assert sink.publish_nowait(0, large) is False
        assert ring.discard_all() == 4
        assert sink.publish_nowait(0, large) is True
        assert [event for part in receiver.drain_nowait() for event in part.events] == large.events

    def test_what_never_fits_is_an_error(self, bell):
        sink = RingEventSink({0: (new_ring(256, max_record_bytes=64), bell)})
        with pytest.raises(RecordTooLarge):
            sink.publish_nowait(0, EventBatch(1, 1, [TokenEvent(1, 0, [1], error_message="x" * 100)]))
        with pytest.raises(RecordTooLarge):
            sink.publish_nowait(0, EventBatch(1, 1, [TokenEvent(n, 0, [1]) for n in range(100)]))
        with pytest.raises(RecordTooLarge):
            RequestSender(new_ring(256), Doorbell.from_fds(bell.fds)).send_nowait(request(1, 1000))

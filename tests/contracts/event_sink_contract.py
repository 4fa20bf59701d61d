"""What every EventSink must do. A test class inherits EventSinkContract and gives the fixture `sink_link`."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, TokenEvent, Usage
from headrace.protocol.ports import EventSink


@dataclass
class SinkLink:
    """A sink with rings 0 and 1; `receive(ring)` takes the batches that arrived there."""

    sink: EventSink
    receive: Callable[[int], list[EventBatch]]


def batch(first_index: int, num_events: int = 2) -> EventBatch:
    events = [TokenEvent(1 << 40 | number, first_index, [5, 70_000], first_scheduled_ns=9) for number in range(num_events)]
    usage = Usage(3, 2, 1, 0)
    last = TokenEvent(7, first_index, [], FinishReason.ERROR, "execution_failed", "broken: ü", usage)
    return EventBatch(epoch=2, emitted_ns=2**62, events=[*events, last])


class EventSinkContract:
    def test_batches_come_whole_and_in_order_each_to_its_ring(self, sink_link: SinkLink):
        assert sink_link.sink.publish_nowait(0, batch(0))
        assert sink_link.sink.publish_nowait(1, batch(1))
        assert sink_link.sink.publish_nowait(0, batch(2))
        assert sink_link.receive(0) == [batch(0), batch(2)]
        assert sink_link.receive(1) == [batch(1)]
        assert sink_link.receive(0) == sink_link.receive(1) == []

    def test_an_unknown_ring_is_an_error(self, sink_link: SinkLink):
        with pytest.raises(KeyError):
            sink_link.sink.publish_nowait(9, batch(0))

    def test_a_full_ring_refuses_alone_and_takes_again_when_there_is_room(self, sink_link: SinkLink):
        num_taken = 0
        while num_taken < 1_000_000 and sink_link.sink.publish_nowait(0, batch(num_taken)):
            num_taken += 1
        assert 0 < num_taken < 1_000_000
        assert sink_link.sink.publish_nowait(0, batch(num_taken)) is False
        assert sink_link.sink.publish_nowait(1, batch(0)) is True
        received = []
        while batches := sink_link.receive(0):
            received += batches
        assert received == [batch(number) for number in range(num_taken)]
        assert sink_link.sink.publish_nowait(0, batch(num_taken)) is True
        assert sink_link.receive(0) == [batch(num_taken)]

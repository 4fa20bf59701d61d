"""The shipped fakes keep the contracts of their ports."""

import pytest

from headrace.protocol.messages import CancelRequest, EventBatch
from headrace.testing import InMemoryEventSink, InMemoryRequestSource, ManualClock
from tests.contracts.event_sink_contract import EventSinkContract, SinkLink
from tests.contracts.request_source_contract import RequestSourceContract, SourceLink


class TestInMemoryRequestSource(RequestSourceContract):
    @pytest.fixture
    def source_link(self) -> SourceLink:
        source = InMemoryRequestSource(max_messages=100)
        return SourceLink(source, source.push_nowait)


class TestInMemoryEventSink(EventSinkContract):
    @pytest.fixture
    def sink_link(self) -> SinkLink:
        sink = InMemoryEventSink((0, 1), max_batches=20)
        return SinkLink(sink, sink.drain_nowait)


def test_waiting_moves_the_clock_only_when_nothing_is_there() -> None:
    clock = ManualClock()
    source = InMemoryRequestSource(clock=clock)
    start_ns = clock.now_ns()
    source.push_nowait(CancelRequest(1))
    assert source.wait_message(5.0)
    assert clock.now_ns() == start_ns
    source.drain_nowait(1)
    assert not source.wait_message(5.0)
    assert clock.now_ns() == start_ns + 5_000_000_000
    assert source.waits_seconds == [5.0]


def test_a_sink_refuses_when_told() -> None:
    sink = InMemoryEventSink((0, 1))
    sink.refuse(0)
    assert not sink.publish_nowait(0, EventBatch(0, 0, []))
    assert sink.publish_nowait(1, EventBatch(0, 0, []))
    assert sink.num_refused == 1
    sink.refuse(0, False)
    assert sink.publish_nowait(0, EventBatch(0, 0, []))
    with pytest.raises(KeyError):
        sink.refuse(9)


def test_a_clock_does_not_go_back() -> None:
    clock = ManualClock(5)
    clock.sleep(0.000_000_002)
    assert clock.now_ns() == 7
    with pytest.raises(ValueError, match="back"):
        clock.advance_ns(-1)

"""The in-memory channels that other tests use keep the same contracts as the rings."""

import pytest

from headrace.testing.channels import InMemoryEventSink, InMemoryRequestSource
from tests.contracts.event_sink_contract import EventSinkContract, SinkLink
from tests.contracts.request_source_contract import RequestSourceContract, SourceLink


class TestInMemoryRequestSource(RequestSourceContract):
    @pytest.fixture
    def source_link(self):
        source = InMemoryRequestSource(max_messages=50)
        return SourceLink(source, source.push_nowait)


class TestInMemoryEventSink(EventSinkContract):
    @pytest.fixture
    def sink_link(self):
        sink = InMemoryEventSink((0, 1), max_batches=50)
        return SinkLink(sink, sink.drain_nowait)

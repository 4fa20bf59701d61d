"""Fakes that tests import: manual clock, executor with checked memory, in-memory channels."""

from headrace.testing.channels import InMemoryEventSink, InMemoryRequestSource
from headrace.testing.clock import ManualClock
from headrace.testing.fake_executor import FakeExecutor, MemoryFault

__all__ = ["FakeExecutor", "InMemoryEventSink", "InMemoryRequestSource", "ManualClock", "MemoryFault"]

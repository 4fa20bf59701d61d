"""The ring against a deque, with either side attached anew at any moment."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.ipc.ring import RecordTooLarge, Ring

HEAD = 8


def cost(record: bytes) -> int:
    return HEAD + (len(record) + 7) // 8 * 8


class RingMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(2, 40).map(lambda words: words * 8), limited=st.booleans())
    def create(self, capacity, limited):
        self.capacity = capacity
        self.max_record = max(1, capacity // 2) if limited else capacity - HEAD
        self.buffer = bytearray(Ring.size_bytes(capacity))
        self.producer = Ring.create(self.buffer, max_record_bytes=self.max_record if limited else None)
        self.consumer = Ring.attach(self.buffer)
        self.model = deque()
        self.num_pushed = self.num_popped = self.num_full = 0

    def used(self):
        return sum(map(cost, self.model))

    def push_all(self, records):
        total = sum(map(cost, records))
        if any(len(record) > self.max_record for record in records) or total > self.capacity:
            with pytest.raises(RecordTooLarge):
                self.producer.try_push_all(records)
            return
        fits = self.used() + total <= self.capacity
        assert self.producer.try_push_all(records) is fits
        if fits:
            self.model.extend(records)
            self.num_pushed += len(records)
        else:
            self.num_full += 1

    @rule(record=st.binary(max_size=330))
    def push(self, record):
        self.push_all([record])

    @rule(records=st.lists(st.binary(max_size=60), max_size=5))
    def push_several(self, records):
        self.push_all(records)

    @rule(byte=st.binary(min_size=1, max_size=1))
    def push_exact_fit(self, byte):
        """Fill what is left to the last byte."""
        left = min(self.capacity - self.used() - HEAD, self.max_record)
        if left >= 0:
            self.push_all([byte * left])

    @rule()
    def pop(self):
        expected = self.model.popleft() if self.model else None
        assert self.consumer.try_pop() == expected
        self.num_popped += expected is not None

    @rule()
    def new_producer(self):
        self.producer.close()
        self.producer = Ring.attach(self.buffer)

    @rule()
    def new_consumer(self):
        self.consumer.close()
        self.consumer = Ring.attach(self.buffer)

    @rule()
    def new_worker(self):
        assert self.consumer.discard_all() == len(self.model)
        self.num_popped += len(self.model)
        self.model.clear()

    @invariant()
    def agrees(self):
        statistics = self.consumer.statistics()
        assert statistics == self.producer.statistics()
        assert statistics.capacity_bytes == self.capacity
        assert statistics.fill_bytes == self.used()
        assert statistics.fill_ratio == self.used() / self.capacity
        counts = (statistics.num_pushed, statistics.num_popped, statistics.num_full)
        assert counts == (self.num_pushed, self.num_popped, self.num_full)
        assert self.consumer.has_records is bool(self.model)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

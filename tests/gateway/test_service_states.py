"""Whatever happens in whatever order, a stream has exactly one last delta, and nothing is left over (one terminal event)."""

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from headrace.ipc.channel import ChannelError
from headrace.ipc.ring import RingCorrupt
from headrace.protocol.control import WorkerExited, WorkerStarted
from headrace.protocol.errors import RequestError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import CancelRequest, EventBatch, GatewayHello, GenerationRequest, TokenEvent, Usage

TEXTS = st.sampled_from(["a", "b", "ab", "c", "é", ""])
ENDS = st.sampled_from(list(FinishReason))


class _Reader:
    """The consumer of one stream: what it has read."""

    def __init__(self, stream):
        self.stream = stream
        self.text = ""
        self.num_tokens = 0
        self.last = None
        self.cancelled = False


class GatewayMachine(RuleBasedStateMachine):
    streams = Bundle("streams")
    make = None  # set by the test below, as is:
    seen = None  # a Counter of situations that came about, over all runs

    @initialize(target=streams, num_streams=st.integers(0, 5))
    def start(self, num_streams):
        self.gateway = type(self).make(max_in_flight=6)
        self.loop = asyncio.new_event_loop()
        self.epoch = 1
        self.is_worker_up = True
        self.worker = {}  # request id -> tokens sent, of the live worker
        self.num_read = 0  # of the request ring
        self.held = []  # events that the worker has made and not published
        self.said = {}  # request id -> all bytes that its worker made
        self.readers = []
        self.num_submitted = 0
        return multiple(*[self.submit(stops=("ba",) if number % 2 else (), prompt="xy") for number in range(num_streams)])

    def teardown(self):
        if not hasattr(self, "gateway"):
            return
        self.seen.update({reason: count for reason, count in self.gateway.ended.items() if reason != "error"})
        self.seen["broken"] += self.gateway.service.demux.num_broken_sequences
        self.seen["stale"] += self.gateway.service.num_stale_messages
        self.gateway.service.end_all()
        for reader in self.readers:
            self._read(reader)
            assert reader.last is not None
        gateway = self.gateway
        assert gateway.service.num_running == gateway.admission.num_in_flight == 0
        assert gateway.admission.num_queued_prompt_tokens == 0
        assert sum(gateway.ended.values()) == gateway.value("headrace_requests_started_total") == self.num_submitted
        assert gateway.value("headrace_metrics_faults_total") == 0
        self.loop.close()

    # The client.

    @rule(target=streams, stops=st.sampled_from([(), ("ba",), ("c",)]), prompt=st.sampled_from(["x", "xyz"]))
    def ask(self, stops, prompt):
        return self.submit(stops, prompt)

    def submit(self, stops, prompt):
        try:
            stream = self.gateway.submit(prompt, stop_strings=stops)
        except RequestError:
            ring = self.gateway.ring
            is_full = self.gateway.service.num_running == 6 or len(ring.messages) >= ring.room
            assert is_full or not self.is_worker_up
            self.seen["refused"] += 1
            return multiple()
        self.num_submitted += 1
        reader = _Reader(stream)
        self.readers.append(reader)
        return reader

    @rule(reader=streams)
    def read(self, reader):
        self._read(reader)

    @rule(reader=streams)
    def cancel(self, reader):
        was_over = reader.stream.has_ended
        reader.stream.cancel()
        reader.stream.cancel()
        assert reader.stream.has_ended
        reader.cancelled = reader.cancelled or not was_over

    @rule(reader=consumes(streams))
    def finish_reading(self, reader):
        self._read(reader)

    # The worker.

    @rule(
        turns=st.lists(st.tuples(st.integers(0, 5), TEXTS, st.none() | ENDS), min_size=1, max_size=8), publishes=st.booleans()
    )
    def speak(self, turns, publishes):
        """A step or two: tokens of some sequences, the end of some."""
        self._take_requests()
        for number, text, end in turns:
            if self.worker and self.is_worker_up:
                request_id = sorted(self.worker)[number % len(self.worker)]
                self._emit(request_id, list(text.encode()), end)
                if end is not None:
                    del self.worker[request_id]
        if publishes:
            self._publish(self.epoch)

    @rule()
    def publish(self):
        self._publish(self.epoch)

    @rule(lost=st.integers(0, 3))
    def lose_an_event(self, lost):
        if self.held and self.is_worker_up:
            lost_event = self.held.pop(lost % len(self.held))
            if lost_event.finish_reason is not None or lost_event.request_id not in self.worker:
                # A loss that nothing follows cannot be seen in the stream: the ring tells it.
                self._publish(self.epoch)
                self.gateway.deliver(ChannelError("lost", ring=0, num_undecodable=1, request_id=None))

    @rule(number=st.integers(0, 5))
    def lose_an_event_before_another(self, number):
        """The sure way to a gap: a token that is never published, and the next one that is."""
        self._take_requests()
        if self.worker and self.is_worker_up:
            request_id = sorted(self.worker)[number % len(self.worker)]
            self._publish(self.epoch)
            self._emit(request_id, list(b"lost"), None)
            self.held.clear()
            self._emit(request_id, list(b"after"), None)
            self._publish(self.epoch)

    @rule()
    def repeat_events(self):
        if self.held:
            self.gateway.deliver(EventBatch(self.epoch, 1, list(self.held)))

    @rule()
    def say_something_stale(self):
        self._take_requests()
        running = self.gateway.service.num_running
        for request_id in list(self.worker):
            self.gateway.deliver(EventBatch(self.epoch - 1, 1, [TokenEvent(request_id, 0, [1, 2], FinishReason.LENGTH)]))
        assert self.gateway.service.num_running == running

    @rule(late=st.booleans(), greets_first=st.booleans(), happens=st.sampled_from([True, False, False]))
    def worker_dies(self, late, greets_first, happens):
        if self.is_worker_up and happens:
            if not late:
                self._publish(self.epoch)
            self.seen["lost with a worker"] += self.gateway.service.num_running
            message = WorkerExited(self.epoch, "killed", 0.5)
            self.held, self.worker = [], {}
            if greets_first:  # the next life is up before the supervisor's word came
                self._next_life()
                assert self.gateway.service.num_running == 0
                self.gateway.service.worker_exited(message)
            else:
                self.gateway.service.worker_exited(message)
                self.is_worker_up = False
            assert self.gateway.service.num_running == 0

    @rule()
    def worker_starts(self):
        if not self.is_worker_up:
            self.gateway.service.worker_started(WorkerStarted(self.epoch + 1, 1))
            self._next_life()

    @rule(room=st.sampled_from([0, 2, 50, 50]))
    def make_room(self, room):
        self.gateway.ring.room = len(self.gateway.ring.messages) + room

    @rule(whole=st.booleans(), happens=st.sampled_from([True, False, False, False]))
    def ring_breaks(self, whole, happens):
        if not happens:
            return
        lost = RingCorrupt("x") if whole else ChannelError("x", ring=0, num_undecodable=1, request_id=None)
        self.held = []
        self.seen["lost with the ring"] += self.gateway.service.num_running
        self.gateway.deliver(lost)
        assert self.gateway.service.num_running == 0

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "gateway"):
            return
        live = [reader for reader in self.readers if not reader.stream.has_ended]
        assert self.gateway.service.num_running == self.gateway.admission.num_in_flight == len(live)
        assert self.gateway.service.outbound.num_waiting <= 6 + 4

    def _next_life(self):
        self.epoch += 1
        self.is_worker_up = True
        self.num_read = len(self.gateway.ring.messages)  # it drops what was meant for its predecessor
        self.worker, self.held = {}, []
        self.gateway.greet(self.epoch)

    def _take_requests(self):
        for message in self.gateway.ring.messages[self.num_read :]:
            if isinstance(message, GenerationRequest):
                self.worker[message.request_id] = 0
            elif isinstance(message, CancelRequest):
                if message.request_id in self.worker:
                    self._emit(message.request_id, [], FinishReason.CANCELLED)
                    del self.worker[message.request_id]
            elif isinstance(message, GatewayHello):
                self.worker = {key: value for key, value in self.worker.items() if key >= message.first_request_id}
        self.num_read = len(self.gateway.ring.messages)

    def _emit(self, request_id, ids, finish):
        index = self.worker[request_id]
        self.said[request_id] = self.said.get(request_id, b"") + bytes(ids)
        self.worker[request_id] = index + len(ids)
        code = "execution_failed" if finish is FinishReason.ERROR else ""
        usage = None if finish is None else Usage(1, index + len(ids))
        self.held.append(TokenEvent(request_id, index, ids, finish, code, usage=usage, first_scheduled_ns=0 if index else 1))

    def _publish(self, epoch):
        if self.held and self.is_worker_up:
            self.gateway.deliver(EventBatch(epoch, 1, self.held))
            self.held = []

    def _read(self, reader):
        """Read what lies in the mailbox; after the last delta nothing may come."""
        while reader.last is None and (reader.stream._unread or reader.stream.has_ended):
            delta = self.loop.run_until_complete(reader.stream.next_delta())
            reader.text += delta.text
            reader.num_tokens += delta.num_tokens
            said = self.said.get(reader.stream.request_id, b"").decode(errors="ignore")
            assert said.startswith(reader.text)
            assert not (delta.error and (delta.text or delta.finish_reason))
            if delta.error is not None or delta.finish_reason is not None:
                reader.last = delta
        if reader.last is not None:
            with pytest.raises(RuntimeError):
                self.loop.run_until_complete(reader.stream.next_delta())
            if reader.cancelled:
                assert reader.last.error is not None
            if reader.last.finish_reason is not None:
                assert reader.last.usage.num_output_tokens == reader.num_tokens
            stop = reader.last.stop_string
            assert stop is None or stop not in reader.text


def test_every_stream_has_exactly_one_last_delta(make_gateway):
    class Machine(GatewayMachine):
        make = staticmethod(make_gateway)

    Machine.seen = Counter()
    case = Machine.TestCase
    case.settings = settings(max_examples=300, stateful_step_count=40, deadline=None, derandomize=True)
    case().runTest()
    wanted = ("stop", "length", "abort", "deadline", "broken", "stale", "refused", "lost with a worker", "lost with the ring")
    assert {situation: Machine.seen[situation] for situation in wanted if Machine.seen[situation] < 3} == {}

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ipc.channel import ChannelError
from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import CancelRequest, GatewayHello, GenerationRequest, WorkerHello
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.step import StepFailure
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.telemetry.status_fields import STATUS_FIELDS, WorkerState
from headrace.testing.channels import InMemoryEventSink, InMemoryRequestSource
from headrace.testing.clock import ManualClock
from headrace.testing.fake_executor import FakeExecutor
from headrace.worker.loop import HEARTBEAT_SECONDS, MAX_RETRY_SECONDS, WorkerFailedError, WorkerLoop
from headrace.worker.outbox import Outbox
from headrace.worker.report import WorkerReport

SPEC = ExecutorSpec(
    model_id="m", kv_format="f32", vocab_size=1000, eos_token_ids=frozenset({0}), max_model_len=256, block_size=4, num_blocks=64
)


class GreetingSink(InMemoryEventSink):
    def __init__(self, rings):
        super().__init__(rings)
        self.rings = list(rings)
        self.greeted = set()
        self.greetings = []

    def hello(self, hello):
        for ring in self.rings:
            if ring not in self.greeted and ring not in self._refusing:
                self.greeted.add(ring)
                self.greetings.append(ring)
        return self.greeted == set(self.rings)

    def forget_greeting(self, reply_ring):
        self.greeted.discard(reply_ring)


class Worker:
    """A loop over fakes."""

    def __init__(self, *, rings=(0,), max_num_seqs=8, max_drain_messages=64, max_failed_steps=3, **executor_options):
        self.clock = ManualClock()
        self.source = InMemoryRequestSource(clock=self.clock)
        self.sink = GreetingSink(rings)
        self.executor = FakeExecutor(SPEC, **executor_options)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs, 64, 256), SPEC)
        self.pages = []
        self.outbox = Outbox(self.sink, rings, WorkerHello(1, "m", self.scheduler.limits))
        self.report = WorkerReport(lambda values: self.pages.append(dict(values)), epoch=1, pid=42)
        self.loop = WorkerLoop(
            self.scheduler,
            self.executor,
            self.source,
            self.outbox,
            self.clock,
            self.report,
            max_drain_messages=max_drain_messages,
            max_failed_steps=max_failed_steps,
            tidy=lambda: self.tidied.append(self.clock.now_ns()),
        )
        self.tidied = []
        self.events = {ring: [] for ring in rings}

    def send(self, *messages):
        for message in messages:
            assert self.source.push_nowait(message)

    def step(self, times=1):
        for _ in range(times):
            self.clock.advance(0.01)
            self.loop.step()
            self.collect()

    def collect(self):
        for ring, events in self.events.items():
            for batch in self.sink.drain_nowait(ring):
                events.extend(batch.events)

    def run_dry(self):
        for _ in range(2000):
            if not self.scheduler.has_work and not len(self.source):
                break
            self.step()
        self.loop.step()
        self.collect()

    def tokens(self, request_id, ring=0):
        return [token for event in self.events[ring] if event.request_id == request_id for token in event.token_ids]

    def ends(self, request_id, ring=0):
        found = [event for event in self.events[ring] if event.request_id == request_id and event.finish_reason is not None]
        return [(event.finish_reason, event.error_code) for event in found]


def request(request_id, prompt=(1, 2, 3), max_tokens=5, ring=0):
    stopping = StopConditions(max_tokens, ignore_eos=True)
    return GenerationRequest(request_id, "t", 0, list(prompt), SamplingParams(temperature=0), stopping, 1, 0, "", ring, "m")


def test_a_request_goes_in_and_its_tokens_come_out():
    worker = Worker()
    worker.send(request(1))
    worker.run_dry()
    assert worker.sink.greetings == [0]
    assert len(worker.tokens(1)) == 5
    assert worker.ends(1) == [(FinishReason.LENGTH, "")]
    assert [event.first_index for event in worker.events[0]] == list(range(5))


def test_a_step_takes_a_bounded_number_of_messages():
    """A flood of messages cannot hold up those that run."""
    worker = Worker(max_drain_messages=2)
    worker.send(request(1, max_tokens=50), *[CancelRequest(number) for number in range(1000, 1100)])
    worker.step(10)
    assert len(worker.tokens(1)) == 10


def test_a_step_that_fails_ends_its_rows_and_not_the_worker():
    worker = Worker()
    worker.send(request(1))
    worker.step()
    worker.executor.fail_next_step = RuntimeError("device lost")
    worker.step()
    assert worker.ends(1) == [(FinishReason.ERROR, "execution_failed")]
    assert "device lost" not in worker.events[0][-1].error_message
    worker.send(request(2))
    worker.run_dry()
    assert worker.ends(2) == [(FinishReason.LENGTH, "")]


def test_many_failed_steps_in_a_row_end_the_worker_after_the_last_word():
    def fail(_plan):
        raise MemoryError("no memory")

    worker = Worker(max_failed_steps=3, on_step=fail)
    for number in range(1, 3):
        worker.send(request(number))
        worker.step()
    worker.send(request(3))
    with pytest.raises(WorkerFailedError, match=r"3 steps .*MemoryError: no memory"):
        worker.step()
    worker.collect()
    assert [worker.ends(number) for number in range(1, 4)] == [[(FinishReason.ERROR, "execution_failed")]] * 3


def test_failed_steps_with_good_ones_between_do_not_add_up():
    worker = Worker(max_failed_steps=2)
    for number in range(1, 6):
        worker.executor.fail_next_step = RuntimeError("once")
        worker.send(request(number))
        worker.step()
        worker.send(request(100 + number))
        worker.run_dry()
    assert worker.ends(105) == [(FinishReason.LENGTH, "")]


def test_one_bad_row_ends_alone():
    worker = Worker(failing={2: StepFailure("execution_failed", "nan")})
    worker.send(request(1), request(2))
    worker.run_dry()
    assert worker.ends(1) == [(FinishReason.LENGTH, "")]
    assert worker.ends(2) == [(FinishReason.ERROR, "execution_failed")]


def test_cancelled_requests_stop_within_a_step():
    """DIS-01, DIS-02: one that runs gives back its blocks, one that waits is dropped without prefill."""
    worker = Worker(max_num_seqs=1)
    worker.send(request(1, max_tokens=200), request(2))
    worker.step(3)
    num_computed = worker.executor.num_computed_tokens
    worker.send(CancelRequest(1), CancelRequest(2), CancelRequest(77))
    worker.step()
    assert worker.ends(1) == worker.ends(2) == [(FinishReason.CANCELLED, "")]
    assert worker.executor.num_computed_tokens == num_computed
    assert not worker.scheduler.has_work
    worker.loop.wait_message()
    assert (worker.pages[-1]["num_running"], worker.pages[-1]["num_waiting"]) == (0, 0)


def test_garbage_is_collected_once_when_nobody_has_asked_for_a_while():
    worker = Worker()
    worker.loop.wait_message()
    assert worker.tidied == []  # nothing was done yet
    worker.send(request(1, max_tokens=3))
    worker.run_dry()
    ended_ns = worker.clock.now_ns()
    for _ in range(4):
        worker.loop.wait_message()
        assert not worker.loop.step()
        worker.clock.advance(0.4)
    (tidied_ns,) = worker.tidied
    assert tidied_ns - ended_ns >= HEARTBEAT_SECONDS * 1e9
    worker.send(request(2, max_tokens=1))
    worker.run_dry()
    worker.clock.advance(HEARTBEAT_SECONDS)
    worker.loop.wait_message()
    assert len(worker.tidied) == 2


def test_no_garbage_is_collected_while_a_request_is_live():
    worker = Worker()
    worker.send(request(1, max_tokens=3))
    worker.step()
    worker.clock.advance(5)
    worker.loop.wait_message()  # as after a step that was refused
    assert worker.tidied == []


def test_events_wait_for_a_full_ring_while_others_go_on():
    worker = Worker(rings=(0, 1))
    worker.sink.refuse(0)
    worker.send(request(1, max_tokens=20), request(2, max_tokens=20, ring=1))
    worker.step(22)
    assert worker.events[0] == []
    assert worker.ends(2, ring=1) == [(FinishReason.LENGTH, "")]
    assert worker.outbox.num_pending_events == 1
    worker.sink.refuse(0, False)
    worker.loop.wait_message()
    worker.step()
    (event,) = worker.events[0]
    assert (event.first_index, len(event.token_ids), event.finish_reason) == (0, 20, FinishReason.LENGTH)
    assert worker.sink.greetings == [1, 0]


def test_an_idle_worker_sleeps_until_its_heartbeat_and_wakes_sooner_while_events_wait():
    worker = Worker()
    worker.step()
    for _ in range(3):
        worker.loop.wait_message()
    assert worker.source.waits_seconds == [HEARTBEAT_SECONDS] * 3
    worker.source.waits_seconds.clear()
    worker.sink.refuse(0)
    worker.send(request(1, max_tokens=1))
    worker.step()
    for _ in range(10):
        worker.step()
        worker.loop.wait_message()
    waits = worker.source.waits_seconds
    assert waits == sorted(waits)
    assert waits[-1] == MAX_RETRY_SECONDS < HEARTBEAT_SECONDS
    worker.sink.refuse(0, False)
    worker.step()
    worker.loop.wait_message()
    assert worker.source.waits_seconds[-1] == HEARTBEAT_SECONDS


def test_sch_16_whose_time_is_over_leaves_before_a_long_step_is_computed():
    """SCH-16: one place, a job of many slow steps, one that waits has a deadline, another its class's time in the queue."""
    left_ns = {}

    def on_step(plan):
        worker.collect()
        for number in (2, 3):
            if worker.ends(number):
                left_ns.setdefault(number, worker.clock.now_ns())
        worker.clock.advance(0.5)

    worker = Worker(max_num_seqs=1, on_step=on_step)
    start_ns = worker.clock.now_ns()
    job = msgspec.structs.replace(request(1, max_tokens=1000), arrival_ns=start_ns, service_class="interactive")
    limited = msgspec.structs.replace(request(2), arrival_ns=start_ns, service_class="batch", deadline_ns=start_ns + 10**9)
    queued = msgspec.structs.replace(request(3), arrival_ns=start_ns, service_class="standard")
    worker.send(job, limited, queued)
    worker.step(250)
    assert worker.ends(2) == worker.ends(3) == [(FinishReason.DEADLINE, ErrorCode.DEADLINE_EXCEEDED.value.code)]
    assert worker.tokens(2) == worker.tokens(3) == []
    # Seen by the step that is planned next, and before it is computed. The standard class has 120 s in the queue.
    assert 1.0 <= (left_ns[2] - start_ns) / 1e9 <= 1.05
    assert 120.0 <= (left_ns[3] - start_ns) / 1e9 <= 120.4
    messages = {event.request_id: event.error_message for event in worker.events[0] if event.finish_reason is not None}
    assert "deadline" in messages[2]
    assert "'standard'" in messages[3]


def test_sch_16_a_wait_ends_when_the_next_live_request_must_leave():
    worker = Worker()
    worker.step()  # the greeting is sent
    now_ns = worker.clock.now_ns()
    for number, seconds in ((1, 0.75), (2, 0.25), (3, 300)):
        deadline_ns = now_ns + round(seconds * 1e9)
        worker.scheduler.add(msgspec.structs.replace(request(number), arrival_ns=now_ns, deadline_ns=deadline_ns), now_ns)
    worker.loop.wait_message()
    worker.scheduler.cancel(2, now_ns)
    worker.loop.wait_message()
    worker.scheduler.cancel(1, now_ns)
    worker.loop.wait_message()
    assert worker.source.waits_seconds == [0.25, 0.5, HEARTBEAT_SECONDS]


def test_the_status_page_is_right_when_idle_and_beats():
    """DIS-07: the page shows progress of the engine."""
    worker = Worker()
    worker.send(request(1), request(2))
    worker.run_dry()
    worker.loop.wait_message()
    page = worker.pages[-1]
    assert set(page) == set(STATUS_FIELDS)
    assert (page["epoch"], page["pid"], page["state"]) == (1, 42, WorkerState.READY)
    assert (page["num_running"], page["num_generated_tokens"]) == (0, 10)
    assert page["num_steps"] == worker.executor.num_steps
    beats = [page["heartbeat_ns"] for page in worker.pages]
    worker.loop.wait_message()
    assert worker.pages[-1]["heartbeat_ns"] - beats[-1] == HEARTBEAT_SECONDS * 1e9


def test_a_step_is_counted_once_for_all_its_rows():
    """MET-11"""
    worker = Worker()
    worker.send(*[request(number, max_tokens=1) for number in range(1, 9)])
    worker.step()
    page = worker.pages[-1]
    assert page["num_steps"] == sum(value for name, value in page.items() if name.startswith("step_duration_bucket")) == 1
    assert page["iteration_tokens_sum"] == 24


def test_a_new_gateway_cancels_what_its_predecessor_left_and_is_greeted():
    worker = Worker(rings=(0, 1))
    worker.send(request(1, max_tokens=100), request(2, max_tokens=3, ring=1))
    worker.step(2)
    worker.sink.refuse(0)
    worker.step()
    worker.send(GatewayHello(0, 1000), request(1000, max_tokens=2))
    worker.step()
    worker.sink.refuse(0, False)
    worker.run_dry()
    assert worker.ends(1) == []  # nobody waits for it: its events are dropped
    assert worker.ends(1000) == [(FinishReason.LENGTH, "")]
    assert worker.ends(2, ring=1) == [(FinishReason.LENGTH, "")]
    assert worker.sink.greetings.count(0) == 2


def test_messages_that_name_no_ring_are_counted_and_dropped():
    worker = Worker()
    worker.send(request(1, ring=9), GatewayHello(9, 5), request(2))
    worker.run_dry()
    assert worker.loop.num_unreadable == 2
    assert worker.ends(2) == [(FinishReason.LENGTH, "")]


def test_an_unreadable_request_gets_its_end():
    worker = Worker()
    drain = worker.source.drain_nowait
    errors = [
        ChannelError("bad", ring=0, num_undecodable=1, request_id=5),
        ChannelError("bad", ring=0, num_undecodable=2, request_id=None),
    ]

    def failing_drain(max_messages):
        if errors:
            raise errors.pop(0)
        return drain(max_messages)

    worker.source.drain_nowait = failing_drain
    worker.send(request(1))
    worker.run_dry()
    worker.step(3)
    worker.run_dry()
    assert worker.ends(5) == [(FinishReason.ERROR, "internal_error")]
    assert worker.ends(1) == [(FinishReason.LENGTH, "")]
    assert worker.loop.num_unreadable == 2


def test_at_the_end_every_request_gets_an_error_that_says_so():
    worker = Worker(max_num_seqs=1)
    worker.send(request(1, max_tokens=100), request(2))
    worker.step(3)
    worker.send(request(3))  # handed over and not yet taken
    worker.loop.end_all()
    worker.outbox.flush()
    worker.collect()
    assert [worker.ends(number) for number in (1, 2, 3)] == [[(FinishReason.ERROR, "draining")]] * 3
    assert not worker.scheduler.has_work


def test_a_draining_worker_refuses_new_requests_and_ends_with_the_others():
    worker = Worker()
    worker.send(request(1, max_tokens=30))
    worker.step(3)
    worker.loop.is_draining = True
    worker.send(request(2))
    worker.loop.run(lambda: False)
    worker.collect()
    assert worker.ends(1) == [(FinishReason.LENGTH, "")]
    assert worker.ends(2) == [(FinishReason.ERROR, "draining")]


def test_run_ends_when_told():
    worker = Worker()
    worker.send(request(1))
    rounds = iter([False] * 20 + [True])
    worker.loop.run(lambda: next(rounds))
    worker.collect()
    assert worker.ends(1) == [(FinishReason.LENGTH, "")]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_ends_once_with_contiguous_events(data):
    """Random requests, cancellations, full rings and failed steps (one terminal event, contiguous indices)."""
    worker = Worker(rings=(0, 1), max_num_seqs=3, max_failed_steps=1000)
    asked = {}
    for number in range(1, data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["ask", "ask", "step", "cancel", "refuse", "take", "fail"]))
        ring = number % 2
        if action == "ask":
            asked[number] = ring
            worker.send(request(number, range(1, 1 + data.draw(st.integers(1, 40))), data.draw(st.integers(1, 12)), ring))
        elif action == "step":
            worker.step(data.draw(st.integers(1, 4)))
        elif action == "cancel":
            worker.send(CancelRequest(data.draw(st.integers(1, number))))
        elif action == "refuse":
            worker.sink.refuse(ring)
        elif action == "take":
            worker.sink.refuse(ring, False)
        else:
            worker.executor.fail_next_step = RuntimeError("once")
            worker.send(request(1000 + number, ring=ring))
            asked[1000 + number] = ring
            worker.step()
    for ring in (0, 1):
        worker.sink.refuse(ring, False)
    worker.executor.fail_next_step = None
    worker.run_dry()
    worker.scheduler.check_integrity()
    for request_id, ring in asked.items():
        assert len(worker.ends(request_id, ring)) == 1
        events = [event for event in worker.events[ring] if event.request_id == request_id]
        assert events[-1].finish_reason is not None
        index = 0
        for event in events:
            assert event.first_index == index
            index += len(event.token_ids)
        assert events[-1].usage is None or events[-1].usage.num_output_tokens == index

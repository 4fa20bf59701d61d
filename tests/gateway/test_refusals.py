"""Whoever is refused never comes to the worker, and what is counted at the door is what is in flight, whatever happens."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.gateway.deltas import CallOutline, GenerationSpec, RequestOrigin
from headrace.protocol.control import WorkerExited
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, TokenEvent, Usage
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy

MAX_IN_FLIGHT = 12
TRAFFIC = TrafficPolicy(
    classes=(
        ServiceClass(name="interactive", level=0, ttft_target_ms=500, tbt_target_ms=50),
        ServiceClass(name="standard", level=1, ttft_target_ms=2000, tbt_target_ms=250, max_queued_requests=6),
        ServiceClass(name="batch", level=2, ttft_target_ms=20_000, tbt_target_ms=0, max_queued_tokens=4000),
    ),
    tenants=(Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT), Tenant(name="heavy"), Tenant(name="light", weight=2.0)),
)


class DoorMachine(RuleBasedStateMachine):
    make = None  # set by the test below, as is:
    seen = None  # a Counter of situations that came about, over all runs

    @initialize(forecasts=st.sampled_from([True, True, True, False]))
    def start(self, forecasts):
        self.gateway = type(self).make(
            max_in_flight=MAX_IN_FLIGHT, max_queued_prompt_tokens=9000, max_num_seqs=4, traffic=TRAFFIC, forecasts=forecasts
        )
        self.forecasts = forecasts
        self.epoch = 1
        self.streams = []
        self.num_accepted = self.num_refused = 0

    @rule(
        service_class=st.sampled_from(TRAFFIC.class_names),
        tenant=st.sampled_from(["heavy", "heavy", "light", DEFAULT_TENANT]),
        num_tokens=st.sampled_from([1, 50, 400, 3000]),
        num_choices=st.sampled_from([1, 1, 1, 3, 20]),
        caller=st.integers(0, 6),
        timeout_ns=st.sampled_from([0, 0, 0, 100_000_000]),
        estimate_off=st.sampled_from([0.5, 1.0, 2.0]),
        asks_first=st.sampled_from([True, True, False]),
    )
    def call(self, service_class, tenant, num_tokens, num_choices, caller, timeout_ns, estimate_off, asks_first):
        origin = RequestOrigin(digest=b"%d" % caller)
        fields = {"service_class": service_class, "tenant_id": tenant, "timeout_ns": timeout_ns, "origin": origin}
        outline = CallOutline(num_sequences=num_choices, num_token_ids=round(num_choices * num_tokens * estimate_off), **fields)
        spec = GenerationSpec([1] * num_tokens, SamplingParams(), StopConditions(100), **fields)
        service, num_messages = self.gateway.service, len(self.gateway.ring.messages)
        try:
            if asks_first:
                service.check_admission(outline)
            streams = service.submit_call([spec] * num_choices, outline if asks_first else None)
        except RequestError as error:
            assert len(self.gateway.ring.messages) == num_messages  # nothing at all reached the worker, no cancel either
            self.num_refused += 1
            self._judge(error, num_choices)
            return
        assert len(streams) == num_choices
        assert [message.prompt_token_ids for message in self.gateway.ring.messages[num_messages:]] == [[1] * num_tokens] * (
            num_choices
        )
        for message in self.gateway.ring.messages[num_messages:]:
            assert message.deadline_ns == (message.arrival_ns + timeout_ns if timeout_ns else 0)
        self.num_accepted += num_choices
        self.streams += streams

    @rule(size=st.integers(1, 8))
    def crowd(self, size):
        """A light tenant's request, then several of a heavy one, then background work."""
        for number, tenant in enumerate(["light", *["heavy"] * size]):
            self.call("interactive", tenant, 50 if tenant == "light" else 400, 1, 10 + number, 0, 1.0, True)
        for number in range(3):
            self.call("batch", DEFAULT_TENANT, 50, 1, 20 + number, 0, 1.0, True)

    @rule()
    def fill_a_class(self):
        """More short requests of one class than may wait in it."""
        for number in range(11):
            self.call("standard", DEFAULT_TENANT, 1, 1, 30 + number, 0, 1.0, False)

    def _judge(self, error, num_choices):
        if error.code is ErrorCode.INVALID_VALUE:
            assert (num_choices, error.param) == (20, "n")
            self.seen["never"] += 1
        elif error.reject_reason is None:
            assert error.code is ErrorCode.NOT_READY
        else:
            self.seen[error.reject_reason.value] += 1
            is_own = error.reject_reason.value == "tenant_share"
            assert error.code is (ErrorCode.TENANT_OVER_SHARE if is_own else ErrorCode.OVERLOADED)
            assert error.retry_after_seconds >= 1
            assert self.forecasts or error.reject_reason.value in ("queue_full", "class_queue_full")

    @rule(number=st.integers(0, 11), end=st.sampled_from([None, None, *FinishReason]))
    def speak(self, number, end):
        live = [stream for stream in self.streams if not stream.has_ended]
        if live:
            stream = live[number % len(live)]
            usage = None if end is None else Usage(1, stream.num_tokens + 1)
            event = TokenEvent(stream.request_id, stream.num_tokens, [97], end, usage=usage, first_scheduled_ns=1)
            self.gateway.deliver(EventBatch(self.epoch, 1, [event]))

    @rule(number=st.integers(0, 11))
    def cancel(self, number):
        if self.streams:
            self.streams[number % len(self.streams)].cancel()

    @rule(duration_ns=st.sampled_from([1_000_000, 100_000_000, 900_000_000, 5_000_000_000]))
    def wait(self, duration_ns):
        self.gateway.clock.advance_ns(duration_ns)
        self.gateway.status["heartbeat_ns"] = self.gateway.clock.now_ns()

    @rule(happens=st.sampled_from([True, False, False, False, False]))
    def worker_dies(self, happens):
        if happens:
            self.gateway.service.worker_exited(WorkerExited(self.epoch, "killed", 0.5))
            self.epoch += 1

    @rule()
    def worker_greets(self):
        self.gateway.greet(self.epoch)

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "gateway"):
            return
        live = [stream for stream in self.streams if not stream.has_ended]
        admission = self.gateway.admission
        assert admission.num_in_flight == self.gateway.service.num_running == len(live) <= MAX_IN_FLIGHT
        waiting = [stream.num_prompt_tokens for stream in live if not stream.num_tokens]
        assert admission.num_queued_prompt_tokens == sum(waiting)
        assert len(self.gateway.requests) == self.num_accepted
        assert len(admission.promises) <= 7 + 9 + 3 + 11

    def teardown(self):
        if hasattr(self, "gateway"):
            self.seen["accepted"] += self.num_accepted
            self.gateway.service.end_all()
            assert self.gateway.admission.num_in_flight == self.gateway.admission.num_queued_prompt_tokens == 0
            assert self.gateway.value("headrace_requests_started_total") == self.num_accepted
            assert self.gateway.value("headrace_metrics_faults_total") == 0


def test_refusals_never_touch_the_worker(make_gateway):
    class Machine(DoorMachine):
        make = staticmethod(make_gateway)

    Machine.seen = Counter()
    case = Machine.TestCase
    case.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
    case().runTest()
    wanted = ("accepted", "never", "queue_full", "class_queue_full", "predicted_ttft", "tenant_share", "shed")
    assert {situation: Machine.seen[situation] for situation in wanted if Machine.seen[situation] < 3} == {}

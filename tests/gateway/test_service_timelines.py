"""What the service tells of its requests: timelines, stalls and their causes, listeners, the debug view."""

import pytest

from headrace.gateway.deltas import GenerationSpec, RequestOrigin
from headrace.gateway.service import GatewayService
from headrace.gateway.worker_view import WorkerView
from headrace.protocol.control import WorkerExited
from headrace.protocol.errors import RequestError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.stalls import Stall, StallCause
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.journal import Journal
from headrace.telemetry.status_fields import blocked_by_number

MS = 1_000_000
ORIGIN = RequestOrigin(client_request_id="req-1", choice_index=2, api="/v1/completions", traceparent="00-ab", tracestate="x=y")


class Listener:
    """Keeps what it is told."""

    def __init__(self):
        self.accepted, self.refused, self.finished = [], [], []

    def on_accepted(self, *told):
        self.accepted.append(told)

    def on_refused(self, *told):
        self.refused.append(told)

    def on_finished(self, snapshot):
        self.finished.append(snapshot)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def gateway(make_gateway, byte_tokenizer, listener):
    """As the common one, with a listener, and with the prompt in the log."""
    made = make_gateway()
    made.journal = Journal(made.meters.faults, capacity=4, listeners=[listener])
    made.service = GatewayService(
        made.service.card,
        byte_tokenizer,
        made.ring,
        made.receiver,
        made.admission,
        WorkerView(lambda: made.status, 30.0),
        made.meters,
        MetricsExporter(made.meters, lambda: None, model_name="test"),
        made.clock,
        reply_ring=0,
        incarnation=7,
        journal=made.journal,
        log_prompts=True,
    )
    made.greet()
    made.ring.messages.clear()
    return made


def causes(report):
    return [(stall.cause, stall.duration_ms) for stall in report.stalls]


def stall_counts(gateway):
    return {key[0]: value for key, value in gateway.meters.accumulators["headrace_stalls_total"].values.items() if value}


def test_a_request_from_its_arrival_to_its_end(gateway, make_sequence, listener):
    now = gateway.clock.now_ns()
    origin = RequestOrigin("req-1", 2, now - 5 * MS, now - 2 * MS, "00-ab", "x=y", "/v1/completions")
    stream = gateway.submit("hello", max_tokens=9, service_class="batch", priority=4, origin=origin)
    assert gateway.requests[0].arrival_ns == now - 5 * MS
    sequence = make_sequence(gateway, stream)
    gateway.clock.advance(0.04)
    sequence.say("a", first_scheduled_ns=now + 10 * MS)
    gateway.clock.advance(0.06)
    sequence.end(FinishReason.LENGTH, "bc")
    report = stream.timeline_report()
    assert (report.request_id, report.choice, report.api, report.model) == ("req-1", 2, "/v1/completions", "test")
    assert (report.service_class, report.tenant, report.priority, report.state) == ("batch", "default", 4, "finished")
    assert (report.tokenized_ms, report.queued_ms, report.first_scheduled_ms) == (3.0, 5.0, 15.0)
    assert (report.first_token_ms, report.last_token_ms, report.end_ms, report.age_ms) == (45.0, 105.0, 105.0, 105.0)
    assert report.phases == {"tokenize": 3.0, "queue": 12.0, "prefill": 30.0, "decode": 60.0}
    tokens = (report.prompt_tokens, report.cached_tokens, report.output_tokens, report.max_tokens)
    assert tokens == (5, 1, 3, 9)
    assert (report.finish_reason, report.error_code, report.waiting_for, report.num_stalls) == ("length", None, None, 0)
    (snapshot,) = listener.finished
    assert snapshot.stamps.end_ns == now + 100 * MS
    assert (snapshot.identity.traceparent, snapshot.identity.tracestate) == ("00-ab", "x=y")
    ((identity, arrival_ns, prompt_token_ids, deadline_ns, cache_salt),) = listener.accepted
    assert (identity, arrival_ns) == (snapshot.identity, now - 5 * MS)
    assert (bytes(prompt_token_ids), deadline_ns, cache_salt) == (b"hello", 0, "")


def test_classes_and_tenants_are_those_of_the_configuration(gateway):
    gateway.submit(service_class="gold", tenant_id="mallory")
    gateway.submit(service_class="interactive", tenant_id="other")
    named = [(request.service_class, request.tenant_id) for request in gateway.requests]
    assert named == [("standard", "other"), ("interactive", "other")]


def test_stalls_that_the_worker_tells_are_counted_and_shown(gateway, make_sequence):
    stream = gateway.submit()
    sequence = make_sequence(gateway, stream)
    began = gateway.clock.now_ns()
    gateway.clock.advance(2.0)
    sequence.say("a", first_scheduled_ns=began, stalls=(Stall(StallCause.NO_BLOCKS, began, 1900 * MS),))
    sequence.end(FinishReason.LENGTH, stalls=(Stall(StallCause.PREFILL, began + 1900 * MS, 300 * MS),))
    assert causes(stream.timeline_report()) == [("no_blocks", 1900.0), ("prefill", 300.0)]
    assert stall_counts(gateway) == {"no_blocks": 1, "prefill": 1}


def test_what_a_live_request_waits_for(gateway, make_sequence):
    def waiting_for(stream):
        return stream.timeline_report().waiting_for

    stream = gateway.submit()
    sequence = make_sequence(gateway, stream)
    assert waiting_for(stream) == "worker_busy"
    gateway.status["blocked_by"] = blocked_by_number(StallCause.NO_SLOT)
    assert waiting_for(stream) == "no_slot"
    sequence.say("a")
    assert (waiting_for(stream), stream.timeline_report().state) == (None, "decode")
    gateway.clock.advance(0.25)
    assert waiting_for(stream) == "slow_reader", "its text has been lying there for as long as the threshold"
    stream._take()
    assert waiting_for(stream) == "slow_step"
    sequence.say("", is_preempted=True)
    assert (waiting_for(stream), stream.timeline_report().state) == ("preempted", "preempted")
    sequence.say("b")
    assert (waiting_for(stream), stream.timeline_report().preemptions) == (None, 1)
    sequence.end()
    gateway.clock.advance(5)
    stream._take()
    assert waiting_for(stream) is None


def test_a_status_page_that_cannot_be_read_fails_no_request(gateway):
    stream = gateway.submit()
    gateway.status["blocked_by"] = "nonsense"
    assert stream.timeline_report().waiting_for == "worker_busy"
    stream.cancel()
    assert gateway.ended == {"abort": 1}
    assert gateway.value("headrace_metrics_faults_total") == 1


def test_a_lost_worker_is_the_cause_from_the_last_token_on(gateway, make_sequence, listener):
    quiet, speaking = gateway.submit(), gateway.submit()
    make_sequence(gateway, speaking).say("a")
    gateway.clock.advance(0.1)
    gateway.service.worker_exited(WorkerExited(1, -9, 1.0, gives_up=False))
    for stream in (quiet, speaking):
        report = stream.timeline_report()
        assert (causes(report), report.error_code, report.finish_reason) == ([("worker_lost", 100.0)], "worker_lost", "error")
    assert [snapshot.error_code for snapshot in listener.finished] == ["worker_lost"] * 2


def test_a_client_that_gives_up_waiting(gateway, make_sequence):
    gateway.status["blocked_by"] = blocked_by_number(StallCause.NO_BLOCKS)
    queued, early = gateway.submit(), gateway.submit()
    early.cancel()
    gateway.clock.advance(3)
    queued.cancel()
    assert causes(queued.timeline_report()) == [("no_blocks", 3000.0)]
    assert causes(early.timeline_report()) == []
    assert queued.timeline_report().error_code is None


def test_a_slow_reader_is_noted_before_and_after_the_end(gateway, make_sequence):
    stream = gateway.submit()
    now = gateway.clock.now_ns()
    stream.note_slow_reader(now, 400 * MS)
    make_sequence(gateway, stream).end(FinishReason.LENGTH, "a")
    stream.note_slow_reader(now + 500 * MS, 700 * MS)
    assert causes(stream.timeline_report()) == [("slow_reader", 400.0), ("slow_reader", 700.0)]
    (finished,) = gateway.service.debug_requests(10).finished
    assert finished.num_stalls == 2
    assert stall_counts(gateway) == {"slow_reader": 2}


def test_debug_requests_live_oldest_first_and_finished_newest_first(gateway, make_sequence):
    streams = []
    for number in range(9):
        gateway.clock.advance(0.01)
        streams.append(gateway.submit(origin=RequestOrigin(client_request_id=str(number))))
    for stream in streams[:6]:
        make_sequence(gateway, stream).end(FinishReason.LENGTH, "a")
    found = gateway.service.debug_requests(50)
    assert [report.request_id for report in found.live] == ["6", "7", "8"]
    assert [report.request_id for report in found.finished] == ["5", "4", "3", "2"], "the ring of this test keeps four"
    assert {report.waiting_for for report in found.live} == {"worker_busy"}
    assert found.live[0].age_ms == 20.0
    limited = gateway.service.debug_requests(2)
    assert ([report.request_id for report in limited.live], limited.num_live) == (["6", "7"], 3)
    assert [report.request_id for report in limited.finished] == ["5", "4"]


def test_a_request_without_a_token_is_in_its_prefill_when_all_run(gateway):
    gateway.submit()
    gateway.submit()
    states = []
    for num_running in (1, 2):
        gateway.status["num_running"] = num_running
        states += [(report.state, report.waiting_for) for report in gateway.service.debug_requests(10).live]
    assert states == [("queued", "worker_busy")] * 2 + [("prefill", None)] * 2


def test_refusals_are_told_once_each(gateway, listener):
    gateway.ring.room = 0
    spec = GenerationSpec([1, 2], SamplingParams(), StopConditions(1), cache_salt="s", origin=ORIGIN)
    with pytest.raises(RequestError):
        gateway.service.submit(spec)
    gateway.service.begin_drain(5)
    with pytest.raises(RequestError):
        gateway.service.submit(spec)
    told = [(identity.request_id, ids, code, salt) for identity, _, ids, code, salt in listener.refused]
    assert told == [(0, [1, 2], "overloaded", "s"), (0, [1, 2], "draining", "s")]
    assert listener.accepted == listener.finished == []
    assert gateway.service.debug_requests(10).finished == []


def test_a_full_request_ring_is_counted(gateway):
    gateway.ring.room = 0
    with pytest.raises(RequestError):
        gateway.submit()
    body, _ = gateway.service.metrics_exposition()
    assert b'headrace_ring_full_total{model_name="test",ring="request"} 1.0' in body


def test_the_prompt_is_logged_when_the_operator_wants_it(gateway, make_sequence, capsys):
    make_sequence(gateway, gateway.submit("what is hidden?")).end(FinishReason.LENGTH, "a")
    printed = "".join(capsys.readouterr())
    assert "what is hidden?" in printed


def test_no_prompt_is_logged_otherwise(make_gateway, make_sequence, capsys):
    gateway = make_gateway()
    make_sequence(gateway, gateway.submit("what is hidden?")).end(FinishReason.LENGTH, "a")
    printed = "".join(capsys.readouterr())
    assert "request finished" in printed
    assert "hidden" not in printed


def test_only_the_beginning_of_a_long_prompt_is_decoded(gateway, make_sequence, capsys):
    make_sequence(gateway, gateway.submit("a" * 512 + "z" * 5000)).end(FinishReason.LENGTH, "b")
    assert "z" not in "".join(capsys.readouterr()).partition("prompt_text")[2]

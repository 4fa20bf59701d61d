"""Traces of requests: what they hold, whom they follow, and that nothing of the export touches a request."""

import logging
import random
import re
import sys
import threading
from dataclasses import astuple, replace

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.stalls import Stall, StallCause
from headrace.telemetry import otlp
from headrace.telemetry.catalog import FINISHED_REASONS
from headrace.telemetry.otlp import Tracing, whole_phases_of
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot, TimelineStamps
from headrace.telemetry.tracing import open_tracing, traces_url

MS = 1_000_000
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"

IDENTITY = RequestIdentity(
    request_id=7,
    client_request_id="req-seven",
    choice_index=1,
    api="/v1/chat/completions",
    model="river",
    service_class="interactive",
    tenant="mill",
    priority=-3,
    num_prompt_tokens=12,
    max_tokens=64,
)
STAMPS = TimelineStamps(
    received_ns=1_000 * MS,
    tokenized_ns=1_002 * MS,
    queued_ns=1_003 * MS,
    first_scheduled_ns=1_010 * MS,
    first_token_ns=1_050 * MS,
    last_token_ns=1_150 * MS,
    end_ns=1_151 * MS,
)
SNAPSHOT = TimelineSnapshot(IDENTITY, STAMPS, "finished", "stop", "", 21, 8, 2, (), 0)


class Refusing(SpanExporter):
    """A collector that takes nothing."""

    def __init__(self, error=None):
        self.error = error

    def export(self, spans):
        if self.error:
            raise self.error
        return SpanExportResult.FAILURE


class Stuck(SpanExporter):
    """A collector that answers when it is let go."""

    def __init__(self):
        self.called, self.go = threading.Event(), threading.Event()

    def export(self, spans):
        self.called.set()
        self.go.wait(60)
        return SpanExportResult.SUCCESS


@pytest.fixture(autouse=True)
def _sdk_logger_is_left_alone():
    yield
    sdk = logging.getLogger("opentelemetry")
    sdk.handlers.clear()
    sdk.propagate = True


def tracing_to(exporter, sample_ratio=1.0, **more):
    return Tracing(exporter, sample_ratio, "headrace", "1.2.3", "river", **more)


def spans_of(*snapshots, sample_ratio=1.0):
    """All spans that these requests make, those of requests first."""
    exporter = InMemorySpanExporter()
    tracing = tracing_to(exporter, sample_ratio)
    for snapshot in snapshots:
        tracing.on_finished(snapshot)
    tracing.close()
    assert tracing.num_waiting_spans == tracing.num_dropped_spans == tracing.num_failed_spans == 0
    assert tracing.num_exported_spans == len(exporter.get_finished_spans())
    return sorted(exporter.get_finished_spans(), key=lambda span: span.kind is not SpanKind.SERVER)


def with_context(traceparent, tracestate=""):
    return replace(SNAPSHOT, identity=replace(IDENTITY, traceparent=traceparent, tracestate=tracestate))


def duration_ns(span):
    return span.end_time - span.start_time


@st.composite
def snapshots(draw):
    """Finished requests that came to any of the stamps; two processes' clock readings may be out of order."""
    times = [0] * 7
    times[0] = now = draw(st.integers(1, 10**12))
    for index in range(1, draw(st.integers(0, 5)) + 1):
        now += draw(st.integers(-1000, 10**10))
        times[index] = max(now, 1)
    times[6] = max(now + draw(st.integers(-1000, 10**10)), 1)
    num_tokens = draw(st.integers(1, 5)) if times[4] else 0
    if num_tokens:
        times[5] = times[5] or times[4]
    reason = draw(st.sampled_from(FINISHED_REASONS))
    return replace(SNAPSHOT, stamps=TimelineStamps(*times), num_output_tokens=num_tokens, finished_reason=reason)


@given(snapshots())
def test_phases_lie_end_to_end_from_the_arrival_to_the_end(snapshot):
    stamps = snapshot.stamps
    phases = whole_phases_of(snapshot)
    edges = [stamps.received_ns, *(phase.end_ns for phase in phases)]
    assert [phase.begin_ns for phase in phases] == edges[:-1]
    assert edges == sorted(edges)
    assert edges[-1] >= stamps.end_ns  # past it only where another process's clock reading was
    assert edges[-1] in astuple(stamps)
    assert len({phase.name for phase in phases}) == len(phases)
    num_cut_off = 0 if snapshot.finished_reason in ("stop", "length") else 1
    assert [phase.is_over for phase in phases] == [True] * (len(phases) - num_cut_off) + [False] * num_cut_off


@given(snapshots())
def test_child_spans_add_up_to_the_requests_duration(snapshot):
    root, *children = spans_of(snapshot)
    assert sum(map(duration_ns, children)) == duration_ns(root)
    assert root.parent is None
    assert {child.parent.span_id for child in children} <= {root.context.span_id}
    assert {child.context.trace_id for child in children} <= {root.context.trace_id}
    assert all(root.start_time <= child.start_time <= child.end_time <= root.end_time for child in children)


def test_a_trace_tells_the_request_by_the_names_of_the_conventions():
    root, *children = spans_of(SNAPSHOT)
    assert (root.name, root.kind, root.status.status_code) == ("chat river", SpanKind.SERVER, StatusCode.UNSET)
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.system": "headrace",
        "gen_ai.request.model": "river",
        "gen_ai.response.model": "river",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 21,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.server.time_to_first_token": 0.05,
        "http.route": "/v1/chat/completions",
        "headrace.request.id": "req-seven",
        "headrace.choice": 1,
        "headrace.class": "interactive",
        "headrace.tenant": "mill",
        "headrace.priority": -3,
        "headrace.finish_reason": "stop",
        "headrace.preemptions": 2,
        "headrace.stalls": 0,
    }
    durations = {child.name: duration_ns(child) / MS for child in children}
    assert durations == {"tokenize": 2, "queue": 8, "prefill": 40, "decode": 100, "respond": 1}
    assert {child.kind for child in children} == {SpanKind.INTERNAL}
    assert dict(root.resource.attributes).items() >= {"service.name": "headrace", "service.version": "1.2.3"}.items()


def test_a_span_stands_at_the_time_of_day(monkeypatch):
    """The Unix clock is read anew for each request: it may have been set."""
    monkeypatch.setattr(otlp.time, "monotonic_ns", lambda: 1_200 * MS)
    for unix_ns in (1_800_000_000 * 10**9, 1_700_000_000 * 10**9):
        monkeypatch.setattr(otlp.time, "time_ns", lambda unix_ns=unix_ns: unix_ns)
        root, *_ = spans_of(SNAPSHOT)
        assert (root.start_time, root.end_time) == (unix_ns - 200 * MS, unix_ns - 49 * MS)


def test_completions_are_called_so():
    (root, *_) = spans_of(replace(SNAPSHOT, identity=replace(IDENTITY, api="/v1/completions", model="")))
    assert root.name == "text_completion river"  # the served model where the request names none


def test_stalls_are_events_with_their_cause():
    stalls = (Stall(StallCause.NO_BLOCKS, 1_003 * MS, 300 * MS), Stall(StallCause.SLOW_READER, 1_060 * MS, 2_500 * MS))
    root, *_ = spans_of(replace(SNAPSHOT, stalls=stalls, num_stalls=40))
    assert [(event.name, dict(event.attributes), event.timestamp - root.start_time) for event in root.events] == [
        ("stall", {"headrace.stall.cause": "no_blocks", "headrace.stall.duration": 0.3}, 3 * MS),
        ("stall", {"headrace.stall.cause": "slow_reader", "headrace.stall.duration": 2.5}, 60 * MS),
    ]
    assert root.attributes["headrace.stalls"] == 40


@pytest.mark.parametrize(
    ("num_stamps", "reason", "code", "names"),
    [
        (1, "error", "chat_template_error", ["tokenize"]),
        (3, "deadline", "deadline_exceeded", ["tokenize", "queue"]),
        (4, "error", "execution_failed", ["tokenize", "queue", "prefill"]),
        (6, "error", "worker_lost", ["tokenize", "queue", "prefill", "decode"]),
        (6, "error", "", ["tokenize", "queue", "prefill", "decode"]),
    ],
)
def test_a_failure_is_on_the_request_and_marks_the_phase_that_it_cut_off(num_stamps, reason, code, names):
    fields = ("received_ns", "tokenized_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns")
    stamps = replace(STAMPS, **dict.fromkeys(fields[num_stamps:], 0))
    num_tokens = 21 if num_stamps == 6 else 0
    snapshot = replace(SNAPSHOT, stamps=stamps, finished_reason=reason, error_code=code, num_output_tokens=num_tokens)
    root, *children = spans_of(snapshot)
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, code or "_OTHER")
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert ("gen_ai.server.time_to_first_token" in root.attributes) == (num_stamps == 6)
    assert [child.name for child in children] == names
    assert [child.attributes.get("headrace.phase.cut_off", False) for child in children] == [False] * (len(names) - 1) + [True]
    assert sum(map(duration_ns, children)) == duration_ns(root) == 151 * MS


def test_a_client_that_leaves_is_no_error():
    root, *children = spans_of(replace(SNAPSHOT, finished_reason="abort"))
    assert root.status.status_code is StatusCode.UNSET
    assert "error.type" not in root.attributes
    assert root.attributes["headrace.finish_reason"] == "abort"
    assert children[-1].name == "decode"


def test_a_refused_request_is_one_span_with_the_error(monkeypatch):
    monkeypatch.setattr(otlp.time, "monotonic_ns", lambda: 1_004 * MS)
    exporter = InMemorySpanExporter()
    tracing = tracing_to(exporter)
    tracing.on_accepted(IDENTITY, 1_000 * MS, [1, 2, 3], 0, "salt")
    tracing.on_refused(replace(IDENTITY, traceparent=SAMPLED), 1_000 * MS, [1, 2, 3], "overloaded", "salt")
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.status.status_code, span.attributes["error.type"]) == ("chat river", StatusCode.ERROR, "overloaded")
    assert (duration_ns(span), span.parent.span_id) == (4 * MS, int(SPAN_ID, 16))
    assert span.attributes["headrace.finish_reason"] == "refused"


def test_the_span_is_a_child_of_the_clients():
    root, *children = spans_of(with_context(SAMPLED, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"))
    assert (root.context.trace_id, root.parent.span_id, root.parent.is_remote) == (int(TRACE_ID, 16), int(SPAN_ID, 16), True)
    assert dict(root.context.trace_state) == {"congo": "t61rcWkgMzE", "rojo": "00f067aa0ba902b7"}
    assert {child.context.trace_id for child in children} == {int(TRACE_ID, 16)}


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense",
        SAMPLED.upper(),
        SAMPLED[:-1],
        SAMPLED + "-00",
        "ff" + SAMPLED[2:],
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        SAMPLED * 1000,
        "\x00\udcff",
    ],
)
def test_a_malformed_context_is_as_none(traceparent):
    with structlog.testing.capture_logs() as lines:
        root, *_ = spans_of(with_context(traceparent, "congo=1"))
    assert root.parent is None
    assert root.context.trace_id != int(TRACE_ID, 16)
    assert not root.context.trace_state
    assert lines == []


@pytest.mark.parametrize("tracestate", ["=", "a=1," * 40 + "b=2", "x" * 5000, "a=1,a=2", "é=ü"])
def test_a_malformed_state_is_left_out_and_the_parent_stays(tracestate):
    with structlog.testing.capture_logs() as lines:
        root, *_ = spans_of(with_context(SAMPLED, tracestate))
    assert root.parent.span_id == int(SPAN_ID, 16)
    assert lines == []


def test_the_clients_decision_goes_before_the_ratio():
    assert spans_of(with_context(NOT_SAMPLED, "a=1"), sample_ratio=1.0) == []
    assert len(spans_of(with_context(SAMPLED), sample_ratio=0.0)) == 6


def test_the_ratio_decides_for_requests_without_a_context():
    assert spans_of(*[SNAPSHOT] * 20, sample_ratio=0.0) == []
    random.seed(1)
    spans = spans_of(*[SNAPSHOT] * 300, sample_ratio=0.25)
    assert 45 <= sum(span.kind is SpanKind.SERVER for span in spans) <= 105
    assert len(spans) % 6 == 0  # whole traces


def test_the_environment_names_the_service(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=trial")
    root, *_ = spans_of(SNAPSHOT)
    assert root.resource.attributes["service.name"] == "front"
    assert root.resource.attributes["service.version"] == "1.2.3"
    assert root.resource.attributes["deployment.environment.name"] == "trial"


def test_spans_that_wait_are_bounded_and_whole_traces_are_dropped(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "6")
    exporter = Stuck()
    with structlog.testing.capture_logs() as lines:
        tracing = tracing_to(exporter, max_waiting_spans=20)
        for _ in range(50):
            tracing.on_finished(SNAPSHOT)
        assert exporter.called.wait(60)
        assert (tracing.num_waiting_spans, tracing.num_dropped_spans) == (18, 47 * 6)
        exporter.go.set()
        tracing.close()
    assert (tracing.num_waiting_spans, tracing.num_exported_spans) == (0, 18)
    assert [line["event"] for line in lines] == ["the collector is too slow: traces are dropped", "spans_lost"]
    assert lines[-1]["num_spans"] == 47 * 6


@pytest.mark.parametrize("error", [None, OSError("no route")])
def test_a_failing_export_is_counted_and_logged_once(monkeypatch, error):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "6")
    with structlog.testing.capture_logs() as lines:
        tracing = tracing_to(Refusing(error))
        for _ in range(40):
            tracing.on_finished(SNAPSHOT)
        tracing.close()
    assert (tracing.num_failed_spans, tracing.num_exported_spans, tracing.num_waiting_spans) == (240, 0, 0)
    told = [line for line in lines if line["event"] == "traces do not get through"]
    assert len(told) == (1 if error else 0)  # an exporter that returns has logged by itself
    assert all("no route" in line["reason"] for line in told)
    assert lines[-1] == {
        "event": "spans_lost",
        "component": "tracing",
        "log_level": "warning",
        "num_spans": 240,
        "num_exported": 0,
    }


def test_the_sdks_own_lines_are_one_a_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(otlp.time, "monotonic", lambda: now[0])
    sdk = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with structlog.testing.capture_logs() as lines:
        tracing = tracing_to(InMemorySpanExporter())
        for _ in range(5):
            sdk.warning("Transient error %s encountered", "refused")
            sdk.info("of no interest")
        now[0] += 59
        sdk.error("still")
        now[0] += 1
        sdk.error("again %s", "x" * 1000)
        tracing.close()
    assert [(line["reason"], line["num_withheld_lines"]) for line in lines] == [
        ("Transient error refused encountered", 0),
        ("again " + "x" * 294, 5),
    ]
    assert logging.getLogger("opentelemetry").propagate
    assert logging.getLogger("opentelemetry").handlers == []


def test_closing_does_not_wait_for_a_collector_that_hangs(monkeypatch):
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.01)
    exporter = Stuck()
    tracing = tracing_to(exporter)
    tracing.on_finished(SNAPSHOT)
    tracing.close()
    assert not exporter.go.is_set()
    assert not logging.getLogger("opentelemetry").propagate  # its last words are still kept to one a minute
    assert tracing.num_waiting_spans == 6
    tracing.on_finished(SNAPSHOT)  # after the end: nothing
    tracing.on_refused(IDENTITY, 1, [], "draining", "")
    tracing.close()
    assert tracing.num_waiting_spans == 6
    exporter.go.set()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/otlp/", "https://collector.example/otlp/v1/traces"),
        ("https://collector.example/otlp/v1/traces", "https://collector.example/otlp/v1/traces"),
        ("http://[::1]:4318/v1/traces/", "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_endpoint_is_a_base_or_the_whole_url(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "collector:4318", "grpc://collector:4317", "http://", "http:///v1/traces", "http://host:port", "http://host:0"),
        *(
            "http://ho st",
            "http://[::1",
            "http://host/\n",
            "https://me:secret@host",
            "https://host/?key=secret",
            "http://h/#secret",
        ),
    ],
)
def test_an_endpoint_that_is_no_plain_url_is_refused_without_repeating_it(endpoint):
    with pytest.raises(ConfigurationError) as refusal:
        open_tracing(endpoint, 1.0, "headrace", "1", "river")
    assert "OTLP endpoint" in refusal.value.message
    assert "secret" not in refusal.value.message


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        open_tracing("http://127.0.0.1:4318", ratio, "headrace", "1", "river")


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "headrace.telemetry.otlp")
    monkeypatch.delattr("headrace.telemetry.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=re.escape("install the extra otel (in a checkout: pip install -e '.[otel]')")):
        open_tracing("http://127.0.0.1:4318", 1.0, "headrace", "1", "river")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),  # less than a batch
    ],
)
def test_variables_that_cannot_work_are_told_at_the_start(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match="OTEL_"):
        open_tracing("http://127.0.0.1:4318", 1.0, "headrace", "1", "river")

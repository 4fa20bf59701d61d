"""Spans of requests, built from their timelines and sent by OTLP/HTTP: the one home of opentelemetry.

Owns: what a request's trace looks like, the bound on spans that wait, how faults of the export are told. Runs in: gateway:
spans are built on the event loop, and sent by a thread of the SDK. Must not know: HTTP surfaces, how timelines are made.
Names are those of the OpenTelemetry semantic conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/)
where they have one, and headrace.* otherwise. No text of a request is ever in a span.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headrace.protocol.errors import ConfigurationError
from headrace.telemetry.logs import get_logger
from headrace.telemetry.otlp_session import open_session
from headrace.telemetry.reports import phases_of
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot

PROVIDER = "headrace"
MAX_WAITING_SPANS = 2048  # the SDK's default; OTEL_BSP_MAX_QUEUE_SIZE sets it
FLUSH_SECONDS = 2.0  # at the end, for the spans that still wait
SECONDS_BETWEEN_LINES = 60.0
_PHASES = ("tokenize", "queue", "prefill", "decode")
_LAST_PHASE = "respond"  # from the last token until the end, where that did not come with it
_COMPLETED = frozenset({"stop", "length"})
_NS_PER_SECOND = 1e9
_MAX_REASON_CHARACTERS = 300
_NO_CONTEXT = Context()


class Phase(NamedTuple):
    """One child span. Monotonic nanoseconds. `is_over`: False when the request ended within it."""

    name: str
    begin_ns: int
    end_ns: int
    is_over: bool


def whole_phases_of(snapshot: TimelineSnapshot) -> list[Phase]:
    """The phases from the arrival to the end of a finished request, without gaps: they add up to its duration.

    What follows the last token is "respond" where the generation completed; else the phase that was cut off lasts to the end.
    """
    phases = [Phase(*phase, is_over=True) for phase in phases_of(snapshot)]
    begin_ns = phases[-1].end_ns if phases else snapshot.stamps.received_ns
    end_ns = max(snapshot.stamps.end_ns, begin_ns)
    if snapshot.finished_reason in _COMPLETED:
        if end_ns > begin_ns:
            phases.append(Phase(_LAST_PHASE, begin_ns, end_ns, is_over=True))
    elif len(phases) < len(_PHASES):
        phases.append(Phase(_PHASES[len(phases)], begin_ns, end_ns, is_over=False))
    else:
        phases[-1] = phases[-1]._replace(end_ns=end_ns, is_over=False)
    return phases


def open_export(url: str, sample_ratio: float, service_name: str, service_version: str, model: str) -> "Tracing":
    """A Tracing that posts to `url`. What OTEL_* variables say of headers, certificates, time-outs, batches and the resource
    is followed. Raises ConfigurationError for variables that cannot work.
    """
    max_waiting = _positive_number("OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING_SPANS)
    try:
        exporter = OTLPSpanExporter(endpoint=url, session=open_session())
        return Tracing(exporter, sample_ratio, service_name, service_version, model, max_waiting)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"Traces cannot be exported: {error} (an OTEL_* variable of the environment?)") from error


class Tracing:
    """A RequestListener: one trace for each request that is sampled. No method waits, but for close()."""

    def __init__(
        self,
        exporter: SpanExporter,
        sample_ratio: float,
        service_name: str,
        service_version: str,
        model: str,
        max_waiting_spans: int = MAX_WAITING_SPANS,
    ) -> None:
        self._model = model
        self._max_waiting_spans = max_waiting_spans
        self._ledger = _Ledger(exporter)
        processor = BatchSpanProcessor(self._ledger, max_queue_size=max_waiting_spans)
        named = {"service.name": service_name, "service.version": service_version}
        self._provider = TracerProvider(
            sampler=ParentBased(root=TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({**named, **OTELResourceDetector().detect().attributes}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace", service_version)
        self._propagator = TraceContextTextMapPropagator()
        self._is_closed = False
        self._num_handed_over = 0
        self.num_dropped_spans = 0  # for want of room
        self._rare_log = _RareLog()
        self._rare_log.adopt_sdk()

    @property
    def num_exported_spans(self) -> int:
        """That the collector took."""
        return self._ledger.num_exported

    @property
    def num_failed_spans(self) -> int:
        """That the collector did not take, or that could not be sent to it."""
        return self._ledger.num_failed

    @property
    def num_waiting_spans(self) -> int:
        """Built, and not yet taken or given up."""
        return self._num_handed_over - self._ledger.num_exported - self._ledger.num_failed

    def on_accepted(
        self, identity: RequestIdentity, arrival_ns: int, prompt_token_ids: Sequence[int], deadline_ns: int, cache_salt: str
    ) -> None:
        """Nothing: a trace is built when all is known."""

    def on_refused(
        self, identity: RequestIdentity, arrival_ns: int, prompt_token_ids: Sequence[int], error_code: str, cache_salt: str
    ) -> None:
        """One span with the error."""
        now_ns = time.monotonic_ns()
        to_unix_ns = time.time_ns() - now_ns
        root = self._begin(identity, arrival_ns + to_unix_ns)
        if root is None or not self._take_room(1):
            return
        root.set_attributes(self._request(identity))
        root.set_attribute("headrace.finish_reason", "refused")
        _fail(root, error_code)
        root.end(max(now_ns, arrival_ns) + to_unix_ns)

    def on_finished(self, snapshot: TimelineSnapshot) -> None:
        """One span, a child of the client's where that sent a context, with a child for each phase."""
        to_unix_ns = time.time_ns() - time.monotonic_ns()  # anew each time: the Unix clock may be set
        began_ns = snapshot.stamps.received_ns
        root = self._begin(snapshot.identity, began_ns + to_unix_ns)
        if root is None:
            return
        phases = whole_phases_of(snapshot)
        if not self._take_room(1 + len(phases)):
            return
        root.set_attributes(self._request(snapshot.identity))
        root.set_attributes(_outcome(snapshot))
        for stall in snapshot.stalls:
            told: dict[str, AttributeValue] = {
                "headrace.stall.cause": stall.cause.value,
                "headrace.stall.duration": stall.duration_ns / _NS_PER_SECOND,
            }
            root.add_event("stall", told, stall.began_ns + to_unix_ns)
        context = set_span_in_context(root, _NO_CONTEXT)
        for phase in phases:
            child = self._tracer.start_span(phase.name, context, start_time=phase.begin_ns + to_unix_ns)
            if not phase.is_over:
                child.set_attribute("headrace.phase.cut_off", True)
            child.end(phase.end_ns + to_unix_ns)
        if snapshot.error_code or snapshot.finished_reason == "error":
            _fail(root, snapshot.error_code)
        root.end((phases[-1].end_ns if phases else began_ns) + to_unix_ns)

    def close(self) -> None:
        """Send what waits, for at most FLUSH_SECONDS; tell how many spans never got through. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        # The SDK's own time limit is longer. All its threads are daemons: they hold up no exit.
        flushing = threading.Thread(target=self._provider.shutdown, name="flush-traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if not flushing.is_alive():  # else the SDK has more to say
            self._rare_log.release_sdk()
        num_lost = self.num_dropped_spans + self.num_failed_spans + self.num_waiting_spans
        if num_lost:
            get_logger("tracing").warning("spans_lost", num_spans=num_lost, num_exported=self.num_exported_spans)

    def _begin(self, identity: RequestIdentity, unix_ns: int) -> Span | None:
        """The request's span; None when it is not sampled."""
        if self._is_closed:
            return None
        name = f"{_operation_of(identity)} {identity.model or self._model}"
        context = self._context_of_client(identity) if identity.traceparent else _NO_CONTEXT
        root = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=unix_ns)
        return root if root.is_recording() else None

    def _take_room(self, num_spans: int) -> bool:
        """Whether so many spans may wait as well. If not, the whole trace goes: a span that is never ended is not exported."""
        if self.num_waiting_spans + num_spans <= self._max_waiting_spans:
            self._num_handed_over += num_spans
            return True
        self.num_dropped_spans += num_spans
        self._rare_log.say("the collector is too slow: traces are dropped", num_dropped_spans=self.num_dropped_spans)
        return False

    def _request(self, identity: RequestIdentity) -> dict[str, AttributeValue]:
        model = identity.model or self._model
        return {
            "gen_ai.operation.name": _operation_of(identity),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.system": PROVIDER,  # the name before semantic conventions 1.37
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": identity.max_tokens,
            "gen_ai.usage.input_tokens": identity.num_prompt_tokens,
            "http.route": identity.api,
            "headrace.request.id": identity.client_request_id or str(identity.request_id),
            "headrace.choice": identity.choice_index,
            "headrace.class": identity.service_class,
            "headrace.tenant": identity.tenant,
            "headrace.priority": identity.priority,
        }

    def _context_of_client(self, identity: RequestIdentity) -> Context:
        """W3C Trace Context (https://www.w3.org/TR/trace-context/). What is malformed counts as not sent."""
        carrier = {"traceparent": identity.traceparent}
        context = self._propagator.extract(carrier, _NO_CONTEXT)
        if identity.tracestate and get_current_span(context).get_span_context().trace_flags.sampled:
            # Only now: a long one takes a while, and spans alone carry it.
            context = self._propagator.extract({**carrier, "tracestate": identity.tracestate}, _NO_CONTEXT)
        return context


def _operation_of(identity: RequestIdentity) -> str:
    return "chat" if "chat" in identity.api else "text_completion"


def _outcome(snapshot: TimelineSnapshot) -> dict[str, AttributeValue]:
    stamps = snapshot.stamps
    found: dict[str, AttributeValue] = {
        "gen_ai.usage.output_tokens": snapshot.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": snapshot.num_cached_tokens,
        "headrace.finish_reason": snapshot.finished_reason,
        "headrace.preemptions": snapshot.num_preemptions,
        "headrace.stalls": snapshot.num_stalls,
    }
    if snapshot.finished_reason in _COMPLETED:
        found["gen_ai.response.finish_reasons"] = (snapshot.finished_reason,)
    if stamps.first_token_ns:
        # The conventions have this name for a server's metric, and none for a server's span.
        ttft_ns = max(stamps.first_token_ns - stamps.received_ns, 0)
        found["gen_ai.server.time_to_first_token"] = ttft_ns / _NS_PER_SECOND
    return found


def _fail(span: Span, error_code: str) -> None:
    span.set_attribute("error.type", error_code or "_OTHER")
    span.set_status(StatusCode.ERROR)


def _positive_number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "").strip()
    if not value:
        return default
    if not value.isdecimal() or not int(value):
        raise ConfigurationError(f"{variable} must be a whole number above 0.")
    return int(value)


class _Ledger(SpanExporter):
    """Hands spans on and counts them. Written by the SDK's thread only."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_exported = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _RareLog(logging.Handler):
    """Faults of the export as lines of the log, one a minute at most; takes in what the SDK logs of its own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = get_logger("tracing")
        self._next_seconds = 0.0
        self._num_withheld = 0
        self._sdk = logging.getLogger("opentelemetry")

    def adopt_sdk(self) -> None:
        """The SDK's lines come here, and not to the log directly."""
        self._sdk.addHandler(self)
        self._sdk.propagate = False

    def release_sdk(self) -> None:
        """The opposite."""
        self._sdk.removeHandler(self)
        self._sdk.propagate = not self._sdk.handlers

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("opentelemetry.trace"):
            return  # on a malformed context: clients could fill the log, or keep other lines out of it
        reason = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            reason += f" {record.exc_info[1]!r}"
        self.say("traces do not get through", reason=reason[:_MAX_REASON_CHARACTERS])

    def say(self, what: str, **fields: str | int) -> None:
        """Write the line, or count it."""
        now = time.monotonic()
        with self.lock:  # type: ignore[union-attr]  # made by logging.Handler; reentrant
            if now < self._next_seconds:
                self._num_withheld += 1
                return
            self._next_seconds = now + SECONDS_BETWEEN_LINES
            num_withheld, self._num_withheld = self._num_withheld, 0
        self._log.warning(what, num_withheld_lines=num_withheld, **fields)

"""What is told of requests: who they are, where they stand, and what they wait for.

Owns: RequestTracker. Runs in: gateway, on the event loop. Must not know: rings, HTTP, how a request is carried out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.gateway.deltas import CallOutline, GenerationSpec, ModelCard, RequestOrigin
from headrace.gateway.stream import RequestStream
from headrace.gateway.worker_view import WorkerView
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.ports import Clock
from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import OTHER_TENANT
from headrace.telemetry.journal import Journal
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.reports import DebugRequests, RequestReport, report_of
from headrace.telemetry.snapshot import RequestIdentity
from headrace.telemetry.timeline import RequestTimeline


class RequestTracker:
    """Makes the timeline of each request, hands it to the journal, and reports on it."""

    def __init__(
        self,
        card: ModelCard,
        meters: GatewayMeters,
        journal: Journal,
        worker: WorkerView,
        clock: Clock,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`wall_ns`: Unix time, for people to read."""
        self._model = card.id
        self._meters = meters
        self._journal = journal
        self._worker = worker
        self._clock = clock
        self._wall_ns = wall_ns
        self._class_names = frozenset(meters.traffic.class_names)
        self._tenant_names = frozenset(meters.traffic.tenant_names)

    def identify(self, spec: GenerationSpec, request_id: int) -> RequestIdentity:
        """Who asks what. Classes and tenants are those of the configuration, whatever the request says."""
        return self._identity(spec, spec.origin, request_id, len(spec.prompt_token_ids), spec.stopping.max_tokens)

    def accept(
        self, identity: RequestIdentity, spec: GenerationSpec, request: GenerationRequest, now_ns: int
    ) -> RequestTimeline:
        """The request is on the ring."""
        timeline = self._meters.start_request(identity, request.arrival_ns, spec.origin.tokenized_ns, now_ns)
        self._journal.accepted(identity, request.arrival_ns, request.prompt_token_ids, request.deadline_ns, request.cache_salt)
        return timeline

    def refuse(self, spec: GenerationSpec, error: RequestError) -> None:
        """The request was turned away."""
        arrival_ns = spec.origin.received_ns or self._clock.now_ns()
        code = error.code.value.code
        self._journal.refused(self.identify(spec, 0), arrival_ns, spec.prompt_token_ids, code, spec.cache_salt)

    def refuse_call(self, call: CallOutline, num_prompt_tokens: int, error: RequestError) -> None:
        """A call was turned away before its prompts were tokenized. `num_prompt_tokens`: about, of all its sequences."""
        arrival_ns = call.origin.received_ns or self._clock.now_ns()
        length = max(1, num_prompt_tokens // call.num_sequences)
        for index in range(call.num_sequences):
            identity = self._identity(call, replace(call.origin, choice_index=index), 0, length, call.max_tokens)
            self._journal.refused(identity, arrival_ns, (), error.code.value.code, "")

    def close(self, stream: RequestStream) -> None:
        """The request has ended."""
        self._journal.finished(stream.timeline, stream.prompt_text)

    def waiting_cause(self) -> StallCause:
        """What keeps requests from their first step now, as far as the status page can be read."""
        try:
            return self._worker.blocked_by()
        except Exception as error:  # noqa: BLE001 - what is told of a request must not fail it
            self._meters.faults.note("waiting_cause", error)
            return StallCause.WORKER_BUSY

    def report(self, stream: RequestStream, *, runs: bool = False) -> RequestReport:
        """The stream's timeline as known now. `runs`: it is known that the worker has let it in, if it lives."""
        now_ns = self._clock.now_ns()
        snapshot = stream.timeline.snapshot()
        if runs and snapshot.state == "queued":
            snapshot = replace(snapshot, state="prefill")
        waiting_for = self._waiting_for(stream, snapshot.state, now_ns)
        return report_of(snapshot, now_ns, self._wall_ns() - now_ns, waiting_for)

    def debug_requests(self, streams: Sequence[RequestStream], limit: int) -> DebugRequests:
        """`streams`: those that have not ended, the oldest first."""
        now_ns = self._clock.now_ns()
        to_unix_ns = self._wall_ns() - now_ns
        all_run = self._all_run(len(streams))
        return DebugRequests(
            live=[self.report(stream, runs=all_run) for stream in streams[:limit]],
            num_live=len(streams),
            finished=[report_of(snapshot, now_ns, to_unix_ns) for snapshot in self._journal.recent(limit)],
        )

    def _all_run(self, num_streams: int) -> bool:
        """True when the worker runs as many as there are: then one without a token is in its prefill, not in the queue."""
        try:
            return self._worker.num_running() >= num_streams
        except Exception as error:  # noqa: BLE001 - as in waiting_cause
            self._meters.faults.note("all_run", error)
            return False

    def _waiting_for(self, stream: RequestStream, state: str, now_ns: int) -> str | None:
        """Of a live request that does not get on: the cause; None for one that gets on or has ended."""
        timeline, threshold_ns = stream.timeline, self._meters.stall_threshold_ns
        if stream.unread_ns(now_ns) >= threshold_ns:
            return StallCause.SLOW_READER.value
        if state == "preempted":
            return StallCause.PREEMPTED.value
        if state == "queued":
            return self.waiting_cause().value
        if state == "decode" and now_ns - timeline.last_progress_ns >= threshold_ns:
            return StallCause.SLOW_STEP.value
        return None

    def _identity(
        self,
        asked: GenerationSpec | CallOutline,
        origin: RequestOrigin,
        request_id: int,
        num_prompt_tokens: int,
        max_tokens: int,
    ) -> RequestIdentity:
        known_class = asked.service_class in self._class_names
        return RequestIdentity(
            request_id=request_id,
            client_request_id=origin.client_request_id,
            choice_index=origin.choice_index,
            api=origin.api,
            model=self._model,
            service_class=asked.service_class if known_class else self._meters.traffic.default_class,
            tenant=asked.tenant_id if asked.tenant_id in self._tenant_names else OTHER_TENANT,
            priority=asked.priority,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            traceparent=origin.traceparent,
            tracestate=origin.tracestate,
        )

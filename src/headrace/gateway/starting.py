"""From an admitted call to its streams: a number, a request on the ring, a timeline and a stream for each sequence, or nothing.

Owns: RequestStarter, the ids of requests. Runs in: gateway, on the event loop. Must not know: HTTP, shared memory.
"""

from collections.abc import Sequence

from headrace.gateway.admission import Permit
from headrace.gateway.deltas import CallOutline, GenerationSpec
from headrace.gateway.demux import Demultiplexer
from headrace.gateway.door import Door
from headrace.gateway.outbound import Outbound
from headrace.gateway.stream import RequestStream, StreamOwner, TokenText
from headrace.gateway.tracking import RequestTracker
from headrace.ipc.ring import RecordTooLarge
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import GenerationRequest
from headrace.telemetry.snapshot import RequestIdentity
from headrace.text.tokenizer import TextTokenizer

INCARNATION_SHIFT = 40  # a gateway process has ids for 2**40 requests; the bits above say which process it is
DEADLINE_NONE = 0
MAX_LOGGED_PROMPT_TOKENS = 512  # of each prompt, where the operator wants prompts in the log


class RequestStarter:
    """Starts all sequences of a call or none. `next_request_id`: ids below it are taken."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        door: Door,
        outbound: Outbound,
        tracker: RequestTracker,
        demux: Demultiplexer,
        *,
        reply_ring: int,
        incarnation: int,
        log_prompts: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._door = door
        self._outbound = outbound
        self._tracker = tracker
        self._demux = demux
        self._reply_ring = reply_ring
        self._log_prompts = log_prompts
        self.next_request_id = incarnation << INCARNATION_SHIFT

    def start_call(
        self, specs: Sequence[GenerationSpec], call: CallOutline | None, owner: StreamOwner, epoch: int, now_ns: int
    ) -> list[RequestStream]:
        """`epoch`: of the worker that gets them. Raises RequestError; what had started by then is cancelled."""
        streams: list[RequestStream] = []
        permits = self._door.admit(specs, now_ns, call)
        try:
            for spec, permit in zip(specs, permits, strict=True):
                streams.append(self._start(spec, permit, owner, epoch, now_ns))
        except Exception:
            for unused in permits[len(streams) :]:
                unused.release(now_ns, completed=False)
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def _start(self, spec: GenerationSpec, permit: Permit, owner: StreamOwner, epoch: int, now_ns: int) -> RequestStream:
        identity = self._tracker.identify(spec, self.next_request_id)
        request = _request_of(spec, identity, spec.origin.received_ns or now_ns, self._reply_ring)
        text = TokenText(self._tokenizer, spec)
        shown = _beginning_of(self._tokenizer, spec) if self._log_prompts else ""
        try:
            is_taken = self._outbound.offer(request)
        except RecordTooLarge:
            raise RequestError("The request is too large.", code=ErrorCode.CONTENT_TOO_LARGE) from None
        if not is_taken:
            raise self._door.refusal("The queue to the model is full.", now_ns)
        self.next_request_id += 1
        timeline = self._tracker.accept(identity, spec, request, now_ns)
        stream = RequestStream(request.request_id, epoch, spec, text, permit, timeline, owner, shown)
        self._demux.open(stream)
        return stream


def _request_of(spec: GenerationSpec, identity: RequestIdentity, arrival_ns: int, reply_ring: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=identity.request_id,
        tenant_id=identity.tenant,
        priority=spec.priority,
        prompt_token_ids=spec.prompt_token_ids,
        sampling=spec.sampling,
        stopping=spec.stopping,
        arrival_ns=arrival_ns,
        deadline_ns=arrival_ns + spec.timeout_ns if spec.timeout_ns else DEADLINE_NONE,
        cache_salt=spec.cache_salt,
        reply_ring=reply_ring,
        model_id=identity.model,
        service_class=identity.service_class,
    )


def _beginning_of(tokenizer: TextTokenizer, spec: GenerationSpec) -> str:
    """Of the prompt's text, for the log of an operator who wants prompts in it."""
    return tokenizer.decode(spec.prompt_token_ids[:MAX_LOGGED_PROMPT_TOKENS], skip_special_tokens=False)

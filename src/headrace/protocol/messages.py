"""What travels between gateway and worker, as msgspec structs (MessagePack arrays on the rings).

Owns: the wire format. Runs in: gateway and worker. Must not know: how the bytes are carried.
Times are CLOCK_MONOTONIC nanoseconds: one clock for all processes of a machine.
"""

import msgspec

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.stalls import Stall


class GenerationRequest(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """One sequence to generate. Valid by construction: the gateway has checked every field against WorkerHello's limits.

    `request_id` is the gateway's own number, unique over gateways and their restarts; the client's id never is a key.
    """

    request_id: int
    tenant_id: str
    priority: int  # lower first
    prompt_token_ids: list[int]  # at least one
    sampling: SamplingParams
    stopping: StopConditions
    arrival_ns: int
    deadline_ns: int  # 0: none
    cache_salt: str  # "" shares the prefix cache with everybody
    reply_ring: int  # index of the gateway that waits for the events
    model_id: str
    service_class: str = "standard"  # a name of the TrafficPolicy


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop a request. Unknown and finished ids are fine: cancellation races with the end."""

    request_id: int


class GatewayHello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """First record of a new gateway process: what an earlier one on the same ring left running must be cancelled."""

    reply_ring: int
    first_request_id: int  # requests of this ring below it belong to the earlier process


GatewayMessage = GenerationRequest | CancelRequest | GatewayHello


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a request consumed. `num_cached_tokens`: prompt tokens found in the prefix cache when it was first scheduled."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, or its end, or both. The last event of a request, and only it, has a finish_reason.

    `first_index` counts output tokens from 0: it continues where the event before ended, so loss can be seen.
    """

    request_id: int
    first_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error_code: str = ""  # an ErrorCode's wire code, with FinishReason.ERROR
    error_message: str = ""
    usage: Usage | None = None  # with the last event, and with the first that carries a token (as far as known)
    first_scheduled_ns: int = 0  # with the first event that carries a token: when it left the queue
    stalls: tuple[Stall, ...] = ()  # waits that ended with this event's token, or that the end cut off
    is_preempted: bool = False  # its memory was taken just now; such an event has neither tokens nor an end


class EventBatch(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """All events of one step for one gateway. `emitted_ns`: when the step's tokens were known."""

    epoch: int  # which life of the worker; events of an earlier one are stale
    emitted_ns: int
    events: list[TokenEvent]


class WorkerLimits(msgspec.Struct, frozen=True, array_like=True):
    """What a request may ask of this worker: min(context, KV pool) decides what can ever fit."""

    vocab_size: int  # true vocabulary, without padding rows
    max_model_len: int  # most tokens (prompt + output) of one sequence: context and pool both considered
    max_num_seqs: int
    num_blocks: int
    block_size: int


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """First record of a worker's life on each event ring: the model is loaded and requests are welcome."""

    epoch: int
    model_id: str
    limits: WorkerLimits


WorkerMessage = EventBatch | WorkerHello

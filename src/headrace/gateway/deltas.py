"""The types between the generation service and the API surfaces.

Owns: GenerationSpec (in), TextDelta (out), ModelCard. Runs in: gateway. Must not know: HTTP, rings.
"""

from dataclasses import dataclass, field

from headrace.protocol.errors import RequestError
from headrace.protocol.manifest import GenerationDefaults
from headrace.protocol.messages import Usage
from headrace.protocol.sampling import SamplingParams, StopConditions


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """Where a sequence comes from: for timelines, logs and traces; nothing of it changes what is generated.

    Times are CLOCK_MONOTONIC nanoseconds; 0: not known, the moment of submit counts.
    """

    client_request_id: str = ""  # x-request-id as answered; never a key
    choice_index: int = 0  # of the choices of one call
    received_ns: int = 0  # the request's headers were there
    tokenized_ns: int = 0  # body read, checked, rendered and tokenized
    traceparent: str = ""  # W3C trace context as the client sent it, unchecked
    tracestate: str = ""
    api: str = ""  # the route's template
    digest: bytes = b""  # of the whole call: who sends it again is known by it; b"": unknown


NO_ORIGIN = RequestOrigin()


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One sequence to generate, valid by construction: the surface that made it has checked every field."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    stopping: StopConditions
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    continues_text: bool = False  # the output goes on from shown text: a SentencePiece model's first space is kept
    tenant_id: str = "default"
    priority: int = 0
    cache_salt: str = ""
    service_class: str = "standard"
    timeout_ns: int = 0  # from arrival to the last token; 0: none
    origin: RequestOrigin = NO_ORIGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutline:
    """What is known of a call before its prompts are tokenized: enough to turn it away. Sums are over all its sequences."""

    service_class: str = "standard"
    tenant_id: str = "default"
    priority: int = 0
    num_sequences: int = 1  # prompts times answers
    num_chars: int = 0  # of prompts that are text
    num_token_ids: int = 0  # of prompts that are ids
    max_tokens: int = 1  # of each sequence, as far as it was said
    timeout_ns: int = 0  # 0: none
    origin: RequestOrigin = NO_ORIGIN


@dataclass(slots=True)
class TextDelta:
    """Text of one sequence since the delta before. The last delta, and only it, has finish_reason or error.

    A consumer that lags gets one merged delta. `num_tokens` counts the output tokens behind `text`.
    """

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None  # "stop" or "length"
    stop_string: str | None = None  # the stop string that ended it, if one did
    usage: Usage | None = None  # with the last delta
    error: RequestError | None = None  # with the last delta, instead of a finish_reason


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the surfaces say and need to know of the served model, from the prepared folder's manifest."""

    id: str
    created: int  # Unix seconds
    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    add_bos_token: bool
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

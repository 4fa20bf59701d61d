"""From the fields of a request body to sampling parameters and stop conditions.

Owns: defaults and the checks that need the model's limits. Runs in: gateway. Must not know: HTTP, JSON.
"""

import hashlib
import secrets
from dataclasses import dataclass, replace

import msgspec

from headrace.gateway.deltas import CallOutline, GenerationSpec, ModelCard, RequestOrigin
from headrace.gateway.http.schemas import GenerationFields
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.traffic import Routing
from headrace.gateway.http.unsupported import not_implemented
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import WorkerLimits
from headrace.protocol.sampling import MAX_SEED, SamplingParams, StopConditions

MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
MAX_TOP_K = 2**31 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TOKEN_ID_DIGITS = 12
MAX_LOGIT_BIASES = 1024


@dataclass(frozen=True, slots=True)
class StreamWish:
    """How the answer is to be sent."""

    stream: bool
    include_usage: bool
    include_timeline: bool = False


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How many tokens were asked for, in which field. `default` None: all that fit. `allow_zero`: only the prompt."""

    asked: int | None
    default: int | None
    param: str = "max_tokens"
    prompt_param: str = "prompt"
    allow_zero: bool = False


def stream_wish(fields: GenerationFields, timeline: bool = False) -> StreamWish:
    """Raise RequestError for stream_options without stream; null and {} ask for nothing. `timeline`: a header asks for it."""
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError("stream_options may be given only when stream is true.", param="stream_options")
    if options is not None and options.continuous_usage_stats:
        raise not_implemented("stream_options.continuous_usage_stats")
    return StreamWish(
        stream=bool(fields.stream),
        include_usage=bool(options and options.include_usage),
        include_timeline=timeline or bool(options and options.include_timeline),
    )


def choice_count(fields: GenerationFields, settings: HttpSettings) -> int:
    """`n`, within its bounds."""
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= settings.max_choices:
        raise RequestError(f"n must lie between 1 and {settings.max_choices}.", param="n")
    return count


def choice_seed(seed: int | None, choice: int) -> int:
    """The seed of answer `choice` (from 0). A given seed is the first answer's own; the others' are hashed from it.

    Answer k > 0 takes the first 8 bytes of BLAKE2b over "<seed>/<k>" as a big-endian number, modulo 2**63: distinct answers
    that anyone can ask for again one by one. Without a seed each answer draws its own.
    """
    if seed is None:
        return secrets.randbits(63)
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, choice), digest_size=8).digest(), "big") & MAX_SEED


def check_model(name: str | None, card: ModelCard) -> None:
    """Raise RequestError MODEL_NOT_FOUND unless the served model is meant."""
    if name is not None and name != card.id:
        message = f"There is no model of that name here; this server serves {card.id}."
        raise RequestError(message, code=ErrorCode.MODEL_NOT_FOUND, param="model")


def outline_of(
    fields: GenerationFields,
    output: OutputLimit,
    routing: Routing,
    origin: RequestOrigin,
    *,
    num_sequences: int,
    num_chars: int,
    num_token_ids: int = 0,
) -> CallOutline:
    """What admission is told before anything is tokenized. Characters and ids: of the prompts of all sequences."""
    asked = output.asked if output.asked is not None else output.default
    return CallOutline(
        service_class=routing.service_class,
        tenant_id=routing.tenant_id,
        priority=_priority(fields.priority),
        num_sequences=num_sequences,
        num_chars=num_chars,
        num_token_ids=num_token_ids,
        max_tokens=max(1, asked or 1),
        timeout_ns=routing.timeout_ns,
        origin=origin,
    )


def make_specs(
    fields: GenerationFields,
    prompts: list[list[int]],
    output: OutputLimit,
    *,
    card: ModelCard,
    limits: WorkerLimits,
    settings: HttpSettings,
    continues_text: bool,
    routing: Routing,
    origin: RequestOrigin,
) -> list[GenerationSpec]:
    """One specification for each choice: prompts outside, answers inside. `continues_text`: see GenerationSpec.

    Raises RequestError naming the first field at fault; a prompt of several is named by its index.
    """
    count = choice_count(fields, settings)
    if len(prompts) * count > settings.max_sequences:
        message = f"Prompts times n is {len(prompts) * count}; at most {settings.max_sequences} are taken in one request."
        raise RequestError(message, param="n")
    sampling = _sampling(fields, card, limits)
    stop_strings = _stop_strings(fields.stop, settings)
    priority = _priority(fields.priority)
    cache_salt = _cache_salt(fields.cache_salt)
    specs = []
    for number, prompt in enumerate(prompts):
        where = ""
        if len(prompts) > 1:
            where, output = f"Prompt {number}: ", replace(output, prompt_param=f"prompt[{number}]")
        stopping = _stopping(fields, _max_tokens(len(prompt), output, limits, where), output, limits)
        specs += [
            GenerationSpec(
                prompt_token_ids=prompt,
                sampling=msgspec.structs.replace(sampling, seed=choice_seed(fields.seed, choice)),
                stopping=stopping,
                stop_strings=stop_strings,
                include_stop_string=bool(fields.include_stop_str_in_output),
                skip_special_tokens=fields.skip_special_tokens is not False,
                continues_text=continues_text,
                tenant_id=routing.tenant_id,
                priority=priority,
                cache_salt=cache_salt,
                service_class=routing.service_class,
                timeout_ns=routing.timeout_ns,
                origin=replace(origin, choice_index=number * count + choice),
            )
            for choice in range(count)
        ]
    return specs


def _sampling(fields: GenerationFields, card: ModelCard, limits: WorkerLimits) -> SamplingParams:
    """Request, else the model author's defaults, else the API's."""
    own = card.defaults

    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    top_k = int(first(fields.top_k, own.top_k, 0))
    params = SamplingParams(
        temperature=first(fields.temperature, own.temperature, 1.0),
        top_p=first(fields.top_p, own.top_p, 1.0),
        top_k=0 if top_k == -1 else top_k,
        min_p=first(fields.min_p, own.min_p, 0.0),
        seed=0 if fields.seed is None else fields.seed,
        repetition_penalty=first(fields.repetition_penalty, own.repetition_penalty, 1.0),
        presence_penalty=first(fields.presence_penalty, 0.0),
        frequency_penalty=first(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields.logit_bias),
    )
    if params.top_k > MAX_TOP_K:
        raise RequestError(f"top_k must be at most {MAX_TOP_K}.", param="top_k")
    params.validate(limits.vocab_size)
    return params


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_LOGIT_BIASES:
        raise RequestError(f"At most {MAX_LOGIT_BIASES} entries are taken.", param="logit_bias")
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS):
            raise RequestError("The keys of logit_bias must be token ids.", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _stop_strings(stop: str | list[str] | None, settings: HttpSettings) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > settings.max_stop_strings:
        raise RequestError(f"At most {settings.max_stop_strings} stop strings are taken.", param="stop")
    for string in strings:
        if not string:
            raise RequestError("A stop string must not be empty; leave stop out, or make it null or [].", param="stop")
        if len(string) > settings.max_stop_string_chars:
            message = f"A stop string may have at most {settings.max_stop_string_chars} characters."
            raise RequestError(message, param="stop")
    return strings


def _stopping(fields: GenerationFields, max_tokens: int, output: OutputLimit, limits: WorkerLimits) -> StopConditions:
    token_ids = tuple(fields.stop_token_ids or ())
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"At most {MAX_STOP_TOKEN_IDS} stop_token_ids are taken.", param="stop_token_ids")
    stopping = StopConditions(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=token_ids,
        ignore_eos=bool(fields.ignore_eos),
    )
    if max_tokens == 0 and stopping.min_tokens == 0 and output.allow_zero:
        return stopping
    if max_tokens < 1:
        raise RequestError(f"{output.param} must be at least 1.", param=output.param)
    stopping.validate(limits.vocab_size)
    return stopping


def _max_tokens(num_prompt_tokens: int, output: OutputLimit, limits: WorkerLimits, where: str) -> int:
    """Most output tokens. Raises RequestError CONTEXT_LENGTH_EXCEEDED when they do not fit behind the prompt."""
    asked = output.asked
    room = limits.max_model_len - num_prompt_tokens
    if asked is None and room >= 1:
        return room if output.default is None else min(output.default, room)
    if asked is not None and (asked <= room or asked < 1 <= room):
        return asked
    shown = "at least 1" if asked is None or asked < 1 else str(asked) if asked < 10**18 else "far too many"
    message = (
        f"{where}The context holds {limits.max_model_len} tokens, prompt and output together. The prompt has "
        f"{num_prompt_tokens} tokens and {shown} output tokens were asked for; {max(room, 0)} fit."
    )
    param = output.prompt_param if room < 1 else output.param
    raise RequestError(message, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, param=param)


def _priority(value: int | None) -> int:
    if value is not None and not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise RequestError(f"priority must lie between {MIN_PRIORITY} and {MAX_PRIORITY}.", param="priority")
    return value or 0


def _cache_salt(salt: str | None) -> str:
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise RequestError(f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters.", param="cache_salt")
    return salt or ""

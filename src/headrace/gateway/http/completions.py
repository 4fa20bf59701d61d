"""POST /v1/completions.

Owns: the endpoint, and the four forms of a prompt. Runs in: gateway. Must not know: sampling ranges, framing.
"""

import secrets
import time

from headrace.gateway.deltas import CallOutline, RequestOrigin
from headrace.gateway.http import answers
from headrace.gateway.http.bodies import BodyReader
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.parameters import OutputLimit, check_model, choice_count, make_specs, outline_of, stream_wish
from headrace.gateway.http.schemas import CompletionRequest, StreamOptions, TextChoice, TextCompletion
from headrace.gateway.http.sse import Envelope, TextChoiceFrames
from headrace.gateway.http.surface import Surface
from headrace.gateway.http.timelines import header_wish
from headrace.gateway.http.traffic import Routing, origin_of, route_request
from headrace.gateway.http.unsupported import not_implemented, refuse_unsupported, rows_for
from headrace.protocol.errors import ErrorCode, RequestError

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class CompletionEndpoint:
    """Prompts in, their continuations out."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._reader = BodyReader(CompletionRequest, surface.settings, {"stream_options": StreamOptions})
        self._rows = rows_for(CompletionRequest, implemented=frozenset({"echo", "add_special_tokens"}))
        self._fingerprint = surface.fingerprint

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError before anything is sent; ClientGoneError."""
        surface = self._surface
        request = await self._reader.read(exchange)
        check_model(request.model, surface.service.card)
        refuse_unsupported(request, self._rows)
        wish = stream_wish(request, header_wish(exchange))
        routing = route_request(request.service_tier, request.timeout, exchange, surface.traffic)
        limits = surface.service.limits()
        num_choices = choice_count(request, surface.settings)
        if request.best_of is not None and request.best_of != num_choices:
            raise not_implemented("best_of")
        prompts = split_prompts(request.prompt)
        if len(prompts) * num_choices > surface.settings.max_sequences:
            message = f"Prompts times n must be at most {surface.settings.max_sequences}."
            raise RequestError(message, param="prompt")
        output = OutputLimit(request.max_tokens, DEFAULT_MAX_TOKENS, allow_zero=bool(request.echo))
        call = _outline(request, output, routing, origin_of(exchange, routing), prompts, num_choices)
        if not (request.echo and request.max_tokens == 0):  # the prompt alone needs no model
            surface.service.check_admission(call)
        self._refuse_endless(prompts, limits.max_model_len)
        encoded = await self._encode(prompts, request, limits.vocab_size)
        specs = make_specs(
            request,
            encoded,
            output,
            card=surface.service.card,
            limits=limits,
            settings=surface.settings,
            continues_text=True,
            routing=routing,
            origin=(origin := origin_of(exchange, routing)),
        )
        echoes = await self._echoes(prompts, request) if request.echo else [""] * len(prompts)
        echoes = [echo for echo in echoes for _ in range(num_choices)]
        answer_id, created = "cmpl-" + secrets.token_hex(16), int(time.time())
        model = surface.service.card.id
        with answers.submitted(surface.service, specs, call) as streams:
            if wish.stream:
                envelope = Envelope(
                    "text_completion", answer_id, created, model, self._fingerprint, wish.include_usage, routing.tier
                )
                frames = [TextChoiceFrames(envelope, index, echo) for index, echo in enumerate(echoes)]
                ping_seconds, threshold_ns = surface.settings.keep_alive_seconds, surface.stall_threshold_ns
                writer = answers.EventWriter(exchange, envelope, ping_seconds, threshold_ns)
                await writer.run(streams, frames, num_choices, wish, origin)
                return
            endings = await answers.collect(exchange, streams, wish)
        choices = [
            TextChoice(index, echoes[index] + ending.text, ending.finish_reason, stop_reason=ending.stop_string)
            for index, ending in enumerate(endings)
        ]
        usage = answers.usage_block([ending.usage for ending in endings], num_choices)
        body = TextCompletion(answer_id, created, model, self._fingerprint, choices, usage)
        await answers.respond_whole(exchange, body, routing)

    def _refuse_endless(self, prompts: list[Prompt], max_model_len: int) -> None:
        """Raise CONTEXT_LENGTH_EXCEEDED for a prompt that cannot fit whatever its tokens are, before it is tokenized."""
        max_chars = self._surface.max_token_chars
        for number, prompt in enumerate(prompts if max_chars is not None else ()):
            if isinstance(prompt, str) and len(prompt) > max_model_len * (max_chars or 1):
                param = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
                message = (
                    f"The context holds {max_model_len} tokens; {param} has {len(prompt)} characters, more than that can be."
                )
                raise RequestError(message, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, param=param)

    async def _encode(self, prompts: list[Prompt], request: CompletionRequest, vocab_size: int) -> list[list[int]]:
        encode = self._surface.tokenizer.encode
        add_special_tokens = request.add_special_tokens is not False

        def work() -> list[list[int]]:
            return [
                encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        encoded = await self._surface.text_workers.run(num_chars, work)
        for number, token_ids in enumerate(encoded):
            param = "prompt" if isinstance(request.prompt, str) or len(prompts) == 1 else f"prompt[{number}]"
            if not token_ids:
                raise RequestError(f"{param} must not be empty.", param=param)
            if min(token_ids) < 0 or max(token_ids) >= vocab_size:
                message = f"{param} holds a token id outside of the vocabulary, which has {vocab_size} tokens."
                raise RequestError(message, param=param)
        return encoded

    async def _echoes(self, prompts: list[Prompt], request: CompletionRequest) -> list[str]:
        """The prompts' text, as it was given or decoded from the ids."""
        decode = self._surface.tokenizer.decode
        skip = request.skip_special_tokens is not False

        def work() -> list[str]:
            return [prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip) for prompt in prompts]

        return await self._surface.text_workers.run(sum(map(len, prompts)), work)


def _outline(
    request: CompletionRequest,
    output: OutputLimit,
    routing: Routing,
    origin: RequestOrigin,
    prompts: list[Prompt],
    num_choices: int,
) -> CallOutline:
    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return outline_of(
        request,
        output,
        routing,
        origin,
        num_sequences=len(prompts) * num_choices,
        num_chars=num_choices * num_chars,
        num_token_ids=num_choices * num_ids,
    )


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """The prompts in any of the four forms. Raises RequestError for an empty list and for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [token_ids]
    prompts: list[Prompt] = [item for item in prompt if not isinstance(item, int)]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids, not empty."
        raise RequestError(message, param="prompt")
    return prompts

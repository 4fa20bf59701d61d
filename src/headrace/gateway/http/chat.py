"""POST /v1/chat/completions.

Owns: the endpoint. Runs in: gateway. Must not know: sampling ranges, framing.
"""

import secrets
import time
from functools import partial

import msgspec

from headrace.gateway.http import answers
from headrace.gateway.http.bodies import BodyReader
from headrace.gateway.http.conversation import num_text_chars, prompt_mode, template_messages, template_variables
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.parameters import OutputLimit, check_model, choice_count, make_specs, outline_of, stream_wish
from headrace.gateway.http.schemas import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatMessage,
    StreamOptions,
)
from headrace.gateway.http.sse import ChatChoiceFrames, Envelope
from headrace.gateway.http.surface import Surface
from headrace.gateway.http.timelines import header_wish
from headrace.gateway.http.traffic import origin_of, route_request
from headrace.gateway.http.unsupported import refuse_unsupported, rows_for


class ChatEndpoint:
    """Messages in, the assistant's next message out."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        nested: dict[str, type[msgspec.Struct]] = {"messages": ChatMessage, "stream_options": StreamOptions}
        self._reader = BodyReader(ChatCompletionRequest, surface.settings, nested)
        self._rows = rows_for(ChatCompletionRequest)
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
        call = outline_of(
            request,
            _output_limit(request),
            routing,
            origin_of(exchange, routing),
            num_sequences=num_choices,
            num_chars=num_choices * num_text_chars(request.messages, request.chat_template_kwargs),
        )
        surface.service.check_admission(call)
        prompt = await encode_conversation(
            surface,
            request.messages,
            request.add_generation_prompt,
            request.continue_final_message,
            request.chat_template_kwargs,
        )
        specs = make_specs(
            request,
            [prompt],
            _output_limit(request),
            card=surface.service.card,
            limits=limits,
            settings=surface.settings,
            continues_text=bool(request.continue_final_message),
            routing=routing,
            origin=(origin := origin_of(exchange, routing)),
        )
        answer_id, created = "chatcmpl-" + secrets.token_hex(16), int(time.time())
        model = surface.service.card.id
        with answers.submitted(surface.service, specs, call) as streams:
            if wish.stream:
                envelope = Envelope(
                    "chat.completion.chunk", answer_id, created, model, self._fingerprint, wish.include_usage, routing.tier
                )
                frames = [ChatChoiceFrames(envelope, index) for index in range(num_choices)]
                ping_seconds, threshold_ns = surface.settings.keep_alive_seconds, surface.stall_threshold_ns
                writer = answers.EventWriter(exchange, envelope, ping_seconds, threshold_ns)
                await writer.run(streams, frames, num_choices, wish, origin)
                return
            endings = await answers.collect(exchange, streams, wish)
        choices = [
            ChatChoice(index, AnswerMessage("assistant", ending.text), ending.finish_reason, stop_reason=ending.stop_string)
            for index, ending in enumerate(endings)
        ]
        usage = answers.usage_block([ending.usage for ending in endings], num_choices)
        body = ChatCompletion(answer_id, created, model, self._fingerprint, choices, usage)
        await answers.respond_whole(exchange, body, routing)


async def encode_conversation(
    surface: Surface,
    messages: list[ChatMessage],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, object] | None,
) -> list[int]:
    """Prompt ids of a conversation. Raises RequestError naming the message at fault, or with the template's own reason."""
    plain = template_messages(messages)
    opens, continues = prompt_mode(add_generation_prompt, continue_final_message, plain)
    work = partial(
        surface.chat_encoder,
        plain,
        add_generation_prompt=opens,
        continue_final_message=continues,
        variables=template_variables(variables),
    )
    return await surface.text_workers.run(num_text_chars(messages, variables), work)


def _output_limit(request: ChatCompletionRequest) -> OutputLimit:
    if request.max_completion_tokens is not None:
        return OutputLimit(request.max_completion_tokens, None, "max_completion_tokens", "messages")
    return OutputLimit(request.max_tokens, None, "max_tokens", "messages")

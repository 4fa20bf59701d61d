"""POST /tokenize and /detokenize, as vLLM has them.

Owns: the two endpoints. Runs in: gateway. Must not know: generation.
"""

import msgspec

from headrace.gateway.http.bodies import BodyReader
from headrace.gateway.http.chat import encode_conversation
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.parameters import check_model
from headrace.gateway.http.schemas import (
    ChatMessage,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace.gateway.http.surface import Surface
from headrace.protocol.errors import RequestError


class TokenizeEndpoint:
    """A text, or a conversation, to ids."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._reader = BodyReader(TokenizeRequest, surface.settings, {"messages": ChatMessage})

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientGoneError."""
        surface = self._surface
        request = await self._reader.read(exchange)
        check_model(request.model, surface.service.card)
        token_ids = await self._encode(request)
        strings = None
        if request.return_token_strs:
            decode = surface.tokenizer.decode
            strings = await surface.text_workers.run(
                len(token_ids), lambda: [decode([token_id], skip_special_tokens=False) for token_id in token_ids]
            )
        body = TokenizeResponse(len(token_ids), surface.max_model_len(), token_ids, strings)
        await exchange.respond(200, msgspec.json.encode(body))

    async def _encode(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Give either prompt or messages.", param="prompt")
        if request.messages is not None:
            if request.add_special_tokens:
                message = "add_special_tokens goes with prompt; a chat template brings its own."
                raise RequestError(message, param="add_special_tokens")
            return await encode_conversation(
                self._surface,
                request.messages,
                request.add_generation_prompt,
                request.continue_final_message,
                request.chat_template_kwargs,
            )
        for field in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, field):
                raise RequestError(f"{field} goes with messages.", param=field)
        text = request.prompt or ""
        add_special_tokens = request.add_special_tokens is not False
        encode = self._surface.tokenizer.encode
        return await self._surface.text_workers.run(len(text), lambda: encode(text, add_special_tokens=add_special_tokens))


class DetokenizeEndpoint:
    """Ids to text."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._reader = BodyReader(DetokenizeRequest, surface.settings)

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientGoneError."""
        surface = self._surface
        request = await self._reader.read(exchange)
        check_model(request.model, surface.service.card)
        vocab_size = surface.tokenizer.vocab_size
        if request.tokens and (min(request.tokens) < 0 or max(request.tokens) >= vocab_size):
            message = f"tokens holds an id outside of the vocabulary, which has {vocab_size} tokens."
            raise RequestError(message, param="tokens")
        text = await surface.text_workers.run(
            len(request.tokens), lambda: surface.tokenizer.decode(request.tokens, skip_special_tokens=False)
        )
        await exchange.respond(200, msgspec.json.encode(DetokenizeResponse(text)))

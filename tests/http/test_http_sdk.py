"""The official client library over the application itself: no port."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from headrace.protocol.errors import ErrorCode, RequestError
from tests.http.fakes import MODEL, Surface, breaks_after

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def with_client(surface: Surface, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        transport = httpx.ASGITransport(surface.app)
        async with httpx.AsyncClient(transport=transport) as client:
            return await work(openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=client, max_retries=0))

    return asyncio.run(call())


def test_chat_whole_and_streamed(surface: Surface) -> None:
    async def work(client: openai.AsyncOpenAI) -> tuple[str, str, Any]:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
        text, usage = "", None
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert whole.usage is not None
        return whole.choices[0].message.content or "", text, usage

    whole, streamed, usage = with_client(surface, work)
    assert whole == streamed == "Hello!"
    assert usage.completion_tokens == 3


def test_accumulating_helper_sse_08(surface: Surface) -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    completion = with_client(surface, work)
    assert [choice.message.content for choice in completion.choices] == ["Hello!", "Hello!"]
    assert {choice.message.role for choice in completion.choices} == {"assistant"}


def test_completions_and_models(surface: Surface) -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        models = [model.id async for model in client.models.list()]
        completion = await client.completions.create(model=MODEL, prompt=["A", "B"], n=2)
        return models, [choice.index for choice in completion.choices]

    assert with_client(surface, work) == ([MODEL], [0, 1, 2, 3])


def test_faults_raise_sse_01(surface: Surface) -> None:
    """Before the first byte as a status, after it from the stream: the client never takes a fault for an answer."""

    async def too_long(client: openai.AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": "lorem " * 100}]
        await client.chat.completions.create(model=MODEL, messages=messages, stream=True)

    with pytest.raises(openai.BadRequestError) as caught:
        with_client(surface, too_long)
    assert caught.value.code == "context_length_exceeded"

    async def lost(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            pass

    surface.service.script = breaks_after(RequestError("lost", code=ErrorCode.WORKER_LOST), "a", "b")
    with pytest.raises(openai.APIError, match="lost"):
        with_client(surface, lost)

"""What a refused caller is told, and that nobody is tokenized who is refused."""

import asyncio
from typing import Any

import anyio
import httpx
import openai
import pytest

from headrace.protocol.errors import ErrorCode, RejectReason, RequestError
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, Tenant, TrafficPolicy
from tests.http.fakes import MODEL, Surface, breaks_after, error_of, events_of

TENANTS = TrafficPolicy(tenants=(Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT), Tenant(name="acme")))
SERVER_FULL = RequestError("Too many.", code=ErrorCode.OVERLOADED, retry_after_seconds=7, reject_reason=RejectReason.QUEUE_FULL)
OVER_SHARE = RequestError(
    "Your own.", code=ErrorCode.TENANT_OVER_SHARE, retry_after_seconds=3, reject_reason=RejectReason.TENANT_SHARE
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code"),
    [(SERVER_FULL, 503, "server_error", "overloaded"), (OVER_SHARE, 429, "rate_limit_error", "tenant_over_share")],
)
def test_rat_07_a_refusal_says_whose_limit_it_is_and_when_to_come_again(
    surface: Surface, refusal: RequestError, status: int, kind: str, code: str, endpoint: str, stream: bool
) -> None:
    """RAT-07: the tenant's own share is a 429, a full server a 503; both with Retry-After, and nothing was tokenized."""
    surface.service.refuse_check = refusal
    response = getattr(surface, endpoint)(stream=stream)
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert response.headers["retry-after"] == str(refusal.retry_after_seconds)
    assert refusal.reject_reason is not None
    assert response.headers["x-headrace-reject-reason"] == refusal.reject_reason.value
    assert surface.encoder.calls == surface.tokenizer.encoded == surface.service.specs == []
    assert surface.service.rejections == [code]
    assert surface.service.reject_reasons == [refusal.reject_reason.value]


def test_other_errors_have_no_reject_reason(surface: Surface) -> None:
    response = surface.chat(temperature=9)
    assert response.status_code == 400
    assert "x-headrace-reject-reason" not in response.headers
    assert "retry-after" not in response.headers
    assert (surface.service.rejections, surface.service.reject_reasons) == (["invalid_value"], [])


def test_the_door_is_told_the_whole_call() -> None:
    surface = Surface(traffic=TENANTS)
    headers = {"x-headrace-tenant": "acme", "x-headrace-class": "batch"}
    surface.complete(headers, prompt=["four", "sixsix"], n=3, timeout=2.5, priority=4, max_tokens=9)
    surface.complete(headers, prompt=[[1, 2], [3, 4, 5]], n=2)
    surface.chat(n=2, max_tokens=5)
    texts, ids, chat = surface.service.calls
    assert (texts.service_class, texts.tenant_id, texts.priority, texts.max_tokens) == ("batch", "acme", 4, 9)
    assert (texts.num_sequences, texts.num_chars, texts.num_token_ids, texts.timeout_ns) == (6, 30, 0, 2_500_000_000)
    assert (ids.num_sequences, ids.num_chars, ids.num_token_ids, ids.max_tokens, ids.timeout_ns) == (4, 0, 10, 16, 0)
    assert (chat.service_class, chat.tenant_id, chat.num_sequences, chat.num_chars) == ("standard", "default", 2, 4)
    assert texts.origin.received_ns > 0


def test_the_same_call_is_known_again_and_another_is_not() -> None:
    surface = Surface(traffic=TENANTS)
    plain = {"headers": {}, "temperature": 0}
    others: list[dict[str, Any]] = [
        plain | {"temperature": 1},
        plain | {"headers": {"x-headrace-tenant": "acme"}},
        plain | {"headers": {"x-headrace-class": "batch"}},
    ]
    for call in (plain, plain | {"headers": {"x-request-id": "second", "x-stainless-retry-count": "1"}}, *others):
        assert surface.chat(**call).status_code == 200
    first, again, *different = [call.origin.digest for call in surface.service.calls]
    assert len(first) == 16
    assert first == again
    assert len({first, *different}) == 4
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/v1/completions"):
        surface.request("POST", path, json=body)
    assert surface.service.calls[-1].origin.digest != surface.service.calls[-2].origin.digest
    assert {spec.origin.digest for spec in surface.service.specs} == {call.origin.digest for call in surface.service.calls}


def test_who_wants_no_token_is_not_asked(surface: Surface) -> None:
    surface.service.refuse_check = SERVER_FULL
    response = surface.complete(echo=True, max_tokens=0)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "Hi")
    assert surface.service.calls == []


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_the_timeout_comes_from_the_body_or_the_header(surface: Surface, endpoint: str) -> None:
    ask = getattr(surface, endpoint)
    for headers, fields in (
        ({}, {"timeout": 0.25}),
        ({"x-headrace-timeout": "30"}, {}),
        ({"x-headrace-timeout": "1e1"}, {"timeout": 5}),
        ({"x-headrace-timeout": " +.5 "}, {}),
        ({}, {"timeout": 86400}),
        ({}, {"timeout": None}),
    ):
        assert ask(headers=headers, **fields).status_code == 200
    assert [spec.timeout_ns / 1e9 for spec in surface.service.specs] == [0.25, 30.0, 10.0, 0.5, 86400.0, 0.0]


@pytest.mark.parametrize("timeout", [0, -1, 86400.1, 1e300, "5", True])
def test_a_timeout_out_of_range_is_refused(surface: Surface, timeout: Any) -> None:
    error = error_of(response := surface.chat(timeout=timeout))
    assert (response.status_code, error["param"]) == (400, "timeout")
    assert surface.service.calls == []


@pytest.mark.parametrize("timeout", ["", "0", "-3", "soon", "nan", "inf", "1e9", "1_0", "1e1_0", "0x10", "1 2", ".", "e1"])
def test_a_timeout_header_out_of_range_is_refused(surface: Surface, timeout: str) -> None:
    error = error_of(response := surface.chat(headers={"x-headrace-timeout": timeout}))
    assert (response.status_code, error["param"]) == (400, "x-headrace-timeout")
    assert error["message"] == "x-headrace-timeout must be a number of seconds above 0 and at most 86400."


def test_a_timeout_that_passes_is_a_503_before_and_a_frame_after_the_first_byte(surface: Surface) -> None:
    surface.service.script = breaks_after(RequestError("Over.", code=ErrorCode.DEADLINE_EXCEEDED), "a")
    error = error_of(response := surface.chat(timeout=1))
    assert (response.status_code, error["code"], error["type"]) == (503, "deadline_exceeded", "server_error")
    *_, last = events_of(surface.chat(timeout=1, stream=True).content)
    assert last["error"]["code"] == "deadline_exceeded"


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    surface = Surface(max_token_chars=10)
    error = error_of(response := surface.complete(prompt="x" * 1281))
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert error_of(surface.complete(prompt=["x", "x" * 1281]))["param"] == "prompt[1]"
    assert surface.tokenizer.encoded == []
    assert error_of(surface.complete(prompt="x" * 1280))["code"] == "context_length_exceeded"
    assert len(surface.tokenizer.encoded) == 1  # its tokens had to be counted


def test_the_document_tells_of_refusals(surface: Surface) -> None:
    document = surface.request("GET", "/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = document["paths"][path]["post"]["responses"]
        for status in ("429", "503"):
            headers = responses[status]["headers"]
            assert headers["Retry-After"]["schema"] == {"type": "integer", "minimum": 1}
            assert headers["x-headrace-reject-reason"]["schema"]["enum"] == [reason.value for reason in RejectReason]
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert "timeout" in properties
    assert set(document["paths"]["/health/ready"]["get"]["responses"]["503"]["headers"]) == {"Retry-After"}


@pytest.mark.parametrize(
    ("refusal", "exception"), [(SERVER_FULL, openai.InternalServerError), (OVER_SHARE, openai.RateLimitError)]
)
def test_the_official_client_raises_its_own_errors(
    surface: Surface, refusal: RequestError, exception: type[openai.APIStatusError]
) -> None:
    surface.service.refuse_check = refusal
    with pytest.raises(exception) as caught:
        asyncio.run(_ask_as_sdk(surface, max_retries=0))
    assert caught.value.code == refusal.code.value.code
    assert caught.value.response.headers["retry-after"] == str(refusal.retry_after_seconds)


@pytest.mark.parametrize("refusal", [SERVER_FULL, OVER_SHARE])
def test_rat_01_the_official_client_waits_as_told_and_is_known_again(
    surface: Surface, refusal: RequestError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAT-01 in kind: the wait is in a header that the client obeys, and what it sends again has the digest of its promise."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            surface.service.refuse_check = None

    monkeypatch.setattr(anyio, "sleep", sleep)
    surface.service.refuse_check = refusal
    assert asyncio.run(_ask_as_sdk(surface, max_retries=2)) == "Hello!"
    assert slept == [refusal.retry_after_seconds] * 2
    assert len({call.origin.digest for call in surface.service.calls}) == 1
    assert len(surface.service.calls) == 3


async def _ask_as_sdk(surface: Surface, max_retries: int) -> str:
    messages: Any = [{"role": "user", "content": "Hi"}]
    transport = httpx.ASGITransport(surface.app)
    async with httpx.AsyncClient(transport=transport) as http_client:
        client = openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http_client, max_retries=max_retries)
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
    return answer.choices[0].message.content or ""

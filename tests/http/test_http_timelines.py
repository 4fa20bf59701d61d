"""Timelines in answers for those who ask, Server-Timing, and clients that do not read."""

import asyncio
import re

import openai
import pytest

from headrace.protocol.errors import ErrorCode, RequestError
from tests.http.fakes import MODEL, STALL_THRESHOLD_NS, RawCall, Surface, breaks_after, events_of
from tests.http.test_http_sdk import MESSAGES, with_client

ASK = {"x-headrace-timeline": "true"}
LOST = RequestError("lost", code=ErrorCode.WORKER_LOST)


def timing_of(response):
    """Server-Timing as a dict, checked against the grammar of its header."""
    entries = [re.fullmatch(r"([a-z]+);dur=(\d+\.\d+)", item) for item in response.headers["server-timing"].split(", ")]
    return {entry[1]: float(entry[2]) for entry in entries}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("how", ["header", "option"])
def test_a_stream_ends_with_the_timeline_of_each_choice(surface, endpoint, how):
    headers = ASK if how == "header" else {}
    options = {"include_usage": True} | ({"include_timeline": True} if how == "option" else {})
    response = getattr(surface, endpoint)(headers=headers, n=2, stream=True, stream_options=options)
    *rest, usage, last = events_of(response.content)
    assert usage["usage"]["completion_tokens"] == 6
    assert {"id", "object", "created", "model"} <= set(last)
    assert last["id"] == usage["id"] == rest[0]["id"]
    assert (last["choices"], last["usage"]) == ([], None)
    assert [report["choice"] for report in last["timeline"]] == [0, 1]
    assert last["timeline"][0]["request_id"] == response.headers["x-request-id"]
    assert last["timeline"][0]["class"] == "standard"
    assert not any("timeline" in chunk for chunk in [*rest, usage])
    assert set(timing_of(response)) == {"tokenize"}
    assert "x-headrace-ignored-fields" not in response.headers


def test_without_usage_the_timeline_chunk_has_none(surface):
    last = events_of(surface.chat(headers=ASK, stream=True).content)[-1]
    assert "timeline" in last
    assert "usage" not in last


@pytest.mark.parametrize("headers", [{}, {"x-headrace-timeline": "false"}, {"x-headrace-timeline": "0"}])
def test_who_does_not_ask_gets_none(surface, headers):
    whole = surface.chat(headers=headers)
    assert "timeline" not in whole.json()
    streamed = surface.chat(headers=headers, stream=True, stream_options={"include_timeline": False})
    assert not any("timeline" in chunk for chunk in events_of(streamed.content))
    for response in (whole, streamed):
        assert "server-timing" not in response.headers


def test_a_body_field_outside_of_stream_options_is_not_ours(surface):
    response = surface.chat(include_timeline=True)
    assert "timeline" not in response.json()
    assert response.headers["x-headrace-ignored-fields"] == "include_timeline"


def test_a_header_that_says_neither_yes_nor_no_is_refused(surface):
    response = surface.chat(headers={"x-headrace-timeline": "perhaps"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-headrace-timeline")


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_whole_answer_has_it_as_a_member_and_the_slowest_choice_in_the_header(surface, endpoint):
    response = getattr(surface, endpoint)(headers=ASK, n=3)
    reports = response.json()["timeline"]
    assert [report["choice"] for report in reports] == [0, 1, 2]
    assert reports[0]["stalls"] == [{"cause": "prefill", "at_ms": 12.0, "duration_ms": 300.0}]
    assert timing_of(response) == {"tokenize": 1.0, "queue": 3.0, "prefill": 6.0, "decode": 22.0, "total": 32.0}


def test_an_error_after_the_start_has_it_beside_the_error(surface):
    surface.service.script = breaks_after(LOST, "a")
    response = surface.chat(headers=ASK, n=2)
    body = response.json()
    assert response.status_code == 503
    assert set(body) == {"error", "timeline"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert [report["choice"] for report in body["timeline"]] == [0, 1]
    assert set(timing_of(response)) == {"tokenize", "queue", "prefill", "decode", "total"}


def test_an_error_before_acceptance_has_none(surface):
    surface.service.refuse_submit = {1: RequestError("full", code=ErrorCode.OVERLOADED, retry_after_seconds=3)}
    assert set(surface.chat(headers=ASK, n=2).json()) == {"error"}
    assert set(surface.chat(headers=ASK, temperature=9).json()) == {"error"}


def test_a_stream_that_fails_has_it_between_the_error_and_done(surface):
    surface.service.script = lambda spec, number: (breaks_after(LOST, "a") if number else lambda *_: [None])(spec, number)
    response = surface.chat(headers=ASK, n=2, stream=True)
    *_, error, last = events_of(response.content)
    assert error["error"]["code"] == "worker_lost"
    assert [report["finish_reason"] for report in last["timeline"]] == ["abort", "stop"], "the other choice has ended too"


def test_a_fault_of_measuring_costs_the_timeline_and_not_the_answer_met_08(surface):
    surface.service.metrics_fail = True
    whole = surface.chat(headers=ASK)
    assert (whole.status_code, whole.json()["timeline"]) == (200, [])
    assert events_of(surface.chat(headers=ASK, stream=True).content)[-1]["timeline"] == []


def test_what_asked_for_no_token_has_a_timeline_too(surface):
    report = surface.complete(headers=ASK, echo=True, max_tokens=0).json()["timeline"][0]
    assert (report["state"], report["finish_reason"], report["output_tokens"]) == ("finished", "length", 0)
    assert set(report["phases"]) == {"tokenize"}
    assert report["end_ms"] == report["tokenized_ms"] == report["phases"]["tokenize"] > 0


def test_the_official_client_passes_over_the_timeline_chunk(surface):
    async def work(client: openai.AsyncOpenAI):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True, "include_timeline": True},
            extra_headers=ASK,
        )
        text, usage, timeline = "", None, None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
            timeline = getattr(chunk, "timeline", timeline)
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_headers=ASK)
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_headers=ASK) as accumulating:
            async for _ in accumulating:
                pass
            final = await accumulating.get_final_completion()
        return text, usage, timeline, whole, final.choices[0].message.content

    text, usage, timeline, whole, accumulated = with_client(surface, work)
    assert text == whole.choices[0].message.content == accumulated == "Hello!"
    assert usage.completion_tokens == 3
    assert timeline[0]["phases"] == {"tokenize": 1.0, "queue": 3.0, "prefill": 6.0, "decode": 20.0}
    assert whole.timeline[0]["phases"] == {"tokenize": 1.0, "queue": 3.0, "prefill": 6.0, "decode": 21.0}


def slow_call(surface: Surface, seconds: float, number: int, **fields) -> RawCall:
    """A call whose client takes so long to take its body's frame of that number."""
    call = RawCall(surface.app, "/v1/completions", {"prompt": "Hi", "stream": True} | fields)

    async def wait(message):
        if message["type"] == "http.response.body" and len(call.bodies) == number:
            await asyncio.sleep(seconds)

    call.on_send = wait
    return call


def test_a_client_that_does_not_read_is_told_to_the_timeline(surface):
    seconds = 2.5 * STALL_THRESHOLD_NS / 1e9
    asyncio.run(slow_call(surface, seconds, 2).run())
    ((began_ns, duration_ns),) = surface.service.streams[0].slow_reads
    assert duration_ns >= seconds * 1e9
    assert began_ns > surface.service.specs[0].origin.tokenized_ns


def test_a_client_that_reads_is_not(surface):
    asyncio.run(slow_call(surface, 0.0, 2).run())
    assert surface.service.streams[0].slow_reads == []


def test_every_choice_of_a_client_that_does_not_read_waits_for_it(surface):
    asyncio.run(slow_call(surface, 3 * STALL_THRESHOLD_NS / 1e9, 1, n=2).run())
    assert [len(stream.slow_reads) for stream in surface.service.streams] == [1, 1]


def test_a_client_that_goes_while_it_does_not_read_is_told_too(surface):
    async def scenario() -> RawCall:
        call = slow_call(surface, 60.0, 1)
        task = asyncio.create_task(call.run())
        await asyncio.sleep(2 * STALL_THRESHOLD_NS / 1e9)
        call.gone.set()
        await asyncio.wait_for(task, 5)
        return call

    asyncio.run(scenario())
    assert len(surface.service.streams[0].slow_reads) == 1
    assert surface.service.http_counts == [("/v1/completions", 499)]

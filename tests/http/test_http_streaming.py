"""Event streams: order, ends, faults, framing on the wire, keep-alives, clients that go."""

import asyncio
import json
from typing import Any

import pytest

from headrace.gateway.deltas import GenerationSpec, TextDelta
from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import Usage
from tests.http.fakes import RawCall, Surface, breaks_after, error_of, events_of, hangs_after, words

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
LOST = RequestError("the worker was lost", code=ErrorCode.WORKER_LOST)


def test_order_of_one_stream(surface: Surface) -> None:
    """SSE-08 and SSE-11: the role comes once, with the first text, and is never null."""
    response = surface.chat(stream=True)
    events = events_of(response.content)
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
        {"content": "!"},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert events[0]["choices"][0]["logprobs"] is None


def test_headers_of_a_stream(surface: Surface) -> None:
    """SSE-13: never compressed; proxies are told not to buffer."""
    request = {"json": BODY, "headers": {"accept-encoding": "gzip", "x-request-id": "mine-1"}}
    response = surface.request("POST", CHAT, **request)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "mine-1"
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}]
)
def test_no_unasked_usage_use_01(surface: Surface, options: dict[str, Any]) -> None:
    """USE-01 and USE-02."""
    events = events_of(surface.chat(stream=True, **options).content)
    assert all(event["choices"] and "usage" not in event for event in events)


def test_usage_chunk_equals_the_whole_answers_usage_use_05(surface: Surface) -> None:
    events = events_of(surface.chat(stream=True, n=2, stream_options={"include_usage": True}).content)
    last = events.pop()
    assert last["choices"] == []
    assert all(event["usage"] is None for event in events)
    again = Surface()
    assert last["usage"] == again.chat(n=2).json()["usage"]


def test_one_ending_for_each_choice_sse_10(surface: Surface) -> None:
    events = events_of(surface.chat(stream=True, n=3).content)
    roles, endings = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
    texts = dict.fromkeys(range(3), "")
    for event in events:
        (choice,) = event["choices"]
        roles[choice["index"]] += "role" in choice["delta"]
        endings[choice["index"]] += choice["finish_reason"] is not None
        assert choice["finish_reason"] is None or "role" not in choice["delta"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert roles == endings == {0: 1, 1: 1, 2: 1}
    assert set(texts.values()) == {"Hello!"}


def test_a_stream_whose_first_delta_is_the_end_has_a_role(surface: Surface) -> None:
    surface.service.script = words(finish="stop")
    (event,) = events_of(surface.chat(stream=True).content)
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert event["choices"][0]["finish_reason"] == "stop"


def test_held_back_text_makes_no_event(surface: Surface) -> None:
    surface.service.script = words("a", "", "b", "")
    events = events_of(surface.chat(stream=True).content)
    assert [event["choices"][0]["delta"] for event in events] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]


def test_stop_string_is_named(surface: Surface) -> None:
    surface.service.script = words("a", stop_string="END\u2028")
    events = events_of(surface.chat(stream=True).content)
    assert events[-1]["choices"][0]["stop_reason"] == "END\u2028"
    assert surface.chat().json()["choices"][0]["stop_reason"] == "END\u2028"


@pytest.mark.parametrize(("path", "finish"), [(CHAT, "length"), ("/v1/completions", "stop")])
def test_every_stream_ends_once_sse_04(surface: Surface, path: str, finish: str) -> None:
    for num_tokens in (1, 2, 7):
        surface.service.script = words(*["x"] * num_tokens, finish=finish)
        response = surface.request("POST", path, json=BODY | {"prompt": "Hi"})
        assert [event["choices"][0]["finish_reason"] for event in events_of(response.content)][-1] == finish


def test_known_faults_are_an_http_error_sse_01(surface: Surface) -> None:
    response = surface.chat(stream=True, messages=[{"role": "user", "content": "lorem " * 200}])
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_fault_after_tokens_sse_02(surface: Surface) -> None:
    surface.service.script = breaks_after(LOST, "a", "b", "c")
    response = surface.chat(stream=True)
    assert response.status_code == 200
    events = events_of(response.content)
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["a", "b", "c"]
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["error"]["code"] == "worker_lost"
    assert surface.service.http_counts == [(CHAT, 200)]


def test_fault_of_one_choice_ends_all_sse_02(surface: Surface) -> None:
    def script(spec: GenerationSpec, number: int) -> list[TextDelta | None]:
        return [TextDelta("x", 1), TextDelta(error=LOST) if number == 1 else None]

    surface.service.script = script
    events = events_of(surface.chat(stream=True, n=3, stream_options={"include_usage": True}).content)
    assert [("error" in event) for event in events].count(True) == 1
    assert "error" in events[-1]
    assert all(stream.num_cancels == 1 for stream in surface.service.streams)


@pytest.mark.parametrize("error", [ValueError("a validation-like fault"), RuntimeError("secret")])
def test_exception_after_the_start_sse_05(surface: Surface, error: Exception) -> None:
    """One header block, one error frame, nothing of the inside, and the server lives."""
    surface.service.script = breaks_after(error, "a")
    call = RawCall(surface.app, CHAT, BODY)
    asyncio.run(call.run())
    assert [message["type"] for message in call.sent].count("http.response.start") == 1
    events = events_of(b"".join(call.bodies))
    assert events[-1]["error"]["code"] == "internal_error"
    assert str(error) not in str(events)
    surface.service.script = words("x")
    assert surface.chat(stream=True).status_code == 200


def test_an_ending_without_usage_is_a_fault_not_a_guess(surface: Surface) -> None:
    surface.service.script = lambda spec, number: [TextDelta("a", 1, finish_reason="stop")]
    assert surface.chat().status_code == surface.chat(stream=True).status_code == 500


def test_line_ends_are_escaped_sse_07(surface: Surface) -> None:
    text = 'a\u2028b\u2029c\u0085d\r\n\x0b\x0c\x1c\x1d\x1ee"é😀'
    surface.service.script = words("one", text)
    for path in (CHAT, "/v1/completions"):
        content = surface.request("POST", path, json=BODY | {"prompt": text, "echo": path != CHAT}).content
        by_any_line_end = [line for line in content.decode().splitlines() if line]
        by_line_feed = [line for line in content.decode().split("\n") if line]
        assert by_any_line_end == by_line_feed
        last = events_of(content)[-1]["choices"][0]
        assert (last["delta"]["content"] if path == CHAT else last["text"]) == text


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_fault_before_the_first_frame_is_a_status_sch_16(surface: Surface, path: str, num_choices: int) -> None:
    """SCH-16, SSE-01: the same answer as without `stream`, Retry-After and timeline included; nothing stays behind."""
    error = RequestError("Over.", code=ErrorCode.DEADLINE_EXCEEDED, retry_after_seconds=7)

    def script(spec: GenerationSpec, number: int) -> list[TextDelta | None]:
        return [TextDelta(error=error) if number % num_choices == num_choices - 1 else None]

    surface.service.script = script
    body = BODY | {"prompt": "Hi", "n": num_choices}
    response = surface.request("POST", path, json=body)
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert error_of(response)["code"] == "deadline_exceeded"
    assert response.content == surface.request("POST", path, json=body | {"stream": False}).content
    told = surface.request("POST", path, json=body, headers={"x-headrace-timeline": "true"})
    assert (told.status_code, len(told.json()["timeline"])) == (503, num_choices)
    assert "server-timing" in told.headers
    assert surface.service.rejections == [], "it was let in: no refusal"
    assert all(stream.num_cancels >= 1 for stream in surface.service.streams)


@pytest.mark.parametrize("error", [ValueError("a validation-like fault"), RuntimeError("secret")])
def test_an_exception_before_the_first_frame_is_a_500(surface: Surface, error: Exception) -> None:
    surface.service.script = breaks_after(error)
    response = surface.chat(stream=True)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert str(error) not in response.text


@pytest.mark.parametrize("client_leaves", [False, True])
def test_headers_wait_for_half_the_keep_alive_time_at_most_prx_02(client_leaves: bool) -> None:
    """PRX-02: they come with the first token or before it; then a fault is one error frame. Who leaves before is cancelled."""
    surface = Surface(HttpSettings(keep_alive_seconds=10.0))
    fault: asyncio.Event

    class Waiting:
        num_cancels = 0

        async def next_delta(self) -> TextDelta:
            await fault.wait()
            return TextDelta(error=LOST)

        def cancel(self) -> None:
            self.num_cancels += 1

    stream = Waiting()
    surface.service.submit_call = lambda specs, call=None: [stream]  # type: ignore[assignment,method-assign,return-value,list-item]
    call = RawCall(surface.app, CHAT, BODY)

    async def scenario() -> None:
        nonlocal fault
        fault = asyncio.Event()
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        loop.call_later = lambda delay, callback, *args: timers.append((delay, callback)) or Cancellable()  # type: ignore[assignment,method-assign,func-returns-value]
        task = asyncio.ensure_future(call.run())
        while not timers:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert call.sent == []
        if client_leaves:
            call.gone.set()
            for _ in range(5):
                await asyncio.sleep(0)
            assert stream.num_cancels == 1, "at once"
        else:
            ((delay, fire),) = timers
            assert delay == 5.0
            fire()
            while len(call.sent) < 2:
                await asyncio.sleep(0)
            fault.set()
        await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    starts = [message["status"] for message in call.sent if message["type"] == "http.response.start"]
    if client_leaves:
        assert 200 not in starts
        assert surface.service.http_counts == [(CHAT, 499)]
    else:
        assert starts == [200]
        assert call.bodies[0] == b": keep-alive\n\n"
        assert [event["error"]["code"] for event in events_of(b"".join(call.bodies))] == ["worker_lost"]
        assert stream.num_cancels == 1


def test_one_send_for_each_wake_up(surface: Surface) -> None:
    call = RawCall(surface.app, CHAT, BODY | {"stream_options": {"include_usage": True}})
    asyncio.run(call.run())
    assert [body.count(b"data: ") for body in call.bodies] == [1, 1, 1, 2], "three deltas, then usage and [DONE] together"
    assert [message.get("more_body", False) for message in call.sent[1:]] == [True, True, True, False]


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_gone_client_cancels_at_once_dis_01(surface: Surface, stream: bool, num_choices: int) -> None:
    surface.service.script = hangs_after("a", "b", "c")
    call = RawCall(surface.app, CHAT, BODY | {"stream": stream, "n": num_choices})

    async def scenario() -> None:
        task = asyncio.ensure_future(call.run())
        while not (surface.service.streams and all(len(fake.deltas) == 0 for fake in surface.service.streams)):
            await asyncio.sleep(0)
        assert all(fake.num_cancels == 0 for fake in surface.service.streams)
        call.gone.set()
        await task
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task stays behind"

    asyncio.run(scenario())
    assert [fake.num_cancels for fake in surface.service.streams] == [1] * num_choices
    assert surface.service.http_counts == [(CHAT, 499)]
    assert all(b"[DONE]" not in body for body in call.bodies)


def test_a_client_gone_while_a_send_waits_is_cancelled(surface: Surface) -> None:
    """SLO-01: a reader that stalls holds one frame, and its leaving frees everything."""
    surface.service.script = words(*["x"] * 50)
    call = RawCall(surface.app, CHAT, BODY)
    stalled = asyncio.Event()

    async def scenario() -> None:
        def on_send(message: dict[str, Any]) -> Any:
            return stalled.wait() if message.get("body") else None

        call.on_send = on_send
        task = asyncio.ensure_future(call.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(surface.service.streams[0].deltas) >= 48, "nothing is taken ahead of the reader"
        call.gone.set()
        await task

    asyncio.run(scenario())
    assert surface.service.streams[0].num_cancels == 1


def test_a_send_that_fails_is_a_client_that_went(surface: Surface) -> None:
    call = RawCall(surface.app, CHAT, BODY)

    def on_send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise OSError("broken pipe")

    call.on_send = on_send
    asyncio.run(call.run())
    assert surface.service.streams[0].num_cancels == 1
    assert surface.service.http_counts == [(CHAT, 499)]


def test_a_client_gone_during_its_upload(surface: Surface) -> None:
    call = RawCall(surface.app, CHAT, BODY)
    call._messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    call.gone.set()
    asyncio.run(call.run())
    assert call.sent[0]["status"] == 400, "a client whose chunks were no chunks is there still"
    assert b"not complete" in call.bodies[0]
    assert surface.service.http_counts == [(CHAT, 499)]


def test_a_body_that_trickles_in_is_refused_in_time() -> None:
    surface = Surface(HttpSettings(body_seconds=0.01))
    call = RawCall(surface.app, CHAT, BODY)
    call._messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    asyncio.run(call.run())
    assert call.sent[0]["status"] == 408
    assert b"request_timeout" in call.bodies[0]


def test_a_server_that_ends_cancels_its_streams(surface: Surface) -> None:
    surface.service.script = hangs_after("a")
    call = RawCall(surface.app, CHAT, BODY)

    async def scenario() -> None:
        task = asyncio.ensure_future(call.run())
        while len(call.sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert surface.service.streams[0].num_cancels == 1


def test_comments_in_long_silences() -> None:
    """A stream that waits says so, and stops saying so when it ends; a busy one never does."""
    surface = Surface(HttpSettings(keep_alive_seconds=10.0))
    release: asyncio.Event

    class Waiting:
        def __init__(self) -> None:
            self.deltas = [TextDelta("a", 1), TextDelta("", 0, finish_reason="stop", usage=Usage(1, 1))]

        async def next_delta(self) -> TextDelta:
            if len(self.deltas) == 1:
                await release.wait()
            return self.deltas.pop(0)

        def cancel(self) -> None:
            return

    surface.service.submit_call = lambda specs, call=None: [Waiting()]  # type: ignore[assignment,method-assign,return-value,list-item]
    call = RawCall(surface.app, CHAT, BODY)

    async def scenario() -> None:
        nonlocal release
        release = asyncio.Event()
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        loop.call_later = lambda delay, callback, *args: timers.append((delay, callback)) or Cancellable()  # type: ignore[assignment,method-assign,func-returns-value]
        task = asyncio.ensure_future(call.run())
        while len(call.bodies) < 1:
            await asyncio.sleep(0)
        for expected in (0, 1, 2):  # the first tick sees the token just sent
            (delay, fire) = timers.pop()
            assert delay == 5.0
            assert timers == []
            fire()
            for _ in range(5):
                await asyncio.sleep(0)
            assert call.bodies.count(b": keep-alive\n\n") == expected, expected
            if expected == 1:
                timers_before = len(timers)
                (_, fire) = timers.pop()
                fire()  # its own comment counts as something sent
                for _ in range(5):
                    await asyncio.sleep(0)
                assert call.bodies.count(b": keep-alive\n\n") == expected
                assert timers_before == 1
        release.set()
        await task

    asyncio.run(scenario())
    events = events_of(b"".join(call.bodies))
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert json.dumps(events).count("keep-alive") == 0


class Cancellable:
    def cancel(self) -> None:
        return

"""Whole exchanges with a running server, for tests that look at every event of an answer."""

import http.client
import json
from typing import Any

from harness import Server


def send(server: Server, path: str, payload: bytes, content_type: str = "application/json") -> tuple[int, bytes]:
    """Status and body of a POST with these very bytes."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        connection.request("POST", path, payload, {"content-type": content_type})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def ask(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    """The answer to a body that must be accepted."""
    status, body = send(server, path, json.dumps(fields).encode())
    assert status == 200, body[:1000]
    answer: dict[str, Any] = json.loads(body)
    return answer


def refusal(server: Server, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and error object of a body that must be refused, with `stream` and without: both the same."""
    status, body = send(server, path, json.dumps(fields).encode())
    streamed = send(server, path, json.dumps(fields | {"stream": True}).encode())
    assert streamed == (status, body), streamed
    return status, error_of(body)


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of a body, which is small and tells nothing of the inside."""
    assert len(body) < 4096
    assert b"Traceback" not in body
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, which ends with exactly one [DONE]."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    payloads = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    assert payloads.count("[DONE]") == 1
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def streamed(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of the answer to a body that must be accepted."""
    status, body = send(server, path, json.dumps(fields | {"stream": True}).encode())
    assert status == 200, body[:1000]
    return events_of(body)


def text_of(choice: dict[str, Any]) -> str:
    """The text in a choice of any kind of answer."""
    if "text" in choice:
        return str(choice["text"])
    return choice.get("message", choice.get("delta", {})).get("content") or ""


def both_ways(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    """The only choice of the answer, with its text and usage; streamed and whole, which must agree, no delta torn or empty."""
    answer = ask(server, path, **fields)
    (whole,) = answer["choices"]
    events = streamed(server, path, **fields, stream_options={"include_usage": True})
    usage = events.pop()["usage"]
    deltas = [text_of(event["choices"][0]) for event in events]
    assert not any("\ufffd" in delta for delta in deltas)
    assert all(deltas[:-1]), "an event without text"
    assert "".join(deltas) == text_of(whole)
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    for name in ("prompt_tokens", "completion_tokens"):
        assert usage[name] == answer["usage"][name]
    return {"text": text_of(whole), "finish": whole["finish_reason"], "stop": whole["stop_reason"], "usage": usage}

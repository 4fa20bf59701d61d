"""The frames themselves: pure, so shown for any text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.http import sse
from headrace.gateway.http.schemas import PromptTokensDetails, UsageBlock

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\u2028\u2029\u0085\r\n"\\\x00\x1c\x7f'))


@given(TEXTS)
def test_any_text_is_one_line_and_comes_back_sse_07(text: str) -> None:
    encoded = sse.json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


@given(st.lists(TEXTS), TEXTS, TEXTS, st.booleans(), st.integers(0, 500))
def test_chat_frames_carry_the_text_once(texts: list[str], last: str, model: str, include_usage: bool, index: int) -> None:
    """SSE-08, SSE-10, SSE-11 for any text and model name."""
    envelope = sse.Envelope("chat.completion.chunk", "id", 5, model, "fp", include_usage)
    frames = sse.ChatChoiceFrames(envelope, index)
    raw = [frames.text_event(text) for text in texts] + [frames.last_event(last, "length", None)]
    chunks = [parse(frame) for frame in raw]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(texts) + last
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * len(texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(texts) + ["length"]
    assert all(chunk["model"] == model and chunk["choices"][0]["index"] == index for chunk in chunks)
    assert all(("usage" in chunk) == include_usage for chunk in chunks)


@given(st.lists(TEXTS), TEXTS, TEXTS, TEXTS)
def test_text_frames_carry_the_echo_first(texts: list[str], last: str, echo: str, stop: str) -> None:
    frames = sse.TextChoiceFrames(sse.Envelope("text_completion", "id", 5, "m", "fp", True), 0, echo)
    chunks = [parse(frames.text_event(text)) for text in texts] + [parse(frames.last_event(last, "stop", stop))]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echo + "".join(texts) + last
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_usage_and_error_frames() -> None:
    envelope = sse.Envelope("text_completion", "id", 5, "m", "fp", True)
    usage = parse(envelope.usage_event(UsageBlock(1, 2, 3, PromptTokensDetails(0))))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 3
    assert parse(sse.error_event(b'{"error":{}}')) == {"error": {}}


def parse(frame: bytes) -> dict:  # type: ignore[type-arg]
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    parsed: dict = json.loads(frame[6:])  # type: ignore[type-arg]
    return parsed

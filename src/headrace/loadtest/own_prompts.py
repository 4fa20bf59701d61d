"""One's own prompts from a file: OpenAI's batch format or ShareGPT's.

Owns: draft_batch, draft_sharegpt. Runs in: load tool. Must not know: HTTP, arrival times.
Prompts are sent as they stand: no salt, no scaling, lengths as the server counts them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.loadtest.plan import api_path
from headrace.loadtest.records import RunSettings
from headrace.loadtest.request_drafts import RequestDraft, WorkloadError, request_body

MAX_ARRAY_BYTES = 1 << 30  # a ShareGPT file that is one array is read whole
CHARACTERS_PER_TOKEN = 4  # for the length of ShareGPT's recorded answers: rough, English
MAX_RECORDED_TOKENS = 2048
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class _BatchLine(msgspec.Struct):
    body: dict[str, Any]
    url: str = ""
    method: str = "POST"
    custom_id: str = ""


class _Said(msgspec.Struct):
    sender: str = msgspec.field(name="from")
    value: str


class _SharedConversation(msgspec.Struct):
    conversations: list[_Said]


def draft_batch(settings: RunSettings, path: Path) -> Iterator[RequestDraft]:
    """JSON lines of {custom_id, method, url, body}. The body is sent with the run's model in it; stream flags are the run's.

    `settings.output_tokens`, when given, replaces the body's limit. Raises WorkloadError for a line that is no such request, or
    one for another API than the run's.
    """
    decoder = msgspec.json.Decoder(_BatchLine)
    wanted = api_path(settings.api)
    for number, line in _lines(path):
        try:
            item = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise WorkloadError(f"{path}, line {number}: no request of OpenAI's batch format: {error}") from error
        if item.url and item.url != wanted:
            raise WorkloadError(f"{path}, line {number}: a request for {item.url}; this run is for {wanted} (see --api)")
        body = {name: value for name, value in item.body.items() if name not in ("stream", "stream_options")}
        if ("messages" if settings.api == "chat" else "prompt") not in body:
            raise WorkloadError(f"{path}, line {number}: the body is not one for {wanted}")
        body["model"] = settings.model
        if settings.output_tokens is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = settings.output_tokens
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        yield RequestDraft(body=body, target_prompt_tokens=None, target_output_tokens=limit if isinstance(limit, int) else None)


def draft_sharegpt(settings: RunSettings, path: Path) -> Iterator[RequestDraft]:
    """ShareGPT conversations: an array or JSON lines of {conversations: [{from, value}]}. Each becomes a conversation of turns.

    A turn's history holds the recorded answers; how long an answer may get is `settings.output_tokens`, or about the recorded
    answer's length. Conversations without a user's words are passed over. Raises WorkloadError for another format.
    """
    for place, conversation in _shared_conversations(path):
        messages: list[dict[str, str]] = []
        turns: list[RequestDraft] = []
        for said in conversation.conversations:
            role = _ROLES.get(said.sender)
            if role is None:
                raise WorkloadError(f"{path}, {place}: said by {said.sender!r}, who is none of {', '.join(_ROLES)}")
            if role == "assistant" and messages and messages[-1]["role"] == "user":
                turns.append(_turn(settings, messages, said.value))
            messages.append({"role": role, "content": said.value})
        if messages and messages[-1]["role"] == "user":
            turns.append(_turn(settings, messages, ""))
        if turns:
            yield msgspec.structs.replace(turns[0], then=tuple(turns[1:]))


def _turn(settings: RunSettings, messages: list[dict[str, str]], recorded: str) -> RequestDraft:
    about = len(recorded) // CHARACTERS_PER_TOKEN if recorded else 128
    limit = settings.output_tokens or min(MAX_RECORDED_TOKENS, max(1, about))
    return RequestDraft(body=request_body(settings, messages, limit), target_prompt_tokens=None, target_output_tokens=limit)


def _shared_conversations(path: Path) -> Iterator[tuple[str, _SharedConversation]]:
    try:
        with path.open("rb") as file:
            is_array = file.read(256).lstrip().startswith(b"[")
            size = file.seek(0, 2)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    if not is_array:
        decoder = msgspec.json.Decoder(_SharedConversation)
        for number, line in _lines(path):
            try:
                yield f"line {number}", decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise WorkloadError(f"{path}, line {number}: no ShareGPT conversation: {error}") from error
        return
    if size > MAX_ARRAY_BYTES:
        raise WorkloadError(f"{path}: an array of more than {MAX_ARRAY_BYTES >> 30} GiB; make JSON lines of it")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_SharedConversation])
    except (OSError, msgspec.MsgspecError) as error:
        raise WorkloadError(f"{path}: no array of ShareGPT conversations: {error}") from error
    yield from ((f"conversation {number}", item) for number, item in enumerate(found, start=1))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with something in them, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error

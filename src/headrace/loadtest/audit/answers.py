"""Reading whole answers and error bodies of the OpenAI API, tolerant of what is missing and strict about what is said.

Owns: Answer, ErrorBody and their readers. Runs in: audit, pure. Must not know: sockets, checks.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.loadtest.audit.findings import CannotJudge, Finding, WrongAnswer, failed, quote, refused
from headrace.loadtest.audit.wire import Reply

REFUSAL_STATUSES = (400, 404, 405, 413, 415, 422, 501)
TRACE_SIGNS = re.compile(
    r"Traceback \(most recent|\bFile \"[^\"]+\", line \d+|\.py\", line|<html|<!doctype|site-packages/", re.IGNORECASE
)


class Usage(msgspec.Struct):
    """Token counts; None where the server does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None

    def shown(self) -> str:
        """For evidence: prompt+completion=total."""
        return f"{self.prompt_tokens}+{self.completion_tokens}={self.total_tokens}"


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice. `text`: what the model wrote, its reasoning included. `tool_calls`: as sent."""

    index: int
    text: str
    role: str | None
    finish_reason: str | None
    logprobs: Any
    tool_calls: list[Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole chat completion or text completion, choices in the order of the body."""

    choices: list[Choice]
    usage: Usage
    has_usage: bool
    object: str | None
    id: str | None
    model: str | None
    created: int | None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self.choices[0].finish_reason


class ErrorBody(msgspec.Struct):
    """The object under "error"."""

    message: str | None = None
    type: str | None = None
    param: Any = None
    code: Any = None


def read_answer(reply: Reply) -> Answer:
    """Raise WrongAnswer for a 200 that is no completion, and for anything but a 200."""
    if reply.status != 200 or reply.fault:
        raise WrongAnswer(f"{reply.request}: {reply.summary()}")
    try:
        body = msgspec.json.decode(reply.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WrongAnswer(f"200 with a body that is no completion ({error}): {reply.summary()}") from None
    if not body.choices:
        raise WrongAnswer(f"200 with no choices: {reply.summary()}")
    choices = [_choice(choice) for choice in body.choices]
    usage = body.usage
    return Answer(choices, usage or Usage(), usage is not None, body.object, body.id, body.model, body.created)


def expect_answer(reply: Reply, what: str) -> Answer:
    """The answer to a plain request that a check only needs for comparison. Raise CannotJudge when there is none."""
    try:
        return read_answer(reply)
    except WrongAnswer as error:
        raise CannotJudge(f"{what} got no answer: {error}") from None


def read_error(reply: Reply) -> ErrorBody | None:
    """The error object of the body, in OpenAI's shape or SGLang's flat one; None when there is neither."""
    value = reply.json()
    if not isinstance(value, dict):
        return None
    inner = value.get("error", value if value.get("object") == "error" else None)
    try:
        return msgspec.convert(inner, ErrorBody) if isinstance(inner, dict) else None
    except msgspec.ValidationError:
        return None


def is_refusal(reply: Reply) -> bool:
    """Whether the server said no on purpose: a client error, or 501."""
    return reply.status in REFUSAL_STATUSES and not reply.fault


def judge_refusal(reply: Reply, field: str) -> Finding:
    """A reply that is not a 200, to a request that used an optional field."""
    if not is_refusal(reply):
        return failed(f"{field}: {reply.summary()}")
    error = read_error(reply)
    message = (error.message if error else None) or ""
    if not message:
        return failed(f"{field} is refused without an error message: {reply.summary()}")
    named = "" if field in message or (error and error.param == field) else f" (does not name {field})"
    return refused(f"{reply.status} {quote(message, 140)}{named}")


def _choice(choice: _Choice) -> Choice:
    message = choice.message or _Message()
    thought = message.reasoning_content or message.reasoning or ""
    written = message.content if message.content is not None else choice.text or ""
    return Choice(
        choice.index, thought + written, message.role, choice.finish_reason, choice.logprobs, message.tool_calls or []
    )

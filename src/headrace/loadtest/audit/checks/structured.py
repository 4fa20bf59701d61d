"""Log probabilities, JSON output and tools: are they there, and in the right shape?

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
"""

from typing import Any

import msgspec

from headrace.loadtest.audit.answers import Answer, judge_refusal, read_answer
from headrace.loadtest.audit.checks.fields import OBEY, answered, ask_field
from headrace.loadtest.audit.findings import Finding, failed, honoured, ignored, passed, quote, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import Session, Surface

JSON_TOKENS = 64
SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer"}},
    "required": ["depth"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_depth",
        "description": "Depth of a river in metres",
        "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
    },
}
MAX_ROUNDING = 0.01  # log probabilities a little above 0 come from rounding


class _Token(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list["_TopToken"]


class _TopToken(msgspec.Struct):
    token: str
    logprob: float


class _ChatLogprobs(msgspec.Struct):
    content: list[_Token]


class _TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


@check("field.logprobs-chat", "logprobs and top_logprobs (chat)", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def logprobs_chat(session: Session) -> Finding:
    """One entry for each token, with its alternatives (LOG-01, LOG-02)."""
    session.need(Surface.CHAT)
    answers = answered([await ask_field(session, Surface.CHAT, logprobs=True, top_logprobs=2, max_tokens=6)], "logprobs")
    return answers if isinstance(answers, Finding) else judge_chat_logprobs(answers[0], 2)


def judge_chat_logprobs(answer: Answer, num_top: int) -> Finding:
    """content[] of token, logprob, bytes, top_logprobs."""
    value = answer.choices[0].logprobs
    if value is None:
        return ignored("logprobs is null though asked for")
    try:
        entries = msgspec.convert(value, _ChatLogprobs).content
    except msgspec.ValidationError as error:
        return failed(f"wrong shape ({error}): {quote(str(value), 120)}")
    counted = answer.usage.completion_tokens
    if counted is not None and counted - len(entries) not in (0, 1):  # the end token may have no entry
        return failed(f"{len(entries)} entries for {counted} tokens")
    if any(entry.logprob > MAX_ROUNDING for entry in entries):
        return failed(f"a log probability above 0: {max(entry.logprob for entry in entries)}")
    wrong = [len(entry.top_logprobs) for entry in entries if not num_top <= len(entry.top_logprobs) <= num_top + 1]
    if wrong:
        return failed(f"{wrong[0]} alternatives where {num_top} were asked for")
    if any(entry.top_logprobs and entry.logprob > entry.top_logprobs[0].logprob + MAX_ROUNDING for entry in entries):
        return failed("a chosen token is likelier than the first alternative")
    return honoured(f"{len(entries)} entries with {num_top} alternatives each")


@check("field.logprobs-text", "logprobs (completions)", Group.FIELDS, weight=1, requests=1, hint=OBEY)
async def logprobs_text(session: Session) -> Finding:
    """Four arrays of one length (LOG-02, LOG-04)."""
    session.need(Surface.TEXT)
    answers = answered([await ask_field(session, Surface.TEXT, logprobs=2, max_tokens=6)], "logprobs")
    return answers if isinstance(answers, Finding) else judge_text_logprobs(answers[0])


def judge_text_logprobs(answer: Answer) -> Finding:
    """tokens, token_logprobs, top_logprobs, text_offset."""
    value = answer.choices[0].logprobs
    if value is None:
        return ignored("logprobs is null though asked for")
    try:
        arrays = msgspec.convert(value, _TextLogprobs)
    except msgspec.ValidationError as error:
        return failed(f"wrong shape ({error}): {quote(str(value), 120)}")
    lengths = {
        len(arrays.tokens),
        len(arrays.token_logprobs),
        len(arrays.text_offset),
        len(arrays.top_logprobs or arrays.tokens),
    }
    if len(lengths) != 1:
        return failed(f"arrays of different lengths: {sorted(lengths)}")
    counted = answer.usage.completion_tokens
    if counted is not None and counted - len(arrays.tokens) not in (0, 1):
        return failed(f"{len(arrays.tokens)} entries for {counted} tokens")
    return honoured(f"{len(arrays.tokens)} entries in each array")


@check(
    "field.logprobs-limit",
    "top_logprobs beyond 20 is refused",
    Group.FIELDS,
    weight=1,
    requests=1,
    hint="Refuse what is beyond the API's limit with 400, or honour it; never cut it silently.",
)
async def logprobs_limit(session: Session) -> Finding:
    """Refused, or really as many (LOG-01)."""
    session.need(Surface.CHAT)
    reply = await ask_field(session, Surface.CHAT, logprobs=True, top_logprobs=21, max_tokens=2)
    if reply.status != 200:
        finding = judge_refusal(reply, "top_logprobs")
        if finding.verdict != "refused":
            return finding
        if "top_logprobs" not in reply.body.decode("utf-8", "replace"):
            return skipped(f"logprobs are refused altogether: {reply.summary()}")
        return passed(reply.summary())
    return judge_chat_logprobs(read_answer(reply), 21)


async def _json_answer(session: Session, response_format: dict[str, Any]) -> Answer | Finding:
    session.need(Surface.CHAT)
    prompt = "Tell me about rivers in plain words. (An answer in JSON is possible too.)"
    reply = await ask_field(session, Surface.CHAT, prompt, response_format=response_format, max_tokens=JSON_TOKENS)
    answers = answered([reply], "response_format")
    return answers if isinstance(answers, Finding) else answers[0]


def judge_json(answer: Answer, required_key: str = "") -> Finding:
    """Valid JSON, or the beginning of it when the limit of tokens cut it."""
    text = answer.text.strip()
    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        if answer.finish_reason == "length" and text.startswith("{"):
            return honoured(f"JSON, cut by max_tokens: {quote(text)}")
        return ignored(f"no JSON: {quote(text)}")
    if required_key and not (isinstance(value, dict) and set(value) == {required_key} and type(value[required_key]) is int):
        return ignored(f"JSON, but not of the schema: {quote(text)}")
    return honoured(quote(text))


@check("field.json_object", "response_format json_object", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def json_object(session: Session) -> Finding:
    """The prompt leads to prose, so JSON comes only if it is enforced."""
    answer = await _json_answer(session, {"type": "json_object"})
    return answer if isinstance(answer, Finding) else judge_json(answer)


@check("field.json_schema", "response_format json_schema", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def json_schema(session: Session) -> Finding:
    """One integer named depth and nothing else."""
    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA, "strict": True}}
    answer = await _json_answer(session, wanted)
    return answer if isinstance(answer, Finding) else judge_json(answer, "depth")


@check("field.tools", "tools with a named tool_choice", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def tools(session: Session) -> Finding:
    """The named function is called with JSON arguments."""
    session.need(Surface.CHAT)
    choice = {"type": "function", "function": {"name": "get_depth"}}
    reply = await ask_field(
        session, Surface.CHAT, "How deep is the Danube?", tools=[TOOL], tool_choice=choice, max_tokens=JSON_TOKENS
    )
    answers = answered([reply], "tools")
    return answers if isinstance(answers, Finding) else judge_tool_call(answers[0])


def judge_tool_call(answer: Answer) -> Finding:
    """tool_calls[] of id, type, function {name, arguments}."""
    calls = answer.choices[0].tool_calls
    if not calls:
        return ignored(f"no tool_calls but text: {quote(answer.text)}")
    function = calls[0].get("function") if isinstance(calls[0], dict) else None
    if not isinstance(function, dict) or function.get("name") != "get_depth" or not isinstance(function.get("arguments"), str):
        return failed(f"wrong shape: {quote(str(calls[0]), 120)}")
    try:
        msgspec.json.decode(function["arguments"].encode())
    except msgspec.DecodeError:
        if answer.finish_reason != "length":
            return failed(f"the arguments are no JSON: {quote(function['arguments'])}")
    return honoured(f"get_depth({quote(function['arguments'])}), finish_reason {answer.finish_reason}")

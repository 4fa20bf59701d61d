"""Are wrong requests refused with the right status and an error object, and never with HTML or a trace?

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
Only requests that a careless application may really send: nothing here is made to break a server.
"""

from typing import Any

from headrace.loadtest.audit.answers import TRACE_SIGNS, expect_answer, is_refusal, read_answer, read_error
from headrace.loadtest.audit.checks.fields import ask_field
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, skipped
from headrace.loadtest.audit.registry import Check, Group, check
from headrace.loadtest.audit.session import Session, Surface
from headrace.loadtest.audit.wire import Reply

MAX_PROMPT_CHARS = 200_000
GUESSED_MODEL_LEN = 32_768
CHARS_PER_TOKEN = 6  # of the filler: "lorem " is at least one token
MAX_ERROR_BYTES = 4096
REFUSAL_SECONDS = 10.0  # what should be refused is not worth waiting for longer
INPUT_HINT = "Validate at the door: 400 with an error object that names the field."


def long_prompt(session: Session) -> str:
    """Surely longer than the context, within MAX_PROMPT_CHARS. Raise CannotJudge where that is not enough."""
    tokens = session.facts.max_model_len or GUESSED_MODEL_LEN
    if (tokens + 64) * CHARS_PER_TOKEN > MAX_PROMPT_CHARS:
        raise CannotJudge(f"a context of {tokens} tokens is more than an audit fills")
    return "lorem " * (tokens + 64)


def judge_refused(reply: Reply, what: str) -> Finding:
    """A 4xx with an error object."""
    if reply.status == 200 and not reply.fault:
        return failed(f"{what} was accepted: {reply.summary()}")
    if reply.fault or not is_refusal(reply):
        return failed(f"{what}: {reply.summary()}")
    error = read_error(reply)
    if error is None or not error.message:
        return failed(f"{what}: refused without an error object: {reply.summary()}")
    return passed(reply.summary())


def _add_input_check(name: str, what: str, weight: int, body: Any, *, raw: bool = False, needs: Surface | None = None) -> None:
    """Register one wrong body that must be refused. `body`: fields over an ordinary request, or the whole body if raw."""

    async def run(session: Session) -> Finding:
        surface = needs or session.main_surface()
        session.need(surface)
        ask = body if raw else session.body(surface, max_tokens=8) | body
        if isinstance(ask, dict):
            ask = {key: value for key, value in ask.items() if value is not ...}
        seconds = min(REFUSAL_SECONDS, session.timeout_seconds)
        return judge_refused(await session.post(surface.path, ask, timeout_seconds=seconds), what)

    check(f"error.{name}", f"{what} is refused", Group.ERRORS, weight=weight, requests=1, hint=INPUT_HINT)(run)


_add_input_check("broken-json", "broken JSON", 2, b'{"model": "m", x}', raw=True)
_add_input_check("empty-body", "an empty body", 1, b"", raw=True)
_add_input_check("array-body", "a body that is no object", 1, b"[]", raw=True)
_add_input_check("wrong-type", "a temperature that is no number", 2, {"temperature": "warm"})
_add_input_check("no-messages", "a chat without messages", 2, {"messages": ...}, needs=Surface.CHAT)
_add_input_check("empty-messages", "an empty list of messages", 1, {"messages": []}, needs=Surface.CHAT)
_add_input_check("wrong-messages", "messages that are no list", 1, {"messages": "hello"}, needs=Surface.CHAT)
_add_input_check("unknown-role", "an unknown role", 1, {"messages": [{"role": "wizard", "content": "hi"}]}, needs=Surface.CHAT)
_add_input_check("max_tokens-zero", "max_tokens 0", 1, {"max_tokens": 0}, needs=Surface.CHAT)
_add_input_check("max_tokens-negative", "max_tokens -1", 2, {"max_tokens": -1})
_add_input_check("max_tokens-fraction", "max_tokens 1.5", 1, {"max_tokens": 1.5})
_add_input_check("temperature-negative", "temperature -1", 1, {"temperature": -1})
_add_input_check("top_p-range", "top_p 2", 1, {"top_p": 2})
_add_input_check("n-zero", "n 0", 1, {"n": 0})
_add_input_check("penalty-range", "frequency_penalty 100", 1, {"frequency_penalty": 100})
_add_input_check("logit_bias-key", "a logit_bias key that is no token id", 1, {"logit_bias": {"abc": 1}})
_add_input_check("logit_bias-range", "a logit_bias of 1000", 1, {"logit_bias": {"5": 1000}})
_add_input_check("no-prompt", "a completion without prompt", 1, {"prompt": ...}, needs=Surface.TEXT)


@check(
    "error.nan", "NaN as a number is refused", Group.ERRORS, weight=2, requests=1, hint="NaN is no JSON (INP-14): answer 400."
)
async def not_a_number(session: Session) -> Finding:
    """A client that formats JSON by hand."""
    surface = session.main_surface()
    data = session.posting(surface.path, session.body(surface, max_tokens=8, temperature=0.5)).body.replace(b"0.5", b"NaN")
    seconds = min(REFUSAL_SECONDS, session.timeout_seconds)
    return judge_refused(await session.post(surface.path, data, timeout_seconds=seconds), "temperature NaN")


@check(
    "error.stop-empty",
    'stop "" is refused or stops nothing',
    Group.ERRORS,
    weight=1,
    requests=2,
    hint="An empty stop string is everywhere: refuse it, or take it as none (STP-07).",
)
async def stop_empty(session: Session) -> Finding:
    """An empty answer is the fault."""
    surface = session.main_surface()
    plain = expect_answer(await ask_field(session, surface, max_tokens=8), "the comparison")
    reply = await ask_field(session, surface, max_tokens=8, stop=[""])
    if reply.status != 200:
        return judge_refused(reply, 'stop [""]')
    answer = read_answer(reply)
    if not session.need(surface).is_stable:
        return passed("accepted") if answer.text else failed("the answer is empty")
    return passed("taken as none") if answer.text == plain.text else failed(f"the answer became {answer.text!r}")


@check(
    "error.unknown-model",
    "an unknown model: 404 model_not_found",
    Group.ERRORS,
    weight=2,
    requests=1,
    hint="Answering for another model hides a wrong setting: 404, code model_not_found (LIM-13).",
)
async def unknown_model(session: Session) -> Finding:
    """404 with that code; vLLM's code is the status number, its type NotFoundError."""
    reply = await session.generate(session.main_surface(), max_tokens=2, model="audit-no-such-model")
    finding = judge_refused(reply, "an unknown model")
    error = read_error(reply)
    if finding.credit and reply.status != 404:
        return failed(f"refused with {reply.status}, not 404: {reply.summary()}")
    if finding.credit and error and not ("not_found" in f"{error.code}" or "NotFound" in f"{error.type}"):
        return failed(f"404, but code is {error.code!r}, not 'model_not_found'")
    return finding


@check(
    "error.unknown-path",
    "an unknown path: 404",
    Group.ERRORS,
    weight=1,
    requests=1,
    hint="Answer 404 with an error object, so that SDKs can show it.",
)
async def unknown_path(session: Session) -> Finding:
    """As JSON."""
    reply = await session.post("/v1/audit-no-such-path", {})
    if reply.status != 404:
        return failed(reply.summary())
    return passed(reply.summary()) if reply.json() is not None else failed(f"no JSON: {reply.summary()}")


@check(
    "error.wrong-method",
    "GET on a POST endpoint: 405 or 404",
    Group.ERRORS,
    weight=1,
    requests=1,
    hint="Answer 405 with Allow.",
)
async def wrong_method(session: Session) -> Finding:
    """Someone opens the address in a browser."""
    reply = await session.get(session.main_surface().path)
    return passed(reply.summary()) if reply.status in (404, 405) else failed(reply.summary())


@check(
    "error.context-length",
    "an over-long prompt: 400 context_length_exceeded",
    Group.ERRORS,
    weight=3,
    requests=1,
    hint="Refuse with 400 and code context_length_exceeded; never cut the prompt silently (LIM-01, LIM-02).",
)
async def context_length(session: Session) -> Finding:
    """Longer than /v1/models says, or than a guess."""
    prompt = long_prompt(session)
    reply = await ask_field(session, session.main_surface(), prompt, max_tokens=4)
    if reply.status == 200 and session.facts.max_model_len is None:
        counted = expect_answer(reply, "the long prompt").usage.prompt_tokens
        if counted is not None and counted >= len(prompt) // CHARS_PER_TOKEN:
            return skipped(f"the server has room for it: {counted} prompt tokens")
        return failed(f"answered with {counted} prompt tokens: the prompt was cut")
    finding = judge_refused(reply, "an over-long prompt")
    error = read_error(reply)
    says = f"{error.code} {error.type} {error.message}".lower() if error else ""
    if finding.credit and not ("context" in says or "length" in says or "too long" in says):
        return failed(f"refused, but not for its length: {reply.summary()}")
    return finding


def journal_checks_last(checks: list[Check]) -> list[Check]:
    """Checks that judge all replies so far stand at the end."""
    return sorted(checks, key=lambda item: item.id in ("error.shape", "error.no-traces", "error.short", "error.no-5xx"))


def _errors(session: Session) -> list[Reply]:
    """Client errors of the API proper: what probing for other servers' paths brought does not count."""
    found = [
        reply
        for reply in session.journal
        if reply.status is not None
        and reply.status >= 400
        and "/v1/" in reply.request
        and not reply.request.startswith(("HEAD", "OPTIONS"))
    ]
    if not found:
        raise CannotJudge("no error came up")
    return found


@check(
    "error.shape",
    "all errors are OpenAI error objects",
    Group.ERRORS,
    weight=3,
    requests=0,
    hint='{"error": {"message", "type", "param", "code"}} for every status from 400 on, 404, 405 and 422 too (LIM-10).',
)
async def shape(session: Session) -> Finding:
    """Over all error replies of the audit."""
    errors = _errors(session)
    wrong = [reply for reply in errors if not _is_error_object(reply)]
    if wrong:
        return failed(f"{len(wrong)} of {len(errors)} are not, such as {wrong[0].request}: {wrong[0].summary()}")
    return passed(f"{len(errors)} of {len(errors)}")


def _is_error_object(reply: Reply) -> bool:
    error = read_error(reply)
    return error is not None and bool(error.message) and bool(error.type) and reply.media_type == "application/json"


@check(
    "error.no-traces",
    "no error shows HTML or a stack trace",
    Group.ERRORS,
    weight=2,
    requests=0,
    hint="Traces show paths and versions to strangers; log them instead.",
)
async def no_traces(session: Session) -> Finding:
    """Over all error replies of the audit."""
    errors = _errors(session)
    for reply in errors:
        if TRACE_SIGNS.search(reply.body.decode("utf-8", "replace")):
            return failed(f"{reply.request}: {reply.summary()}")
    return passed(f"none in {len(errors)} errors")


@check(
    "error.short",
    "errors do not repeat the request",
    Group.ERRORS,
    weight=1,
    requests=0,
    hint="Bound the message: a few KB in must not become many out (LIM-11).",
)
async def short(session: Session) -> Finding:
    """Over all error replies of the audit."""
    longest = max(_errors(session), key=lambda reply: len(reply.body))
    shown = f"the longest has {len(longest.body)} bytes ({longest.request})"
    return failed(shown) if len(longest.body) > MAX_ERROR_BYTES else passed(shown)


@check(
    "error.no-5xx",
    "no request of the audit got a 500 or a cut connection",
    Group.ERRORS,
    weight=3,
    requests=0,
    hint="A 500 for a client's mistake makes clients retry it, and hides real faults.",
)
async def no_server_errors(session: Session) -> Finding:
    """503 and 501 are answers; 500, 502, 504 and cut connections are not. A time-out is judged where it happened."""
    bad = [
        reply
        for reply in session.journal
        if (reply.fault and not reply.fault.startswith("timeout")) or reply.status in (500, 502, 504)
    ]
    if bad:
        shown = "; ".join(f"{reply.request}: {reply.summary()[:90]}" for reply in bad[:3])
        return failed(f"{len(bad)} of {session.num_requests} requests, such as {shown}")
    return passed(f"none in {session.num_requests} requests")

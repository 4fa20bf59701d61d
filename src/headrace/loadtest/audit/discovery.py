"""The first requests of an audit: which model, which endpoints answer, what the server says of itself.

Owns: discover. Runs in: audit. Must not know: any check.
"""

from typing import Any

from headrace.loadtest.audit.answers import read_answer
from headrace.loadtest.audit.exposition import read_exposition
from headrace.loadtest.audit.findings import WrongAnswer, clip
from headrace.loadtest.audit.session import METRICS_PATH, Reference, Session, Surface
from headrace.loadtest.audit.wire import Reply

DISCOVERY_REQUESTS = 7
DIALECTS = {"headrace_": "Headrace", "vllm:": "vLLM", "sglang:": "SGLang", "tgi_": "TGI", "llamacpp:": "llama.cpp"}


class AuditError(Exception):
    """The audit cannot be done at all: nobody answers, or nothing generates. The text is for people."""


async def discover(session: Session) -> None:
    """Fill in session.facts and session.model. Raise AuditError when there is nothing to audit."""
    facts = session.facts
    facts.models_reply = models = await session.get("/v1/models")
    if models.status is None:
        raise AuditError(f"No answer: {models.fault or 'the connection closed'}.")
    if models.status in (401, 403):
        raise AuditError(f"The server wants another key ({models.status}); give it with --key.")
    entry = _entry(models, session.model)
    session.model = session.model or str(entry.get("id") or "")
    length = entry.get("max_model_len")
    facts.max_model_len = length if type(length) is int and length > 0 else None
    for name in ("server", "x-powered-by", "via"):
        value = models.header(name)
        if value:
            facts.server[name] = clip(value, 80)
    await _version(session)
    await _metrics(session)
    for surface in Surface:
        await _reference(session, surface)
    if not facts.references:
        reasons = "; ".join(f"{surface.path}: {why}" for surface, why in facts.why_not.items())
        raise AuditError(f"Nothing generates. {reasons}")


async def _version(session: Session) -> None:
    reply = await session.get("/version")
    value = reply.json()
    if reply.status == 200 and isinstance(value, dict) and isinstance(value.get("version"), str):
        session.facts.server["version"] = clip(value["version"], 80)


async def _metrics(session: Session) -> None:
    reply = await session.get(METRICS_PATH)
    session.facts.metrics_reply = reply
    if reply.status != 200:
        return
    session.facts.metrics_path = METRICS_PATH
    names = read_exposition(reply.body.decode("utf-8", "replace")).kinds
    kinds = [kind for prefix, kind in DIALECTS.items() if any(name.startswith(prefix) for name in names)]
    if kinds:
        session.facts.server["metrics of"] = ", ".join(kinds)


async def _reference(session: Session, surface: Surface) -> None:
    texts = []
    for _ in range(2):
        try:
            reply = await session.generate(surface)
            answer = read_answer(reply)
        except WrongAnswer as error:
            session.facts.why_not[surface] = clip(str(error), 160)
            return
        texts.append(answer.text)
    session.facts.references[surface] = Reference(answer, texts[0] == texts[1], reply.seconds)


def _entry(reply: Reply, model: str) -> dict[str, Any]:
    """The entry of the model in /v1/models, or the first one."""
    value = reply.json()
    data = value.get("data") if isinstance(value, dict) else None
    entries = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    return next((item for item in entries if not model or item.get("id") == model), {})

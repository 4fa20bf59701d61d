"""Health probes, the list of models, keys, and the metrics that an operator needs.

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
"""

from headrace.loadtest.audit.answers import read_error
from headrace.loadtest.audit.exposition import Exposition, read_exposition
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import Session
from headrace.loadtest.audit.streams import read_stream
from headrace.loadtest.audit.wire import Ask, Reply

HEALTH_PATHS = ("/health", "/healthz", "/ping")
LIVE_PATHS = ("/health/live", "/livez", "/v2/health/live")
READY_PATHS = ("/health/ready", "/readyz", "/v2/health/ready")
THINGS = {
    "ttft": ("time to first token", 2),
    "tbt": ("time between tokens (ITL)", 2),
    "running": ("running requests", 1),
    "waiting": ("queued requests", 2),
    "kv": ("KV cache use", 2),
    "tokens": ("generated tokens", 1),
    "finished": ("finished requests", 1),
}


async def _first_ok(session: Session, paths: tuple[str, ...]) -> str | None:
    for path in paths:
        reply = await session.get(path)
        if reply.status is not None and 200 <= reply.status < 300:
            return path
    return None


@check(
    "health.probe",
    "a health probe answers",
    Group.HEALTH,
    weight=2,
    requests=len(HEALTH_PATHS),
    hint="Serve /health: load balancers and orchestrators ask it.",
)
async def health(session: Session) -> Finding:
    """Any usual path."""
    path = await _first_ok(session, HEALTH_PATHS)
    return passed(f"{path} says 200") if path else failed(f"none of {', '.join(HEALTH_PATHS)}")


@check(
    "health.live-ready",
    "liveness and readiness are asked apart",
    Group.HEALTH,
    weight=1,
    requests=len(LIVE_PATHS) + len(READY_PATHS),
    hint="While a model loads or a server drains it is alive but not ready: one probe cannot say both (OPS-04).",
)
async def live_ready(session: Session) -> Finding:
    """Any usual pair of paths."""
    live, ready = await _first_ok(session, LIVE_PATHS), await _first_ok(session, READY_PATHS)
    if live and ready:
        return passed(f"{live} and {ready}")
    return failed(f"liveness {live or 'none'}, readiness {ready or 'none'} of the usual paths")


@check(
    "models.list",
    "/v1/models lists the model",
    Group.HEALTH,
    weight=2,
    requests=0,
    hint='{"object": "list", "data": [{"id", "object": "model", ...}]}',
)
async def models_list(session: Session) -> Finding:
    """As asked at the beginning."""
    reply = session.facts.models_reply
    if reply is None:
        raise CannotJudge("not asked")
    return judge_models(reply, session.model)


def judge_models(reply: Reply, model: str) -> Finding:
    """An object list of entries with id and object."""
    value = reply.json()
    data = value.get("data") if isinstance(value, dict) and reply.status == 200 else None
    if not isinstance(data, list) or not all(isinstance(item, dict) and isinstance(item.get("id"), str) for item in data):
        return failed(reply.summary())
    ids = [item["id"] for item in data]
    if value.get("object") != "list" or any(item.get("object") != "model" for item in data):
        return failed(f"object fields are missing or wrong: {reply.summary()}")
    return passed(f"{', '.join(ids[:3])}") if model in ids else failed(f"{model!r} is not among {ids[:3]}")


@check(
    "models.one",
    "/v1/models/{id} agrees",
    Group.HEALTH,
    weight=1,
    requests=1,
    hint="SDKs call models.retrieve(id) to see whether a model is there.",
)
async def models_one(session: Session) -> Finding:
    """The served one is found."""
    if not session.model or "?" in session.model or "#" in session.model:
        raise CannotJudge("no model id that fits into a path")
    reply = await session.get(f"/v1/models/{session.model}")
    value = reply.json()
    if reply.status == 200 and isinstance(value, dict) and value.get("id") == session.model:
        return passed(f"200 {session.model}")
    return failed(reply.summary())


@check(
    "models.context",
    "the context length is told",
    Group.HEALTH,
    weight=0,
    requests=0,
    hint="For information: max_model_len in /v1/models lets clients fit their prompts.",
)
async def models_context(session: Session) -> Finding:
    """Informational."""
    tokens = session.facts.max_model_len
    return passed(f"max_model_len {tokens}") if tokens else failed("/v1/models has no max_model_len")


@check(
    "key.required",
    "without the key: 401",
    Group.HEALTH,
    weight=3,
    requests=2,
    hint="Guard every generating route by default; answer 401 with an error object (AUT-01).",
)
async def key_required(session: Session) -> Finding:
    """No key, and a wrong one. Judged only when a key was given."""
    if not session.key:
        raise CannotJudge("no --key was given")
    surface = session.main_surface()
    body = session.posting(surface.path, session.body(surface, max_tokens=2)).body
    plain = (("Content-Type", "application/json"),)
    for what, headers in (("no key", plain), ("a wrong key", (*plain, ("Authorization", "Bearer audit-wrong-key")))):
        reply = await session.ask(Ask("POST", surface.path, headers, body, session.timeout_seconds))
        if reply.status not in (401, 403):
            return failed(f"with {what}: {reply.summary()}")
        if read_error(reply) is None:
            return failed(f"with {what}: no error object: {reply.summary()}")
    return passed("401 or 403 without the key and with a wrong one")


def _exposition(session: Session) -> tuple[Reply, Exposition]:
    reply = session.facts.metrics_reply
    if reply is None or reply.status != 200:
        raise CannotJudge("no /metrics")
    return reply, read_exposition(reply.body.decode("utf-8", "replace"))


@check(
    "metrics.exposed",
    "metrics in Prometheus' text format, valid",
    Group.METRICS,
    weight=3,
    requests=0,
    hint="Serve /metrics with HELP and TYPE once for each family, and no NaN (MET-10).",
)
async def metrics_exposed(session: Session) -> Finding:
    """Parsed by Prometheus' own parser."""
    try:
        reply, found = _exposition(session)
    except CannotJudge as reason:
        return failed(str(reason))
    if found.faults:
        return failed("; ".join(found.faults))
    if reply.media_type not in ("text/plain", "application/openmetrics-text"):
        return failed(f"content type {reply.header('content-type')}")
    return passed(f"{len(found.kinds)} families, {reply.header('content-type')}")


def _add_metric_check(thing: str, words: str, weight: int) -> None:
    async def run(session: Session) -> Finding:
        try:
            _, found = _exposition(session)
        except CannotJudge as reason:
            return failed(str(reason))
        name = found.find(thing)
        return passed(f"{name} ({found.kinds.get(name, 'counter')})") if name else failed("under none of the known names")

    hint = f"Export {words}; without it nobody can see this from outside."
    check(f"metrics.{thing}", f"metric: {words}", Group.METRICS, weight=weight, requests=0, hint=hint)(run)


for _thing, (_words, _weight) in THINGS.items():
    _add_metric_check(_thing, _words, _weight)


@check(
    "metrics.count",
    "each stream counts once in the TTFT histogram",
    Group.METRICS,
    weight=1,
    requests=5,
    hint="Count when the first token is made, once for each request (MET-04).",
)
async def metrics_count(session: Session) -> Finding:
    """The count before and after three streams."""
    before = await session.metrics()
    if before is None or before.find("ttft") is None:
        raise CannotJudge("no TTFT histogram")
    surface = session.main_surface()
    for _ in range(3):
        read_stream(await session.generate(surface, stream=True, max_tokens=3))
    after = await session.metrics()
    grown = ((after.count("ttft") if after else None) or 0) - (before.count("ttft") or 0)
    if grown == 3:
        return passed("3 streams, count + 3")
    if grown > 3:
        return skipped(f"count + {grown:g} after 3 streams: others use the server too, or it counts twice")
    return failed(f"count + {grown:g} after 3 streams")

"""Keep-alive, methods, slow and chunked senders, HTTP/2: what proxies and SDKs rely on below the API.

Owns: those checks. Runs in: audit. Must not know: sockets (HTTP/2 has its own module).
"""

import asyncio

from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import Session
from headrace.loadtest.audit.wire import Ask, Reply
from headrace.protocol.extras import how_to_install

IDLE_SECONDS = 6.0
HARMLESS = (200, 204, 400, 401, 403, 404, 405, 501)


@check(
    "connection.keep-alive",
    "a connection serves again after 6 s of idling",
    Group.CONNECTIONS,
    weight=2,
    requests=2,
    hint="Keep idle connections longer than proxies do (75 s and more): else they see resets (OPS-05).",
)
async def keep_alive(session: Session) -> Finding:
    """Two GETs over one connection."""
    first = await session.get("/v1/models", lane="idle")
    await session.clock.sleep(IDLE_SECONDS)
    second = await session.get("/v1/models", lane="idle")
    if first.status is None:
        return failed(first.summary())
    if not second.is_reused:
        return failed(f"closed right after the first answer (connection: {first.header('connection')})")
    if second.status is None:
        return failed(f"closed while idle: {second.fault}")
    return passed(f"answered again after {IDLE_SECONDS:.0f} s")


@check(
    "connection.close",
    "Connection: close is obeyed",
    Group.CONNECTIONS,
    weight=1,
    requests=1,
    hint="Close after the answer when asked to.",
)
async def close(session: Session) -> Finding:
    """The answer is whole."""
    reply = await session.get("/v1/models")
    return passed(f"{reply.status}, whole") if reply.is_whole and reply.status else failed(reply.summary())


@check(
    "connection.head",
    "HEAD does no harm",
    Group.CONNECTIONS,
    weight=1,
    requests=2,
    hint="Monitors send HEAD: answer as for GET without a body, or 405; never 500.",
)
async def head(session: Session) -> Finding:
    """On a health path and on the models."""
    replies = [await session.get(path, method="HEAD") for path in ("/health", "/v1/models")]
    return _harmless(replies)


@check(
    "connection.options",
    "OPTIONS does no harm",
    Group.CONNECTIONS,
    weight=1,
    requests=1,
    hint="Browsers send a preflight without the key: answer 204 with CORS headers, or 405; never 500 (AUT-04).",
)
async def options(session: Session) -> Finding:
    """A browser's preflight for a chat."""
    headers = (
        ("Origin", "http://example.com"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization, content-type"),
    )
    return _harmless([await session.ask(Ask("OPTIONS", "/v1/chat/completions", headers, timeout_seconds=10))])


def _harmless(replies: list[Reply]) -> Finding:
    for reply in replies:
        if reply.fault or reply.status not in HARMLESS:
            return failed(f"{reply.request}: {reply.summary()}")
    return passed(", ".join(f"{reply.request} {reply.status}" for reply in replies))


@check(
    "connection.chunked-request",
    "a chunked request body is read",
    Group.CONNECTIONS,
    weight=1,
    requests=1,
    hint="HTTP/1.1 servers must take Transfer-Encoding: chunked (RFC 9112, 7.1); 411 is the only other answer.",
)
async def chunked_request(session: Session) -> Finding:
    """Some clients stream their uploads."""
    surface = session.main_surface()
    ask = session.posting(surface.path, session.body(surface, max_tokens=2))
    reply = await session.ask(Ask("POST", ask.path, ask.headers, ask.body, ask.timeout_seconds, is_chunked=True))
    return passed(f"{reply.status}") if reply.status in (200, 411) else failed(reply.summary())


@check(
    "connection.half-sent",
    "a client that stops in mid-request blocks nobody",
    Group.CONNECTIONS,
    weight=2,
    requests=2,
    hint="Read each connection apart; give up on slow senders after a while.",
)
async def half_sent(session: Session) -> Finding:
    """Half a body is sent and held while another request is answered."""
    surface = session.main_surface()
    whole = session.posting(surface.path, session.body(surface, max_tokens=2))
    drop = asyncio.Event()
    half = Ask("POST", whole.path, whole.headers, whole.body, 30.0, drop=drop, body_limit=len(whole.body) // 2)
    held = asyncio.ensure_future(session.ask(half))
    try:
        await session.clock.sleep(0.3)
        other = await session.post(surface.path, session.body(surface, max_tokens=2), timeout_seconds=20)
    finally:
        drop.set()
        await held
    return passed(f"{other.status} after {other.seconds:.2f} s") if other.status == 200 else failed(other.summary())


@check(
    "connection.http2",
    "HTTP/2",
    Group.CONNECTIONS,
    weight=1,
    requests=1,
    hint="Many streams share one HTTP/2 connection; gateways and gRPC-minded clients use it, with prior knowledge or ALPN.",
)
async def http2(session: Session) -> Finding:
    """ALPN for https, prior knowledge for http."""
    try:
        version, detail = await session.ask_http2("/v1/models")
    except ImportError:
        raise CannotJudge(f"needs httpx with HTTP/2: {how_to_install('bench')}") from None
    return passed(detail) if version == "HTTP/2" else failed(detail)

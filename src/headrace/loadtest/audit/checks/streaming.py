"""Does a stream keep the protocol: framing, roles, finish, [DONE], usage, and tokens that come as they are made?

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
"""

from headrace.loadtest.audit.answers import Answer, is_refusal, read_error
from headrace.loadtest.audit.checks.errors import long_prompt
from headrace.loadtest.audit.checks.fields import ask_field
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, quote, refused, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import Session, Surface
from headrace.loadtest.audit.streams import StreamView, read_stream
from headrace.loadtest.audit.wire import Ask, Reply

MIN_SPREAD = 0.3  # of the request's time, between its first and its last text
MIN_JUDGED_SECONDS = 0.1
MIN_TEXTS = 8
COMPRESSED = ("gzip", "br", "deflate", "zstd")


async def _views(session: Session, *, with_usage: bool = False) -> list[tuple[Surface, StreamView]]:
    session.main_surface()
    return [(surface, read_stream(await session.sample(surface, with_usage=with_usage))) for surface in session.surfaces()]


@check(
    "stream.type",
    "content type text/event-stream",
    Group.STREAMING,
    weight=2,
    requests=1,
    hint="Clients choose the parser by this header.",
)
async def content_type(session: Session) -> Finding:
    """Of a streamed answer."""
    reply = await session.sample(session.main_surface(), with_usage=False)
    if reply.status == 200 and reply.media_type == "text/event-stream":
        return passed(str(reply.header("content-type")))
    return failed(f"{reply.header('content-type')}: {reply.summary()}")


@check(
    "stream.framing",
    "every line is a whole event field, every event whole JSON",
    Group.STREAMING,
    weight=3,
    requests=2,
    hint='Send "data: " + JSON on one line + an empty line; end chunked bodies properly.',
)
async def framing(session: Session) -> Finding:
    """On every surface."""
    views = await _views(session)
    for surface, view in views:
        if view.faults or view.errors:
            return failed(f"{surface.value}: {'; '.join(view.faults + view.errors)}")
    return passed(", ".join(f"{view.num_events} events on {surface.path}" for surface, view in views))


@check(
    "stream.done",
    "[DONE] exactly once, as the last event",
    Group.STREAMING,
    weight=3,
    requests=2,
    hint="Without it clients wait, or take a cut connection for the end (SSE-04).",
)
async def done(session: Session) -> Finding:
    """On every surface."""
    for surface, view in await _views(session):
        if view.num_done != 1 or not view.is_done_last:
            return failed(f"{surface.value}: {view.num_done} times, {'last' if view.is_done_last else 'not last'}")
    return passed("once, last")


@check(
    "stream.finish",
    "one finish_reason, and nothing after it",
    Group.STREAMING,
    weight=3,
    requests=2,
    hint="The chunk that ends a choice has its finish_reason; every other has null (SSE-10).",
)
async def finish(session: Session) -> Finding:
    """On every surface."""
    seen = []
    for surface, view in await _views(session):
        problem = judge_finish(view, 1)
        if problem:
            return failed(f"{surface.value}: {problem}")
        seen.append(f"{surface.value} {view.choices[0].finish_reasons[0]}")
    return passed(", ".join(seen))


def judge_finish(view: StreamView, num_choices: int) -> str:
    """What is wrong, or ""."""
    if sorted(view.choices) != list(range(num_choices)):
        return f"choices {sorted(view.choices)} where {num_choices} were asked for"
    for index, choice in sorted(view.choices.items()):
        if len(choice.finish_reasons) != 1:
            return f"choice {index} has {len(choice.finish_reasons)} finish reasons: {choice.finish_reasons[:3]}"
        if choice.num_after_finish:
            return f"choice {index} goes on after its finish_reason"
    return ""


@check(
    "stream.n",
    "with n=2 each choice streams and finishes once",
    Group.STREAMING,
    weight=1,
    requests=1,
    hint="Interleave the choices by index; each has its own finish_reason (SSE-10).",
)
async def several(session: Session) -> Finding:
    """n=2, streamed."""
    reply = await ask_field(session, session.main_surface(), n=2, temperature=1, max_tokens=4, stream=True)
    if is_refusal(reply):
        error = read_error(reply)
        return refused(f"{reply.status} {quote(error.message or '', 140)}") if error else failed(reply.summary())
    problem = judge_finish(read_stream(reply), 2)
    return failed(problem) if problem else passed("choices 0 and 1, each with one finish_reason")


@check(
    "stream.role",
    "role in the first chunk only (chat)",
    Group.STREAMING,
    weight=1,
    requests=1,
    hint="A role in later chunks breaks SDKs that join deltas (SSE-08).",
)
async def role(session: Session) -> Finding:
    """role_positions is exactly the first."""
    session.need(Surface.CHAT)
    view = read_stream(await session.sample(Surface.CHAT, with_usage=False))
    positions = view.choices[0].role_positions if 0 in view.choices else []
    return passed("first chunk only") if positions == [0] else failed(f"a role in the chunks {positions[:5]}")


@check(
    "stream.identity",
    "one id, object, created and model in all chunks",
    Group.STREAMING,
    weight=1,
    requests=2,
    hint="Logs and SDKs join chunks by id.",
)
async def identity(session: Session) -> Finding:
    """On every surface."""
    for surface, view in await _views(session):
        wanted = "chat.completion.chunk" if surface is Surface.CHAT else "text_completion"
        if len(view.identities) != 1:
            return failed(
                f"{surface.value}: {len(view.identities)} identities in one stream: {sorted(map(str, view.identities))[:2]}"
            )
        identity_of = next(iter(view.identities))
        if identity_of[1] != wanted or not identity_of[0]:
            return failed(f"{surface.value}: id {identity_of[0]!r}, object {identity_of[1]!r}, right is {wanted!r}")
    return passed("the same in every chunk")


@check(
    "stream.usage",
    "include_usage: one last chunk with usage and no choices",
    Group.STREAMING,
    weight=2,
    requests=2,
    hint='Send {"choices": [], "usage": {...}} before [DONE] when stream_options.include_usage is true.',
)
async def usage(session: Session) -> Finding:
    """And its numbers are those of the whole answer."""
    seen = []
    for surface, view in await _views(session, with_usage=True):
        problem = judge_usage(view, session.need(surface).answer, is_stable=session.need(surface).is_stable)
        if problem:
            return failed(f"{surface.value}: {problem}")
        seen.append(f"{surface.value} {view.usages[0].shown()}")
    return passed("as for the whole answer: " + ", ".join(seen))


def judge_usage(view: StreamView, whole: Answer, *, is_stable: bool) -> str:
    """What is wrong, or ""."""
    if not view.usages:
        return "no usage came"
    if len(view.usages) > 1:
        return f"usage came {len(view.usages)} times"
    if view.usage_has_choices:
        return "the usage stands in a chunk with choices"
    got = view.usages[0]
    if is_stable and whole.has_usage and got != whole.usage:
        return f"streamed {got.shown()}, whole {whole.usage.shown()}"
    return ""


@check(
    "stream.usage-unasked",
    "no usage chunk unless asked for",
    Group.STREAMING,
    weight=1,
    requests=2,
    hint="A chunk with empty choices breaks clients that read choices[0] (USE-01).",
)
async def usage_unasked(session: Session) -> Finding:
    """Without stream_options."""
    for surface, view in await _views(session):
        if view.usages and not view.usage_has_choices:
            return failed(f"{surface.value}: a usage chunk with empty choices came unasked")
    return passed("none")


@check(
    "stream.same-text",
    "the stream's text is the whole answer's",
    Group.STREAMING,
    weight=3,
    requests=2,
    hint="Join of all deltas and the non-streamed text must be equal, spaces included.",
)
async def same_text(session: Session) -> Finding:
    """Greedy, on every surface where greedy repeats."""
    session.main_surface()
    for surface in session.surfaces():
        reference = session.need_stable(surface)
        view = read_stream(await session.sample(surface, with_usage=False))
        if view.text != reference.text:
            return failed(f"{surface.value}: streamed {quote(view.text)}, whole {quote(reference.text)}")
    return passed("equal")


@check(
    "stream.early",
    "tokens arrive as they are made",
    Group.STREAMING,
    weight=3,
    requests=2,
    hint="Something holds events back: flush after each event, switch off proxy buffering.",
)
async def early(session: Session) -> Finding:
    """The texts are spread over the request's time."""
    reply = await session.sample(session.main_surface(), with_usage=False)
    return judge_spread(read_stream(reply), reply)


def judge_spread(view: StreamView, reply: Reply) -> Finding:
    """Compare last text - first text with the whole time."""
    times = view.text_times
    if len(times) < MIN_TEXTS:
        return skipped(f"only {len(times)} events with text")
    if reply.seconds < MIN_JUDGED_SECONDS:
        return skipped(f"the whole answer took {reply.seconds * 1000:.0f} ms, too short to tell")
    first, spread = times[0] - reply.sent_at, times[-1] - times[0]
    shown = f"first text after {first * 1000:.0f} ms, last {spread * 1000:.0f} ms later, {len(times)} events"
    if spread < MIN_SPREAD * reply.seconds and len(set(times)) < len(times) / 2:
        return failed(shown)
    return passed(shown)


@check(
    "stream.headers-early",
    "headers come no later than the first token",
    Group.STREAMING,
    weight=1,
    requests=2,
    hint="Proxies time out on headers: send them when the request is taken.",
)
async def headers_early(session: Session) -> Finding:
    """headers_at against the first text."""
    reply = await session.sample(session.main_surface(), with_usage=False)
    view = read_stream(reply)
    if reply.headers_at is None or not view.text_times:
        raise CannotJudge("no text came")
    if reply.seconds < MIN_JUDGED_SECONDS:
        raise CannotJudge("the answer is too short to tell")
    before_end = view.text_times[-1] - reply.headers_at
    if before_end < 0.1 * reply.seconds:
        return failed(f"headers came {before_end * 1000:.0f} ms before the last text of {reply.seconds * 1000:.0f} ms")
    lead = view.text_times[0] - reply.headers_at
    return passed(f"{(reply.headers_at - reply.sent_at) * 1000:.0f} ms, {lead * 1000:.0f} ms before the first text")


@check(
    "stream.uncompressed",
    "streams are not held back by compression",
    Group.STREAMING,
    weight=2,
    requests=1,
    hint="Leave event streams out of gzip middleware, or flush it after each event (SSE-13).",
)
async def uncompressed(session: Session) -> Finding:
    """A client that says Accept-Encoding: gzip still gets its events one by one."""
    surface = session.main_surface()
    ask = session.posting(surface.path, session.body(surface, stream=True))
    ask = Ask(ask.method, ask.path, (*ask.headers, ("Accept-Encoding", "gzip, br")), ask.body, ask.timeout_seconds)
    reply = await session.ask(ask)
    if reply.status != 200:
        return failed(reply.summary())
    coding = reply.header("content-encoding")
    if coding not in COMPRESSED:
        return passed("no content-encoding")
    num_times = len({at for at, _ in reply.pieces})
    if num_times >= MIN_TEXTS:
        return passed(f"{coding}, but flushed: {num_times} pieces")
    return failed(f"content-encoding {coding}, {num_times} pieces")


@check(
    "stream.connection",
    "the connection serves again after a stream",
    Group.STREAMING,
    weight=1,
    requests=2,
    hint="End the chunked body properly and keep the connection: a new one for each stream costs time.",
)
async def connection(session: Session) -> Finding:
    """A stream and then a GET over one connection."""
    surface = session.main_surface()
    stream = await session.post(surface.path, session.body(surface, stream=True, max_tokens=4), lane="after-stream")
    if stream.status != 200 or stream.fault:
        return failed(stream.summary())
    after = await session.get("/v1/models", lane="after-stream")
    if not after.is_reused:
        return failed("the server closed the connection after the stream")
    return passed("a GET over the same connection answered") if after.status else failed(after.summary())


@check(
    "stream.early-error",
    "a fault before the first token reaches streaming clients",
    Group.STREAMING,
    weight=2,
    requests=1,
    hint="Known before the first byte: 400 as JSON. Later: one data: event with an error object (SSE-01).",
)
async def early_error(session: Session) -> Finding:
    """A prompt longer than the context, with stream on."""
    surface = session.main_surface()
    reply = await ask_field(session, surface, long_prompt(session), stream=True, max_tokens=4)
    if is_refusal(reply):
        return passed(reply.summary()) if read_error(reply) else failed(f"no error object: {reply.summary()}")
    if reply.status != 200 or reply.media_type != "text/event-stream":
        return failed(reply.summary())
    view = read_stream(reply)
    if view.errors:
        return passed(f"an error event: {view.errors[0]}")
    if view.text and not view.faults:
        raise CannotJudge("the over-long prompt was answered, so no error could be seen")
    return failed(f"200, and then {'; '.join(view.faults) or 'neither text nor error'}")


@check(
    "stream.role-chunk",
    "no empty chunk ahead of the first token",
    Group.STREAMING,
    weight=0,
    requests=1,
    hint="For information: load tools that take any event for the first token measure too little here.",
)
async def role_chunk(session: Session) -> Finding:
    """Informational."""
    session.need(Surface.CHAT)
    view = read_stream(await session.sample(Surface.CHAT, with_usage=False))
    if view.first_is_role_only:
        return failed("the first chunk has a role and no text")
    return passed("the first chunk has text")


@check(
    "stream.no-cache",
    "caches and proxies are told to leave streams alone",
    Group.STREAMING,
    weight=0,
    requests=1,
    hint="For information: Cache-Control: no-cache and X-Accel-Buffering: no keep common proxies from buffering.",
)
async def no_cache(session: Session) -> Finding:
    """Informational."""
    reply = await session.sample(session.main_surface(), with_usage=False)
    shown = f"cache-control {reply.header('cache-control')}, x-accel-buffering {reply.header('x-accel-buffering')}"
    is_told = "no" in (reply.header("cache-control") or "") or reply.header("x-accel-buffering") == "no"
    return passed(shown) if is_told else failed(shown)

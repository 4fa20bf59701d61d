"""What happens when more comes than fits: are requests finished or refused in a way that clients can obey?

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
The burst is bounded: 48 requests of 8 tokens, 16 in a quick audit.
"""

import asyncio
from collections import Counter

from headrace.loadtest.audit.answers import read_error
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import REFERENCE_TOKENS, Session
from headrace.loadtest.audit.streams import read_stream
from headrace.loadtest.audit.wire import Reply

BURST = 48
QUICK_BURST = 16
BURST_TOKENS = 8
BUSY_STATUSES = (429, 503, 529)
NUM_STREAMS = 6
MAX_RECOVERY = 4.0  # times what a longer request took before, and two seconds


def _sent(session: Session) -> list[Reply]:
    """The burst that `overload.burst` sent. Raise CannotJudge when it did not."""
    replies = [reply for name, reply in session.memory.items() if name.startswith("burst ") and name != "burst probe"]
    if not replies:
        raise CannotJudge("the burst was not sent")
    return replies


async def _late_probe(session: Session) -> Reply:
    await session.clock.sleep(0.2)
    return await session.get("/health")


@check(
    "overload.burst",
    "a burst is finished or refused, never broken",
    Group.OVERLOAD,
    weight=3,
    requests=BURST + 1,
    hint="Queue within bounds and refuse the rest with 429 or 503; no 500, no cut connection, no endless wait.",
)
async def burst(session: Session) -> Finding:
    """Small requests at once, with one health probe in their midst; the other checks of this part judge the same burst."""
    size = QUICK_BURST if session.is_quick else BURST
    surface = session.main_surface()
    requests = [session.generate(surface, max_tokens=BURST_TOKENS) for _ in range(size)]
    replies = await asyncio.gather(*requests, _late_probe(session))
    session.memory |= {f"burst {number}": reply for number, reply in enumerate(replies[:-1])}
    session.memory["burst probe"] = replies[-1]
    return judge_burst(replies[:-1])


def judge_burst(replies: list[Reply]) -> Finding:
    """200, 429, 503 or 529, each whole."""
    bad = [reply for reply in replies if reply.fault or reply.status not in (200, *BUSY_STATUSES)]
    counts = Counter(str(reply.status or reply.fault) for reply in replies)
    shown = ", ".join(f"{number} x {what}" for what, number in counts.most_common())
    if bad:
        return failed(f"{shown}; such as {bad[0].summary()}")
    if all(reply.status != 200 for reply in replies):
        return failed(f"{shown}: nothing was served")
    return passed(shown)


@check(
    "overload.retry-after",
    "refusals say when to come back",
    Group.OVERLOAD,
    weight=2,
    requests=0,
    hint="Retry-After with whole seconds of 1 or more, and an error object (RAT-01).",
)
async def retry_after(session: Session) -> Finding:
    """Of the burst's refusals."""
    return judge_retry_after([reply for reply in _sent(session) if reply.status in BUSY_STATUSES])


def judge_retry_after(refusals: list[Reply]) -> Finding:
    """Retry-After is an integer >= 1, and the body an error object."""
    if not refusals:
        return skipped("nothing was refused in the burst")
    for reply in refusals:
        value = reply.header("retry-after")
        if value is None or not value.isdecimal() or int(value) < 1:
            return failed(f"{reply.status} with Retry-After {value!r}")
        if read_error(reply) is None:
            return failed(f"{reply.status} without an error object: {reply.summary()}")
    return passed(f"{len(refusals)} refusals, Retry-After {refusals[0].header('retry-after')} and the like")


@check(
    "overload.health",
    "the health probe answers during a burst",
    Group.OVERLOAD,
    weight=2,
    requests=0,
    hint="A probe that waits behind requests gets a healthy server killed (OPS-04).",
)
async def health_while_busy(session: Session) -> Finding:
    """Asked 0.2 s into the burst."""
    _sent(session)
    reply = session.memory["burst probe"]
    if reply.status in (404, 405):
        raise CannotJudge("no /health")
    if reply.status == 200 and reply.seconds < 2:
        return passed(f"200 after {reply.seconds * 1000:.0f} ms")
    return failed(f"{reply.summary()} after {reply.seconds:.1f} s")


@check(
    "overload.recovery",
    "after the burst all is as before",
    Group.OVERLOAD,
    weight=1,
    requests=1,
    hint="Something of the burst is left behind: look for requests that never end.",
)
async def recovery(session: Session) -> Finding:
    """One request soon after."""
    _sent(session)
    surface = session.main_surface()
    await session.clock.sleep(0.5)
    reply = await session.generate(surface, max_tokens=BURST_TOKENS)
    if reply.status != 200 or reply.fault:
        return failed(reply.summary())
    before = session.need(surface).seconds
    if reply.seconds > MAX_RECOVERY * before + 2:
        return failed(
            f"{reply.seconds:.1f} s for {BURST_TOKENS} tokens; before the burst {before:.1f} s for {REFERENCE_TOKENS}"
        )
    return passed(f"200 after {reply.seconds:.2f} s")


@check(
    "overload.streams",
    f"{NUM_STREAMS} streams at once all end properly",
    Group.OVERLOAD,
    weight=3,
    requests=NUM_STREAMS,
    hint="A new request must not interrupt a running stream.",
)
async def streams_at_once(session: Session) -> Finding:
    """Each with its finish_reason and [DONE], or refused at the door."""
    surface = session.main_surface()
    wishes = [session.generate(surface, stream=True, max_tokens=24) for _ in range(NUM_STREAMS)]
    return judge_streams(list(await asyncio.gather(*wishes)))


def judge_streams(replies: list[Reply]) -> Finding:
    """Whole streams, or refusals with a busy status."""
    num_whole = 0
    for reply in replies:
        if reply.status in BUSY_STATUSES:
            continue
        if reply.status != 200:
            return failed(reply.summary())
        view = read_stream(reply)
        reasons = view.choices[0].finish_reasons if 0 in view.choices else []
        if view.faults or view.errors or len(reasons) != 1 or view.num_done != 1:
            problem = "; ".join(view.faults + view.errors) or f"finish reasons {reasons}, [DONE] {view.num_done} times"
            return failed(f"a stream beside {len(replies) - 1} others: {problem}; text {view.text[:40]!r}")
        num_whole += 1
    return passed(f"{num_whole} whole, {len(replies) - num_whole} refused")

"""Does work stop when its client goes away? Seen through the server's gauges, or through the time of another request.

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from headrace.loadtest.audit.answers import is_refusal
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import Session, Surface
from headrace.loadtest.audit.wire import Reply

LONG_TOKENS = 1500  # of the one request that is watched by a gauge
HOLDER_TOKENS = 500  # of those that slow another one down: what is not cancelled must end soon
POLL_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.5, 2.0)  # 5 s in all
START_SECONDS = 10.0
NUM_HOLDERS = 4
NUM_STORM = 32
MIN_SLOWDOWN = 1.5  # of a probe while others run, for timing to tell anything
PROBE_TOKENS = 8
PROBE_SECONDS = 20.0
HINT = "Watch for the client's disconnect and cancel the generation: abandoned work takes slots from everyone else."


@dataclass(slots=True)
class _Long:
    """A request that runs until it is dropped."""

    task: "asyncio.Task[Reply]"
    drop: asyncio.Event
    started: asyncio.Event

    async def leave(self) -> Reply:
        """Cut the connection."""
        self.drop.set()
        return await self.task


def _fitting(session: Session, tokens: int) -> int:
    room = session.facts.max_model_len
    return tokens if room is None else max(64, min(tokens, room // 2))


def _start(session: Session, surface: Surface, *, stream: bool, tokens: int = LONG_TOKENS, ignore_eos: bool = True) -> _Long:
    """ignore_eos keeps servers that know it from ending early; others ignore it, or refuse it and are asked again without."""
    drop, started = asyncio.Event(), asyncio.Event()
    fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
    body = session.body(surface, max_tokens=_fitting(session, tokens), stream=stream, **fields)

    def on_piece(reply: Reply) -> None:
        if reply.num_body_bytes:
            started.set()

    async def run() -> Reply:
        try:
            return await session.ask(session.posting(surface.path, body, drop=drop, on_piece=on_piece))
        finally:
            started.set()

    return _Long(asyncio.ensure_future(run()), drop, started)


async def _running(session: Session, surface: Surface, *, stream: bool) -> _Long:
    """A long request that really runs. Raise CannotJudge when it ends by itself at once."""
    long = _start(session, surface, stream=stream)
    await _await_start(session, long, stream=stream)
    if long.task.done() and is_refusal(long.task.result()):
        long = _start(session, surface, stream=stream, ignore_eos=False)
        await _await_start(session, long, stream=stream)
    if long.task.done():
        raise CannotJudge(f"a long answer ended before it could be dropped: {long.task.result().summary()[:80]}")
    return long


async def _await_start(session: Session, long: _Long, *, stream: bool) -> None:
    """Until its first event; a whole answer shows nothing, so a moment must do."""
    if not stream:
        await session.clock.sleep(0.7)
        return
    waiter = asyncio.ensure_future(long.started.wait())
    await asyncio.wait({waiter, long.task}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)


async def _gauge(session: Session, *names: str) -> float | None:
    exposition = await session.metrics()
    values = [exposition.gauge(name) for name in names] if exposition else []
    known = [value for value in values if value is not None]
    return sum(known) if known else None


async def _wait_fall(session: Session, level: float, *names: str) -> tuple[float, float | None]:
    """Seconds until the gauges are back at `level`, or (all seconds, the last value)."""
    waited = 0.0
    value: float | None = None
    for pause in POLL_SECONDS:
        await session.clock.sleep(pause)
        waited += pause
        value = await _gauge(session, *names)
        if value is not None and value <= level:
            return waited, None
    return waited, value


async def _probe_seconds(session: Session, surface: Surface) -> float:
    """Of a short request; one that is not answered in time counts as so long."""
    body = session.body(surface, max_tokens=PROBE_TOKENS)
    reply = await session.post(surface.path, body, timeout_seconds=min(PROBE_SECONDS, session.timeout_seconds))
    if not reply.fault.startswith("timeout") and (reply.status != 200 or reply.fault):
        raise CannotJudge(f"a short request while others run: {reply.summary()}")
    return reply.seconds


async def _by_gauge(session: Session, surface: Surface, before: float, *, stream: bool) -> Finding | None:
    """None when the gauge does not show the request."""
    long = await _running(session, surface, stream=stream)
    try:
        during = await _gauge(session, "running", "waiting")
    finally:
        dropped = await long.leave()
    if during is None or during <= before:
        return None
    if not dropped.is_dropped:
        raise CannotJudge("the long answer ended by itself before it was dropped")
    waited, left = await _wait_fall(session, before, "running", "waiting")
    if left is not None:
        return failed(
            f"the gauge of running requests is still {left:g} {waited:.1f} s after the client left, {before:g} before"
        )
    return passed(f"running requests {during:g} with the client, {before:g} within {waited:.1f} s after it left")


async def _by_timing(session: Session, surface: Surface, *, stream: bool) -> Finding:
    """A short request is timed alone, beside long ones, and after these were dropped."""
    alone = min([await _probe_seconds(session, surface) for _ in range(2)])
    holders = [_start(session, surface, stream=stream, tokens=HOLDER_TOKENS, ignore_eos=False) for _ in range(NUM_HOLDERS)]
    try:
        await session.clock.sleep(1.0)
        busy = await _probe_seconds(session, surface)
    finally:
        replies = await asyncio.gather(*(holder.leave() for holder in holders))
    num_dropped = sum(reply.is_dropped for reply in replies)
    await session.clock.sleep(1.0)
    after = min([await _probe_seconds(session, surface) for _ in range(2)])
    return judge_timing(alone, busy, after, num_dropped)


def judge_timing(alone: float, busy: float, after: float, num_dropped: int) -> Finding:
    """Seconds of the same short request."""
    shown = (
        f"a short request takes {alone:.2f} s alone, {busy:.2f} s beside {num_dropped} long ones, {after:.2f} s after they left"
    )
    if num_dropped < NUM_HOLDERS // 2:
        return skipped(f"no gauge of running requests, and the long ones ended by themselves ({num_dropped} were dropped)")
    if busy < MIN_SLOWDOWN * alone:
        return skipped(f"no gauge of running requests, and timing cannot tell: {shown}")
    return passed(shown) if after < (alone + busy) / 2 else failed(shown)


async def _cancellation(session: Session, *, stream: bool) -> Finding:
    surface = session.main_surface()
    before = await _gauge(session, "running", "waiting")
    if before is not None:
        finding = await _by_gauge(session, surface, before, stream=stream)
        if finding is not None:
            return finding
    return await _by_timing(session, surface, stream=stream)


@check(
    "cancel.stream",
    "a dropped stream stops generating",
    Group.CANCELLATION,
    weight=3,
    requests=22,
    hint=HINT,
)
async def cancel_stream(session: Session) -> Finding:
    """After the first event."""
    return await _cancellation(session, stream=True)


@check(
    "cancel.whole",
    "a dropped request without streaming stops generating",
    Group.CANCELLATION,
    weight=2,
    requests=22,
    hint=HINT,
)
async def cancel_whole(session: Session) -> Finding:
    """While the answer is being made."""
    return await _cancellation(session, stream=False)


@check(
    "cancel.storm",
    f"{NUM_STORM} clients that leave at once leave nothing behind",
    Group.CANCELLATION,
    weight=2,
    requests=NUM_STORM + 14,
    hint=HINT + " Queued requests must be taken out of the queue too.",
    heavy=True,
)
async def cancel_storm(session: Session) -> Finding:
    """Running and queued ones; both gauges are watched."""
    surface = session.main_surface()
    before = await _gauge(session, "running", "waiting")
    if before is None:
        raise CannotJudge("no gauges of running and waiting requests")
    crowd = [_start(session, surface, stream=True, tokens=HOLDER_TOKENS, ignore_eos=False) for _ in range(NUM_STORM)]
    peak = queued = 0.0
    try:
        for _ in range(3):
            await session.clock.sleep(0.4)
            peak = max(peak, await _gauge(session, "running", "waiting") or 0.0)
            queued = max(queued, await _gauge(session, "waiting") or 0.0)
    finally:
        replies = await asyncio.gather(*(one.leave() for one in crowd))
    if peak <= before or not any(reply.is_dropped for reply in replies):
        raise CannotJudge(f"the gauges never showed them (at most {peak:g}, {before:g} before)")
    waited, left = await _wait_fall(session, before, "running", "waiting")
    shown = f"at most {peak:g} running and waiting, {queued:g} of them queued"
    if left is not None:
        return failed(f"{shown}; still {left:g} {waited:.1f} s after all left")
    return passed(f"{shown}; {before:g} within {waited:.1f} s after all left")

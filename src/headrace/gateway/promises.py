"""Refused callers who were told when to come again, and the room that is kept for them.

Owns: Promise, PromiseBook. Runs in: gateway, simulation. Must not know: HTTP, the clock (time is an argument).

Without a place of their own, callers who wait as told meet a queue that newcomers have filled meanwhile, and are refused for
ever. Here they stand in a virtual queue: each promise takes its place behind those before it, a caller who comes when its time
has come is known by the digest of its request (clients send the same one again), and a newcomer is judged as if those who are
due were there. A promise that nobody keeps is forgotten after a grace time.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

MAX_PROMISES = 8192
EARLY_NS = 250_000_000  # clients' timers are not exact: so much too early counts as due
MIN_GRACE_NS = 3_000_000_000
GRACE_RATIO = 0.5  # of the wait that was asked for: clients add jitter
FIRST_KEPT_RATIO = 0.9  # until it was measured
_NS_PER_SECOND = 1_000_000_000
KEPT_MEMORY = 0.95  # weight of the past in the ratio of promises kept


@dataclass(frozen=True, slots=True)
class Promise:
    """One caller's place. `level` and `tenant` are those of its class and share."""

    digest: bytes
    due_ns: int
    expires_ns: int
    num_tokens: int
    level: int
    tenant: str


class PromiseBook:
    """Promises by digest. Bounded, with those just taken up: a caller beyond MAX_PROMISES is told a time and has no place."""

    def __init__(self) -> None:
        self._promises: dict[bytes, Promise] = {}
        self._taken: dict[bytes, Promise] = {}  # whose callers have come, until they are let in or the place's time is over
        self._expiries: list[tuple[int, bytes]] = []  # of both
        self._tokens_of: dict[tuple[int, str], int] = {}  # (level, tenant) -> tokens promised
        self._by_second: dict[int, dict[tuple[int, str], int]] = {}  # the same, by the second in which they are due
        self.kept_ratio = FIRST_KEPT_RATIO
        self.num_kept = 0
        self.num_broken = 0  # by the callers: they did not come

    def __len__(self) -> int:
        return len(self._promises)

    def get(self, digest: bytes, now_ns: int) -> Promise | None:
        """The promise that this caller holds, due or not."""
        self.forget_expired(now_ns)
        return self._promises.get(digest) if digest else None

    def give(self, promise: Promise) -> None:
        """Keep a place; one of the same digest is replaced (its earlier due time is the caller's to compare)."""
        if not promise.digest:
            return
        self._drop(promise.digest)
        self._taken.pop(promise.digest, None)
        if len(self._promises) + len(self._taken) >= MAX_PROMISES:
            return
        self._promises[promise.digest] = promise
        heapq.heappush(self._expiries, (promise.expires_ns, promise.digest))
        if len(self._expiries) > 2 * MAX_PROMISES:  # most are of promises that were replaced since
            held = (*self._promises.values(), *self._taken.values())
            self._expiries = [(promise.expires_ns, promise.digest) for promise in held]
            heapq.heapify(self._expiries)
        second = promise.due_ns // _NS_PER_SECOND
        for tokens_of in (self._tokens_of, self._by_second.setdefault(second, {})):
            key = (promise.level, promise.tenant)
            tokens_of[key] = tokens_of.get(key, 0) + promise.num_tokens

    def come(self, promise: Promise) -> None:
        """The caller has come when it was told to, whether it is let in or not: its place is taken up."""
        if self._drop(promise.digest):
            self.num_kept += 1
            self._learn(1.0)
            self._taken[promise.digest] = promise

    def give_back(self, digest: bytes, now_ns: int, due_ns: int) -> None:
        """What the caller had taken up was filled before it was in: keep another place for it, if it had taken up one."""
        promise = self._taken.get(digest)
        if promise is not None:
            self.give(replace(promise, due_ns=due_ns, expires_ns=expiry_of(due_ns, now_ns)))

    def forget(self, digest: bytes) -> None:
        """The caller was let in: it needs no place any more."""
        self._taken.pop(digest, None)
        self._drop(digest)

    def forget_expired(self, now_ns: int) -> None:
        """Give up places whose callers did not come."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            expires_ns, digest = heapq.heappop(self._expiries)
            taken = self._taken.get(digest)
            if taken is not None and taken.expires_ns == expires_ns:
                del self._taken[digest]
            promise = self._promises.get(digest)
            if promise is not None and promise.expires_ns == expires_ns:
                self._drop(digest)
                self.num_broken += 1
                self._learn(0.0)

    def tokens_by_tenant(self, max_level: int, until_ns: int | None = None) -> dict[str, float]:
        """Prompt tokens that are expected to come for classes up to this level: those promised, times the ratio kept.

        `until_ns`: only those that are due up to then, to the second.
        """
        found: dict[str, float] = {}
        for key, num_tokens in self._expected(until_ns):
            level, tenant = key
            if level <= max_level:
                found[tenant] = found.get(tenant, 0.0) + num_tokens * self.kept_ratio
        return found

    def _expected(self, until_ns: int | None) -> Iterator[tuple[tuple[int, str], int]]:
        if until_ns is None:
            yield from self._tokens_of.items()
            return
        last_second = until_ns // _NS_PER_SECOND
        for second, tokens_of in self._by_second.items():
            if second <= last_second:
                yield from tokens_of.items()

    def _learn(self, outcome: float) -> None:
        self.kept_ratio = KEPT_MEMORY * self.kept_ratio + (1 - KEPT_MEMORY) * outcome

    def _drop(self, digest: bytes) -> bool:
        promise = self._promises.pop(digest, None)
        if promise is None:
            return False
        key = (promise.level, promise.tenant)
        second = promise.due_ns // _NS_PER_SECOND
        for tokens_of in (self._tokens_of, self._by_second.get(second, {})):
            remaining = tokens_of.get(key, 0) - promise.num_tokens
            if remaining:
                tokens_of[key] = remaining
            else:
                tokens_of.pop(key, None)
        if not self._by_second.get(second):
            self._by_second.pop(second, None)
        return True


def expiry_of(due_ns: int, now_ns: int) -> int:
    """How long a place is kept for a promise given now."""
    return due_ns + max(MIN_GRACE_NS, round((due_ns - now_ns) * GRACE_RATIO))

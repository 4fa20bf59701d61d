"""What every check works with: requests to the one server within a hard limit, and what is known of it so far.

Owns: Session, Facts, Surface and the budget. Runs in: audit. Must not know: any single check, sockets.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.loadtest.audit.answers import Answer
from headrace.loadtest.audit.exposition import Exposition, read_exposition
from headrace.loadtest.audit.findings import CannotJudge
from headrace.loadtest.audit.wire import Ask, Clock, Exchanger, Reply

METRICS_PATH = "/metrics"
REFERENCE_TOKENS = 32
STORY = {"chat": "Write a long story about a river.", "text": "Once upon a time, there was a river that"}


class Surface(enum.Enum):
    """The two generating endpoints."""

    CHAT = "chat"
    TEXT = "text"

    @property
    def path(self) -> str:
        """Where it is served."""
        return "/v1/chat/completions" if self is Surface.CHAT else "/v1/completions"


Http2Probe = Callable[[str, tuple[tuple[str, str], ...]], Awaitable[tuple[str, str]]]


class BudgetExhausted(CannotJudge):
    """The audit's limit of requests is used up."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The greedy answer to the story prompt, asked twice; `is_stable`: both were the same."""

    answer: Answer
    is_stable: bool
    seconds: float  # of the second answer


@dataclass(slots=True)
class Facts:
    """What the first requests found out. `why_not`: why a surface has no reference."""

    references: dict[Surface, Reference] = field(default_factory=dict)
    why_not: dict[Surface, str] = field(default_factory=dict)
    max_model_len: int | None = None
    metrics_path: str | None = None
    server: dict[str, str] = field(default_factory=dict)
    models_reply: Reply | None = None
    metrics_reply: Reply | None = None


class Session:
    """Asks the server. Every request counts, each has a time-out, and one more than `max_requests` raises BudgetExhausted."""

    def __init__(
        self,
        exchanger: Exchanger,
        clock: Clock,
        *,
        model: str = "",
        key: str = "",
        max_requests: int = 300,
        timeout_seconds: float = 60.0,
        is_quick: bool = False,
        http2_probe: Http2Probe | None = None,
    ) -> None:
        self._exchanger = exchanger
        self.clock = clock
        self.model = model
        self.key = key
        self.max_requests = max_requests
        self.timeout_seconds = timeout_seconds
        self.is_quick = is_quick
        self._http2_probe = http2_probe
        self.facts = Facts()
        self.num_requests = 0
        self.allowance = max_requests  # most that num_requests may reach within the running check
        self.journal: list[Reply] = []  # every reply with an error status or a fault; the limit of requests bounds it
        self.memory: dict[str, Reply] = {}
        self.has_timed_out = False  # since the runner looked last

    async def ask(self, ask: Ask) -> Reply:
        """One request as it is, with the key's header and the count. Raise BudgetExhausted beyond the limits."""
        self._count()
        reply = await self._exchanger.exchange(ask)
        self.has_timed_out = self.has_timed_out or reply.fault.startswith("timeout")
        if not reply.is_dropped and (reply.fault or reply.status is None or reply.status >= 400):
            self.journal.append(reply)
        return reply

    async def ask_http2(self, path: str) -> tuple[str, str]:
        """A GET over HTTP/2: the version spoken and words for people. Raise ImportError without the client for it."""
        if self._http2_probe is None:
            raise CannotJudge("no HTTP/2 client")
        self._count()
        return await self._http2_probe(path, self.headers())

    def _count(self) -> None:
        if self.num_requests >= min(self.allowance, self.max_requests):
            raise BudgetExhausted(f"the limit of {self.max_requests} requests is used up")
        self.num_requests += 1

    def headers(self, *more: tuple[str, str], accept: str = "*/*") -> tuple[tuple[str, str], ...]:
        """Headers of an ordinary request, the key's included."""
        key = (("Authorization", f"Bearer {self.key}"),) if self.key else ()
        return (("User-Agent", "headrace-audit"), ("Accept", accept), *key, *more)

    async def get(self, path: str, *, lane: str = "", method: str = "GET") -> Reply:
        """A request without a body."""
        return await self.ask(Ask(method, path, self.headers(), timeout_seconds=min(20.0, self.timeout_seconds), lane=lane))

    async def post(self, path: str, body: Any, *, timeout_seconds: float | None = None, lane: str = "") -> Reply:
        """A JSON body; bytes are sent as they are."""
        return await self.ask(self.posting(path, body, timeout_seconds=timeout_seconds, lane=lane))

    def posting(
        self,
        path: str,
        body: Any,
        *,
        timeout_seconds: float | None = None,
        lane: str = "",
        drop: asyncio.Event | None = None,
        on_piece: Callable[[Reply], None] | None = None,
    ) -> Ask:
        """The Ask of a POST, for what `post` does not do."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = self.headers(("Content-Type", "application/json"))
        return Ask("POST", path, headers, data, timeout_seconds or self.timeout_seconds, lane, drop, on_piece)

    def body(self, surface: Surface, prompt: str = "", **fields: Any) -> dict[str, Any]:
        """A request body; the story prompt unless another is given, and greedy unless `fields` say otherwise."""
        text = prompt or STORY[surface.value]
        body: dict[str, Any] = {"model": self.model} if self.model else {}
        body |= {"messages": [{"role": "user", "content": text}]} if surface is Surface.CHAT else {"prompt": text}
        return body | {"temperature": 0, "max_tokens": REFERENCE_TOKENS} | fields

    async def generate(self, surface: Surface, prompt: str = "", **fields: Any) -> Reply:
        """One generation; see `body`."""
        return await self.post(surface.path, self.body(surface, prompt, **fields))

    async def remembered(self, name: str, make: Callable[[], Awaitable[Reply]]) -> Reply:
        """The reply of that name, asked for once in an audit."""
        if name not in self.memory:
            self.memory[name] = await make()
        return self.memory[name]

    async def sample(self, surface: Surface, *, with_usage: bool) -> Reply:
        """The story prompt, streamed; asked for once."""
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
        return await self.remembered(
            f"stream {surface.value} {with_usage}", lambda: self.generate(surface, stream=True, **options)
        )

    async def metrics(self) -> Exposition | None:
        """The exposition now; None when the server has none."""
        if self.facts.metrics_path is None:
            return None
        reply = await self.get(self.facts.metrics_path)
        return read_exposition(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None

    def surfaces(self) -> list[Surface]:
        """Those that answer, chat first."""
        return [surface for surface in Surface if surface in self.facts.references]

    def main_surface(self) -> Surface:
        """Chat where there is one. Raise CannotJudge when nothing generates."""
        if not self.facts.references:
            raise CannotJudge("neither chat nor completions answers")
        return self.surfaces()[0]

    def need(self, surface: Surface) -> Reference:
        """The surface's reference. Raise CannotJudge when it does not answer."""
        if surface not in self.facts.references:
            raise CannotJudge(f"{surface.path} does not answer: {self.facts.why_not.get(surface, 'not asked')}")
        return self.facts.references[surface]

    def need_stable(self, surface: Surface) -> Answer:
        """The reference answer, where greedy answers repeat. Raise CannotJudge otherwise."""
        reference = self.need(surface)
        if not reference.is_stable:
            raise CannotJudge("greedy answers differ from one time to the next, so nothing can be compared")
        return reference.answer

"""What a newcomer would have to wait: all that waits and runs, and how fast it goes, made into times.

Owns: Outlook, Applicant. Runs in: gateway, simulation. Must not know: who is let in, HTTP, the clock (time is an argument).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.gateway.drain import DrainMeter, PlaceMeter, mean_place_ns
from headrace.gateway.forecast import QueueAccounts, fair_tokens_ahead
from headrace.protocol.traffic import DEFAULT_TENANT, STANDARD, ServiceClass, TrafficPolicy

SHARED_PROMPTS = 2  # so many long prompts at the head of the queue are taken to be under way
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks. `digest` stands for the request's content: whoever sends it again is known by it; b"": unknown.

    `timeout_ns`: how long its client waits for the answer; 0: not told.
    """

    service_class: ServiceClass = STANDARD
    tenant: str = DEFAULT_TENANT
    digest: bytes = b""
    timeout_ns: int = 0


ANYBODY = Applicant()


class Guest(Protocol):
    """A request that was let in; hashed by identity."""

    @property
    def applicant(self) -> Applicant:
        """Who asked."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of its prompt."""
        ...


class Outlook:
    """Follows each request from the door to its end, and tells what comes after those that are there would wait."""

    def __init__(self, max_num_seqs: int, traffic: TrafficPolicy) -> None:
        self._max_num_seqs = max_num_seqs
        self._weights = {tenant.name: tenant.weight for tenant in traffic.tenants}
        self._lowest_level = max(entry.level for entry in traffic.classes)
        self._accounts = QueueAccounts()
        self._drain: DrainMeter[Guest] = DrainMeter()
        self._places: dict[int, PlaceMeter[Guest]] = {}  # by level
        self._num_running = 0

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of requests that have shown no token yet."""
        return self._accounts.num_tokens

    def tokens_by_tenant(self, max_level: int) -> dict[str, float]:
        """Waiting prompt tokens of classes up to this level."""
        return self._accounts.tokens_by_tenant(max_level)

    def can_begin_at_once(self, level: int, num_requests: int) -> bool:
        """Whether nothing waits before newcomers of this level, and there is a place for each of them."""
        accounts = self._accounts
        return not accounts.num_queued_up_to(level) and accounts.num_running_up_to(level) + num_requests <= self._max_num_seqs

    def queue(self, guest: Guest, now_ns: int) -> None:
        """It waits."""
        self._accounts.queue(guest.applicant.service_class.level, guest.applicant.tenant, guest.num_tokens)
        self._drain.enter(guest, guest.num_tokens, now_ns)

    def run(self, guest: Guest, now_ns: int) -> None:
        """It has shown its first token."""
        level = guest.applicant.service_class.level
        self._accounts.unqueue(level, guest.applicant.tenant, guest.num_tokens)
        self._accounts.run(level, 1)
        self._places.setdefault(level, PlaceMeter()).take(guest, now_ns)
        self._drain.leave(guest, now_ns, was_computed=True)
        self._count_running(1, now_ns)

    def end(self, guest: Guest, now_ns: int, *, was_queued: bool) -> None:
        """It is gone, from the queue or from its place."""
        level = guest.applicant.service_class.level
        if was_queued:
            self._accounts.unqueue(level, guest.applicant.tenant, guest.num_tokens)
            self._drain.leave(guest, now_ns, was_computed=False)
        else:
            self._count_running(-1, now_ns)
            self._accounts.run(level, -1)
            self._places[level].give_back(guest, now_ns)

    def wait_ns(
        self,
        queued: Mapping[str, float],
        num_prompt_tokens: int,
        now_ns: int,
        applicant: Applicant,
        num_requests: int = 1,
    ) -> int | None:
        """By tokens ahead at the measured rate, and by places where all are taken; the longer of the two."""
        level = applicant.service_class.level
        rate = self._drain.tokens_per_second(now_ns)
        place_ns = mean_place_ns(self._places, level, now_ns)
        if rate is None and not place_ns:
            return None
        tokens_ahead = fair_tokens_ahead(queued, applicant.tenant, num_prompt_tokens, self._weights)
        num_ahead = tokens_ahead / (self._accounts.mean_tokens_up_to(level) or max(1, num_prompt_tokens))
        num_places = self._max_num_seqs
        num_lacking = num_ahead + num_requests - (num_places - self._accounts.num_running_up_to(level))
        by_places_ns = max(0.0, num_lacking) * place_ns / num_places
        by_tokens_ns = 0.0
        if rate is not None:
            num_shared = min(self._num_shared_tokens(num_prompt_tokens, applicant), queued.get(applicant.tenant, 0.0))
            by_tokens_ns = max(0.0, tokens_ahead - num_shared) / rate * _NS_PER_SECOND
        return round(max(by_tokens_ns, by_places_ns))

    def allowed_ns(self, num_prompt_tokens: int, now_ns: int, applicant: Applicant) -> int:
        """The longest wait before a prompt's computing begins. A prompt that takes long by itself may still wait somewhat."""
        target_ns = applicant.service_class.ttft_target_ns
        if applicant.timeout_ns:
            target_ns = min(target_ns, applicant.timeout_ns)
        rate = self._drain.tokens_per_second(now_ns)
        own_ns = round(num_prompt_tokens / rate * _NS_PER_SECOND) if rate else 0
        return max(target_ns - own_ns, target_ns // 2)

    def request_ns(self, now_ns: int) -> float:
        """What one request more costs a full server: by places, or by prompts where those take longer; 0: not known."""
        level = self._lowest_level
        by_place_ns = mean_place_ns(self._places, level, now_ns) / self._max_num_seqs
        rate = self._drain.tokens_per_second(now_ns)
        by_prompt_ns = self._accounts.mean_tokens_up_to(level) / rate * _NS_PER_SECOND if rate else 0.0
        return max(by_place_ns, by_prompt_ns)

    def _num_shared_tokens(self, num_prompt_tokens: int, applicant: Applicant) -> int:
        """Tokens of long prompts under way that a shorter newcomer of their account does not wait for: they share the steps."""
        level, tenant = applicant.service_class.level, applicant.tenant
        return sum(
            max(0, permit.num_tokens - num_prompt_tokens)
            for permit in self._drain.longest_waiting(SHARED_PROMPTS)
            if permit.applicant.service_class.level == level and permit.applicant.tenant == tenant
        )

    def _count_running(self, change: int, now_ns: int) -> None:
        self._num_running += change
        self._drain.set_places(now_ns, has_places=self._num_running < self._max_num_seqs)

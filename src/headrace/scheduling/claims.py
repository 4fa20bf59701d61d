"""What a sequence may demand: its level, which waiting raises, and its place among others of that level.

Owns: Claim, Claimant, ClaimRules. Runs in: worker, tests, simulation.
Must not know: queues, blocks, who else waits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.traffic import OTHER_TENANT, ServiceClass, TrafficPolicy

Account = tuple[str, str]  # (tenant, service class): one party to the sharing of tokens
Rank = tuple[int, int, int]  # (first token due, arrival, request id), in nanoseconds: smaller goes first

DEFAULT_AGING_NS = 60_000_000_000


@dataclass(slots=True, eq=False)
class Claim:
    """How strongly one sequence may ask. Times are CLOCK_MONOTONIC nanoseconds.

    `level` 0 is the highest. It begins at the class's and falls by one for each `aging_ns` that the sequence has waited in all,
    never below 0. It stands still while the sequence runs and gets on: what was reached by waiting is kept, so that a sequence
    that came in by age is not thrown out by the next newcomer. A step in which a running prompt gets no token is a wait too. A
    preemption in favour of a higher claim counts as a wait of at least `preemption_credit_ns`; hence one of level L suffers at
    most ceil(L * aging_ns / preemption_credit_ns) of them.
    """

    request_id: int
    account: Account
    class_level: int
    priority: int  # lower first; already part of the rank
    rank: Rank
    hurry_ns: int  # from here on no cached prefix of others is preferred to it
    queue_expires_ns: int  # one that has never run leaves the queue then; 0: never
    deadline_ns: int  # the request's own; 0: none
    tbt_target_ns: int  # 0: none
    aging_ns: int
    preemption_credit_ns: int
    level: int
    promotes_ns: int  # when the next level is reached, if it waits so long; meaningless at level 0 and while it runs
    num_claim_preemptions: int = 0
    _wait_left_ns: int = 0  # at the end of the last wait: what was missing to the next level

    @property
    def key(self) -> tuple[int, Rank]:
        """The order of those that run: who is last in it gives way first. Constant while it runs, but for `pass_over`."""
        return self.level, self.rank

    @property
    def leaves_queue_ns(self) -> int:
        """When a sequence that has never run leaves the queue without having run; 0: never."""
        return min((at_ns for at_ns in (self.queue_expires_ns, self.deadline_ns) if at_ns), default=0)

    def end_wait(self, now_ns: int) -> None:
        """It runs from now on."""
        self._wait_left_ns = self.promotes_ns - now_ns

    def wait_again(self, now_ns: int, *, by_claim: bool) -> None:
        """It was preempted; `by_claim`: in favour of a strictly higher claim, not because the running ones outgrew memory."""
        credit_ns = self.preemption_credit_ns if by_claim else 0
        self.num_claim_preemptions += by_claim
        self.promotes_ns = now_ns + self._wait_left_ns - credit_ns

    def pass_over(self, duration_ns: int) -> bool:
        """It runs, and a step of this duration gave it nothing. Returns whether its level, and so its key, has changed."""
        level = self.level
        self._wait_left_ns -= duration_ns
        while self.level and self._wait_left_ns <= 0:
            self.level -= 1
            self._wait_left_ns += self.aging_ns
        return self.level != level

    def promote(self) -> None:
        """One level up. Raises RuntimeError at level 0."""
        if self.level == 0:
            raise RuntimeError(f"request {self.request_id} has the highest claim already")
        self.level -= 1
        self.promotes_ns += self.aging_ns


class Claimant(Protocol):
    """Whatever carries a claim: the scheduler's sequences, and what simulations and tests put in their place."""

    @property
    def claim(self) -> Claim:
        """Its claim; always the same object."""
        ...


ClaimantT = TypeVar("ClaimantT", bound=Claimant)


class ClaimRules:
    """Makes claims as the configuration says.

    Levels are the ranks of the different `level` values of the classes: 0, 5 and 40 are 0, 1 and 2, so that ageing leads from
    the lowest to the highest in at most seven times `aging_ns`.

    Rank inside an account: earliest first token due (EDF: Liu and Layland, 1973). Due is arrival + the class's TTFT target (or
    the time in which ageing leads past the highest level, when that is shorter), or the request's own deadline when that is
    earlier, + priority * `priority_aging_ns`. All of it is finite, so everybody stands before all who arrive late enough.
    """

    def __init__(
        self,
        policy: TrafficPolicy,
        *,
        aging_ns: int = DEFAULT_AGING_NS,
        priority_aging_ns: int = DEFAULT_AGING_NS,
        preemption_credit_ns: int | None = None,
        is_fcfs: bool = False,
        ages_by_target: bool = False,
    ) -> None:
        """`preemption_credit_ns`: a quarter of `aging_ns` if None. Raises ConfigurationError.

        `is_fcfs`: everybody is of one account and of level 0, and the arrival alone is the rank. What classes say of time in
        the queue and between tokens is kept. `ages_by_target`: a class below the highest level takes its TTFT target to get
        there, where that is longer than `aging_ns` for each level: background work that was promised minutes does not push in
        after one. The credit for a preemption grows with it.
        """
        credit_ns = max(1, aging_ns // 4) if preemption_credit_ns is None else preemption_credit_ns
        if aging_ns < 1 or credit_ns < 1 or priority_aging_ns < 0:
            raise ConfigurationError("aging and preemption credit must be above 0, priority aging must not be negative.")
        levels = sorted({entry.level for entry in policy.classes})
        self._is_fcfs = is_fcfs
        self._ages_by_target = ages_by_target
        self.num_levels = 1 if is_fcfs else len(levels)
        self.aging_ns = aging_ns
        self.preemption_credit_ns = credit_ns
        self._priority_aging_ns = priority_aging_ns
        self._classes = {entry.name: (entry, levels.index(entry.level)) for entry in policy.classes}
        self._default = self._classes[policy.default_class]
        self._tenants = frozenset(policy.tenant_names)
        tenant_weights = {entry.name: entry.weight for entry in policy.tenants}
        # Both weights say "twice as much"; an account in which both meet has the product.
        self.weights: dict[Account, float] = {
            (tenant, entry.name): weight * entry.weight for tenant, weight in tenant_weights.items() for entry in policy.classes
        }

    @property
    def max_num_claim_preemptions(self) -> int:
        """Most preemptions in favour of higher claims that one sequence can suffer."""
        return -(-(self.num_levels - 1) * self.aging_ns // self.preemption_credit_ns)

    def claim(self, request: GenerationRequest) -> Claim:
        """The claim of a request that begins to wait. Its wait counts from its arrival at the gateway."""
        service_class, level = self._classes.get(request.service_class, self._default)
        if self._is_fcfs:
            return self._first_come(request, service_class)
        tenant = request.tenant_id if request.tenant_id in self._tenants else OTHER_TENANT
        arrival_ns = request.arrival_ns
        due_ns = arrival_ns + min(service_class.ttft_target_ns, (level + 1) * self._aging_of(service_class, level))
        if request.deadline_ns:
            due_ns = min(due_ns, request.deadline_ns)
        due_ns += request.priority * self._priority_aging_ns
        account, hurry_ns = (tenant, service_class.name), arrival_ns + max(0, due_ns - arrival_ns) // 2
        return self._make(request, service_class, account, level, due_ns, hurry_ns, request.priority)

    def _first_come(self, request: GenerationRequest, service_class: ServiceClass) -> Claim:
        """The claim of a policy that knows arrivals alone; always in a hurry, so that no cached prefix is preferred to it."""
        account, arrival_ns = (OTHER_TENANT, self._default[0].name), request.arrival_ns
        return self._make(request, service_class, account, 0, arrival_ns, arrival_ns, priority=0)

    def _make(
        self,
        request: GenerationRequest,
        service_class: ServiceClass,
        account: Account,
        level: int,
        due_ns: int,
        hurry_ns: int,
        priority: int,
    ) -> Claim:
        arrival_ns, timeout_ns = request.arrival_ns, service_class.queue_timeout_ns
        aging_ns = self._aging_of(service_class, level)
        return Claim(
            request_id=request.request_id,
            account=account,
            class_level=level,
            priority=priority,
            rank=(due_ns, arrival_ns, request.request_id),
            hurry_ns=hurry_ns,
            queue_expires_ns=arrival_ns + timeout_ns if timeout_ns else 0,
            deadline_ns=request.deadline_ns,
            tbt_target_ns=service_class.tbt_target_ns,
            aging_ns=aging_ns,
            preemption_credit_ns=-(-self.preemption_credit_ns * aging_ns // self.aging_ns),
            level=level,
            promotes_ns=arrival_ns + aging_ns,
        )

    def _aging_of(self, service_class: ServiceClass, level: int) -> int:
        """What a request of this class waits for each level."""
        if not (self._ages_by_target and level):
            return self.aging_ns
        return max(self.aging_ns, service_class.ttft_target_ns // level)


def prefer_cached(candidates: Iterable[ClaimantT], num_cached_tokens_of: Callable[[ClaimantT], int]) -> ClaimantT | None:
    """The candidate with the longest cached prefix, the first of those with equal ones; None when there is no candidate.

    Deficit longest prefix match (DLPM, Cao et al. 2025, arXiv 2501.14312): `ClassQueue.candidates` says who may be preferred,
    and thereby bounds what preferring can cost the others. `num_cached_tokens_of` is called once for each.
    """
    best: ClaimantT | None = None
    most = -1
    for candidate in candidates:
        num_cached_tokens = num_cached_tokens_of(candidate)
        if num_cached_tokens > most:
            best, most = candidate, num_cached_tokens
    return best

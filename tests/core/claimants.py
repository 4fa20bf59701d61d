"""Claims and what carries them, for tests of the pieces that order sequences.

Owns: make_rules, request_of, make_claim, Waiter, PlainLedger. Runs in: tests.
Must not know: the scheduler.
"""

from dataclasses import dataclass

from headrace.protocol.messages import GenerationRequest
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy
from headrace.scheduling.claims import Account, Claim, ClaimRules
from headrace.scheduling.fairness import TokenCosts
from tests.core.driver import make_request

AGING_NS = 1_000


def make_rules(
    *,
    levels: tuple[int, ...] = (0, 1, 2, 3),
    class_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    tenants: tuple[tuple[str, float], ...] = (("a", 1.0), ("b", 1.0)),
    ttft_target_ns: int = 1_000_000,
    queue_timeout_ns: int = 0,
    aging_ns: int = AGING_NS,
    priority_aging_ns: int = 100,
    preemption_credit_ns: int | None = None,
) -> ClaimRules:
    """Classes c0, c1, ... of the given levels; tenants default, other and the given ones."""
    classes = tuple(
        ServiceClass(
            name=f"c{index}",
            level=level,
            weight=weight,
            ttft_target_ms=ttft_target_ns / 1e6,
            tbt_target_ms=0,
            queue_timeout_ms=queue_timeout_ns / 1e6,
        )
        for index, (level, weight) in enumerate(zip(levels, class_weights, strict=False))
    )
    names = (Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT))
    given = tuple(Tenant(name=name, weight=weight) for name, weight in tenants)
    policy = TrafficPolicy(classes=classes, default_class="c0", tenants=names + given)
    return ClaimRules(policy, aging_ns=aging_ns, priority_aging_ns=priority_aging_ns, preemption_credit_ns=preemption_credit_ns)


def request_of(
    request_id: int,
    *,
    level: int = 0,
    tenant: str = "a",
    arrival_ns: int = 0,
    priority: int = 0,
    deadline_ns: int = 0,
) -> GenerationRequest:
    """A request of class c<level>."""
    request = make_request(request_id, arrival_ns=arrival_ns, priority=priority, deadline_ns=deadline_ns)
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return GenerationRequest(**{**fields, "tenant_id": tenant, "service_class": f"c{level}"})


def make_claim(request_id: int, *, level: int = 0, tenant: str = "a", arrival_ns: int = 0) -> Claim:
    return make_rules().claim(request_of(request_id, level=level, tenant=tenant, arrival_ns=arrival_ns))


@dataclass(eq=False)
class Waiter:
    """The least that can stand in a queue."""

    claim: Claim
    num_computed_tokens: int = 0


class PlainLedger:
    """VTC written down naively: what TenantLedger must agree with."""

    def __init__(self, weights: dict[Account, float], costs: TokenCosts) -> None:
        self.weights, self.costs = weights, costs
        self.counters = dict.fromkeys(weights, 0.0)
        self.active: set[Account] = set()
        self.last: Account | None = None

    def update(self, active: set[Account]) -> None:
        """These have somebody waiting now; at most one came or went."""
        for account in active - self.active:
            if self.active:
                floor = min(self.counters[other] for other in self.active)
            else:
                floor = self.counters[self.last] if self.last else 0.0
            self.counters[account] = max(self.counters[account], floor)
        for account in self.active - active:
            self.last = account
        self.active = set(active)

    def charge(self, account: Account, prefill: int, cached: int, output: int) -> None:
        costs = self.costs
        cost = prefill * costs.prefill + cached * costs.cached + output * costs.output
        self.counters[account] += cost / self.weights[account]

    def order(self) -> list[Account]:
        return sorted(self.active, key=lambda account: (self.counters[account], account))

"""What a newcomer would have to wait for: the queue as the gateway knows it, by class level and tenant.

Owns: QueueAccounts, fair_tokens_ahead. Runs in: gateway, simulation. Must not know: HTTP, the clock.

The worker serves lower levels first, and among tenants of a level by tokens and weight (VTC, Sheng et al., OSDI 2024). So a
newcomer waits for what its own tenant has ahead of it, and for as much of the others' as fair shares give them meanwhile.
"""

from collections.abc import Mapping

USUAL_WINDOW = 32  # requests over which the usual length of a prompt is averaged
PRIOR_REQUESTS = 8  # of the usual length that are added to those that wait


class QueueAccounts:
    """Requests in flight that have shown no token yet, and those that run, counted by (level, tenant)."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, str], int] = {}
        self._num_queued: dict[int, int] = {}
        self._num_running: dict[int, int] = {}
        self._usual_tokens: dict[int, float] = {}  # of a prompt, by level: the mean of what came lately
        self.num_tokens = 0

    def queue(self, level: int, tenant: str, num_tokens: int) -> None:
        """A request begins to wait."""
        key = (level, tenant)
        self._tokens[key] = self._tokens.get(key, 0) + num_tokens
        self._num_queued[level] = self._num_queued.get(level, 0) + 1
        usual = self._usual_tokens.get(level, float(num_tokens))
        self._usual_tokens[level] = usual + (num_tokens - usual) / USUAL_WINDOW
        self.num_tokens += num_tokens

    def unqueue(self, level: int, tenant: str, num_tokens: int) -> None:
        """A request waits no longer."""
        key = (level, tenant)
        remaining = self._tokens[key] - num_tokens if key in self._tokens else 0
        if remaining:
            self._tokens[key] = remaining
        else:
            self._tokens.pop(key, None)
        self._num_queued[level] -= 1
        self.num_tokens -= num_tokens

    def run(self, level: int, change: int) -> None:
        """A request begins (1) or ceases (-1) to run."""
        self._num_running[level] = self._num_running.get(level, 0) + change

    def num_queued_up_to(self, max_level: int) -> int:
        """Waiting requests that would be served before a newcomer of this level, its equals included."""
        return sum(count for level, count in self._num_queued.items() if level <= max_level)

    def mean_tokens_up_to(self, max_level: int) -> float:
        """Of the prompts of those requests: the waiting ones, and as many as PRIOR_REQUESTS of what came lately; 0: none came.

        The waiting ones alone may be one prompt of a single token, before hundreds of callers who were told to come.
        """
        usual = [mean for level, mean in self._usual_tokens.items() if level <= max_level]
        if not usual:
            return 0.0
        num_tokens = sum(count for (level, _), count in self._tokens.items() if level <= max_level)
        prior = PRIOR_REQUESTS * sum(usual) / len(usual)
        return (num_tokens + prior) / (self.num_queued_up_to(max_level) + PRIOR_REQUESTS)

    def num_running_up_to(self, max_level: int) -> int:
        """Running requests whose place a newcomer of this level cannot take."""
        return sum(count for level, count in self._num_running.items() if level <= max_level)

    def tokens_by_tenant(self, max_level: int) -> dict[str, float]:
        """Waiting prompt tokens of classes up to this level."""
        found: dict[str, float] = {}
        for (level, tenant), num_tokens in self._tokens.items():
            if level <= max_level:
                found[tenant] = found.get(tenant, 0.0) + num_tokens
        return found


def fair_tokens_ahead(queued: Mapping[str, float], tenant: str, num_tokens: int, weights: Mapping[str, float]) -> float:
    """Tokens that are served before a newcomer's first token, its own left out.

    `queued`: waiting tokens by tenant. While the tenant's own queue and the newcomer are served, every other backlogged tenant
    gets tokens in proportion to its weight, until it has no more.
    """
    own = queued.get(tenant, 0.0)
    needed = (own + num_tokens) / weights.get(tenant, 1.0)
    others = sum(min(tokens, needed * weights.get(name, 1.0)) for name, tokens in queued.items() if name != tenant)
    return own + others

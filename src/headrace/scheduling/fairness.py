"""Who had how much: token counters of accounts that share one level.

Owns: TokenCosts, TenantLedger. Runs in: worker, tests, simulation.
Must not know: requests, queues, time.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from headrace.protocol.errors import ConfigurationError
from headrace.scheduling.claims import Account

_MAX_COUNTER = float(2**40)  # rebased above: a float still tells 1/4096 of a token from none there


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What a token counts. An output token costs more than one of the prompt, for it takes a row of a step for itself."""

    prefill: float = 1.0
    output: float = 2.0  # as in VTC
    cached: float = 0.1  # of the prompt, found in the prefix cache: it holds memory and attention, but no computing

    def __post_init__(self) -> None:
        if not (self.prefill > 0 and self.output > 0 and 0 <= self.cached <= self.prefill):
            raise ConfigurationError("token costs must be above 0, and a cached token must not cost more than a computed one.")

    def of(self, num_prefill_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> float:
        """The cost of so many tokens."""
        return num_prefill_tokens * self.prefill + num_cached_tokens * self.cached + num_output_tokens * self.output


class TenantLedger:
    """Virtual token counters (VTC: Sheng et al., OSDI 2024): who is active and has the smallest counter is served next.

    A counter grows by cost / weight. An account is active while it has a request that waits to be admitted. One that becomes
    active again is lifted to the smallest active counter (to the counter of the last that was active when there is none), so
    that idle time is no credit. Whoever is active is in the order: nobody is held back while there is room (work-conserving).

    Between two accounts that stay active, the difference of service / weight stays below 2 * max(most that is charged for one
    admission, most that is charged for all that run at once) / the smaller weight (VTC, theorem 4.4) when always the first is
    admitted, and grows by at most `quantum` when any of `with_credit(quantum)` is.

    Counters are finite whatever happens: when the smallest active one is above 2**40, it is taken off all of them.
    """

    def __init__(self, weights: Mapping[Account, float], costs: TokenCosts | None = None) -> None:
        """`weights`: of all accounts there can be; another one raises KeyError."""
        self._weights = weights
        self._costs = costs or TokenCosts()
        self._counters: dict[Account, float] = {}
        self._order: list[tuple[float, Account]] = []  # the active ones, where they were placed last
        self._placed: dict[Account, float] = {}  # active account -> the counter it is placed with
        self._moved: set[Account] = set()  # active, and charged since
        self._last_active: Account | None = None

    def __len__(self) -> int:
        return len(self._placed)

    def __contains__(self, account: object) -> bool:
        return account in self._placed

    def counter(self, account: Account) -> float:
        """Tokens / weight; only differences mean anything."""
        return self._counters.get(account, 0.0)

    def activate(self, account: Account) -> None:
        """The account has somebody waiting. Active ones are left as they are."""
        if account in self._placed:
            return
        self._settle()
        counter = self.counter(account)
        if self._order:
            counter = max(counter, self._order[0][0])
        elif self._last_active is not None:
            counter = max(counter, self.counter(self._last_active))
        self._counters[account] = counter
        self._place(account, counter)

    def deactivate(self, account: Account) -> None:
        """The account has nobody waiting any more. Raises KeyError when it was not active."""
        self._unplace(account)
        self._moved.discard(account)
        self._last_active = account

    def charge(
        self, account: Account, *, num_prefill_tokens: int = 0, num_cached_tokens: int = 0, num_output_tokens: int = 0
    ) -> None:
        """Count tokens. The prompt is charged whole at admission, so that the next pick knows of it; output as it is drawn."""
        cost = self._costs.of(num_prefill_tokens, num_cached_tokens, num_output_tokens) / self._weights[account]
        self._counters[account] = self._counters.get(account, 0.0) + cost
        if account in self._placed:
            self._moved.add(account)
        elif not self._placed and self._counters[account] > _MAX_COUNTER:
            self._rebase(self._counters[account])

    def first(self) -> Account | None:
        """The active account with the smallest counter; None when nobody is active."""
        self._settle()
        return self._order[0][1] if self._order else None

    def with_credit(self, quantum: float) -> Iterator[Account]:
        """Active accounts less than `quantum` (tokens / weight) above the smallest; that one first, in any case."""
        self._settle()
        if not self._order:
            return
        limit = self._order[0][0] + quantum
        for index, (counter, account) in enumerate(self._order):
            if index and counter >= limit:
                return
            yield account

    def _settle(self) -> None:
        """Put those that were charged where they belong now."""
        if not self._moved:
            return
        for account in self._moved:
            self._unplace(account)
            self._place(account, self._counters[account])
        self._moved.clear()
        if self._order[0][0] > _MAX_COUNTER:
            self._rebase(self._order[0][0])

    def _place(self, account: Account, counter: float) -> None:
        self._placed[account] = counter
        insort(self._order, (counter, account))

    def _unplace(self, account: Account) -> None:
        del self._order[bisect_left(self._order, (self._placed.pop(account), account))]

    def _rebase(self, floor: float) -> None:
        """Take the floor off all counters. Those below it are of idle accounts; they keep no credit, nor had they any.

        With nobody active the floor is the counter of whom was charged last: who returns then starts level with it.
        """
        self._counters = {account: max(0.0, counter - floor) for account, counter in self._counters.items()}
        self._order = sorted((self._counters[account], account) for account in self._placed)
        self._placed = {account: counter for counter, account in self._order}


def jain_index(shares: Iterable[float]) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984) of shares already divided by weights: 1 equal, 1/n all for one.

    Raises ValueError for none; 1 when all are 0.
    """
    values = list(shares)
    if not values:
        raise ValueError("no share")
    squares = sum(value * value for value in values)
    return 1.0 if squares == 0 else sum(values) ** 2 / (len(values) * squares)

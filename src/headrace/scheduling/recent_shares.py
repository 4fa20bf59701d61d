"""Who had little of late: accounts that get far less than their share are served at once when they come.

Owns: RecentShares. Runs in: worker, tests, simulation.
Must not know: queues, places, blocks.
"""

from collections.abc import Mapping

from headrace.scheduling.claims import Account

HALF_LIFE_NS = 10_000_000_000  # what an account had counts half after so long
EXPECTED_NS = 30_000_000_000  # an account that had something in this time may come again at any moment
LIGHT_PART = 0.5  # light is who had less than this part of what the one with most had, both by weight

_MAX_HALF_LIVES = 512  # then all figures are taken relative to now: floats reach to 2**1023


class RecentShares:
    """Tokens of the accounts of one level, each worth less the longer ago it was.

    The counters of `TenantLedger` say who is next; they forget idle time, so an account that seldom asks stands level with one
    that never stops. These here tell the two apart. An account that had less than half of what the one with most had (both
    divided by weight) is *light*: by more than it has, it cannot harm the others. Two that compete with full queues get equal
    amounts, and neither is light; alone, nobody is.

    Figures are decayed forward (Cormode, Shkapenyuk, Srivastava, Xu: Forward decay, ICDE 2009): tokens at time t count
    2**((t - origin) / half-life), so that comparing needs no clock and charging touches one figure.
    """

    def __init__(self, weights: Mapping[Account, float]) -> None:
        """`weights`: of all accounts there can be; another one raises KeyError."""
        self._weights = weights
        self._amounts: dict[Account, float] = {}
        self._charged_ns: dict[Account, int] = {}  # when last
        self._most = 0.0
        self._origin_ns: int | None = None

    def charge(self, account: Account, cost: float, now_ns: int) -> None:
        """The account had tokens worth so much. Times going back count as the origin's."""
        if self._origin_ns is None:
            self._origin_ns = now_ns
        num_half_lives = max(0.0, (now_ns - self._origin_ns) / HALF_LIFE_NS)
        if num_half_lives > _MAX_HALF_LIVES:
            self._rebase(num_half_lives, now_ns)
            num_half_lives = 0.0
        amount = self._amounts.get(account, 0.0) + cost / self._weights[account] * 2.0**num_half_lives
        self._amounts[account] = amount
        self._charged_ns[account] = now_ns
        self._most = max(self._most, amount)

    def is_light(self, account: Account) -> bool:
        """Whether it had far less than another one."""
        return self._amounts.get(account, 0.0) < LIGHT_PART * self._most

    def num_expected(self, now_ns: int, max_num: int) -> int:
        """How many light accounts had something not long ago, counted up to `max_num`."""
        num_found = 0
        if len(self._amounts) > 1:
            limit = LIGHT_PART * self._most
            for account, amount in self._amounts.items():
                if num_found >= max_num:
                    break
                num_found += amount < limit and now_ns - self._charged_ns[account] < EXPECTED_NS
        return num_found

    def _rebase(self, num_half_lives: float, now_ns: int) -> None:
        """Count from now on. What has become too small to tell from nothing is forgotten."""
        factor = 2.0**-num_half_lives
        self._amounts = {account: amount * factor for account, amount in self._amounts.items() if amount * factor > 1e-6}
        self._charged_ns = {account: self._charged_ns[account] for account in self._amounts}
        self._most = max(self._amounts.values(), default=0.0)
        self._origin_ns = now_ns

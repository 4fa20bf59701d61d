"""One look at a server: what each of its pages said at one time.

Owns: Scrape. Runs in: CLI. Must not know: how it was fetched, what is made of it.
"""

from dataclasses import dataclass

from headrace.monitor.exposition import Exposition
from headrace.telemetry.reports import DebugRequests


@dataclass(frozen=True, slots=True)
class Scrape:
    """`error`: why nothing was learnt (no answer at all). The other `*_error` say why one page said nothing."""

    at_seconds: float  # of a monotonic clock, when the metrics were asked for
    unix_seconds: float
    error: str = ""
    is_ready: bool | None = None  # None: the page did not say
    reason: str = ""  # why it is not ready
    model: str = ""
    version: str = ""
    metrics: Exposition | None = None
    metrics_error: str = ""
    requests: DebugRequests | None = None
    requests_error: str = ""

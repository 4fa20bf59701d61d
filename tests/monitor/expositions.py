"""Expositions and looks for tests of the live view."""

from headrace.monitor.exposition import read_exposition
from headrace.monitor.scrape import Scrape
from headrace.telemetry.reports import DebugRequests, RequestReport, StallReport


def histogram(name: str, buckets: dict[str, float], total: float, labels: str = "") -> str:
    """Cumulative buckets by their bound."""
    lines = [f"# TYPE {name} histogram"]
    comma = f"{labels}," if labels else ""
    lines += [f'{name}_bucket{{{comma}le="{bound}"}} {count}' for bound, count in buckets.items()]
    braces = f"{{{labels}}}" if labels else ""
    lines += [f"{name}_count{braces} {buckets['+Inf']}", f"{name}_sum{braces} {total}"]
    return "\n".join(lines) + "\n"


def scrape(text: str, at_seconds: float = 0.0, **fields: object) -> Scrape:
    """A look at a ready server that shows this."""
    given = {"is_ready": True, "metrics": read_exposition(text), **fields}
    return Scrape(at_seconds, 1_700_000_000.0 + at_seconds, **given)  # type: ignore[arg-type]


def report(request_id: str = "a", age_ms: float = 1000.0, **fields: object) -> RequestReport:
    """A live request."""
    given: dict[str, object] = {
        "request_id": request_id,
        "choice": 0,
        "api": "chat",
        "model": "sim",
        "service_class": "standard",
        "tenant": "default",
        "priority": 0,
        "state": "running",
        "finish_reason": None,
        "error_code": None,
        "arrived_at": 0.0,
        "age_ms": age_ms,
        "tokenized_ms": 1.0,
        "queued_ms": 1.0,
        "first_scheduled_ms": 2.0,
        "first_token_ms": 10.0,
        "last_token_ms": age_ms - 20.0,
        "end_ms": None,
        "phases": {},
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 40,
        "max_tokens": 100,
        "preemptions": 0,
        "stalls": [],
        "num_stalls": 0,
        "waiting_for": None,
        **fields,
    }
    return RequestReport(**given)  # type: ignore[arg-type]


def live(*reports: RequestReport) -> DebugRequests:
    """What /debug/requests says of them."""
    return DebugRequests(live=list(reports), num_live=len(reports), finished=[])


def stall(cause: str, duration_ms: float) -> StallReport:
    """One wait."""
    return StallReport(cause, 5.0, duration_ms)

"""The tables of docs/metrics.md, made from the table of metrics.

python tools/metrics_page.py            # writes them into the page
python tools/metrics_page.py --check    # exits with 1 when the page is stale
"""

import pathlib
import sys

from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry import catalog
from headrace.telemetry.catalog_worker import NOW_METRICS, STEP_METRICS
from headrace.telemetry.metric import (
    BLOCK_AGE_BUCKETS,
    LATENCY_BUCKETS,
    ROW_BUCKETS,
    STAGE_BUCKETS,
    TOKEN_BUCKETS,
    Kind,
    Metric,
)

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
GROUPS = (
    ("The worker now", NOW_METRICS),
    ("The worker since the server's start", STEP_METRICS),
    ("Requests", catalog.REQUEST_METRICS),
    ("The gateway", catalog.GATEWAY_METRICS),
)
BUCKET_SETS = {
    "latency": LATENCY_BUCKETS,
    "stage": STAGE_BUCKETS,
    "age": BLOCK_AGE_BUCKETS,
    "tokens": TOKEN_BUCKETS,
    "rows": ROW_BUCKETS,
}
CONFIGURED = {"class": "the service classes of the configuration", "tenant": "the tenants of the configuration"}


def tables() -> str:
    """Families by group, then the labels' values, then the buckets."""
    parts = []
    for title, metrics in GROUPS:
        parts += [f"### {title}", "", "| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
        parts += [_row(metric) for metric in metrics]
        parts.append("")
    parts += ["### Values of labels", "", "| label | values |", "|---|---|"]
    parts += [f"| `{label}` | {_values(label, *values)} |" for label, values in _label_values().items()]
    parts += ["", "### Buckets", "", "Upper bounds, inclusive; `+Inf` follows.", "", "| buckets | bounds |", "|---|---|"]
    parts += [f"| {name} | {', '.join(map(_plain, bounds))} |" for name, bounds in BUCKET_SETS.items()]
    return "\n".join(parts)


def page(text: str) -> str:
    """The page with the tables of now. Raises ValueError when it has no place for them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{BEGIN} and {END} must stand in the page")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _row(metric: Metric) -> str:
    labels = [*metric.labels, *(["model_name"] if metric.is_of_model else [])]
    kind = metric.kind.value
    if metric.kind is Kind.HISTOGRAM:
        kind += f" ({next(name for name, bounds in BUCKET_SETS.items() if bounds == metric.buckets)})"
    named = ", ".join(f"`{label}`" for label in labels)
    return f"| `{metric.name}` | {kind} | {metric.unit} | {named} | {metric.help} |"


def _label_values() -> dict[str, tuple[tuple[str, ...], str]]:
    used = {label for metric in catalog.METRICS for label in metric.labels}
    return {label: values for label, values in catalog.label_values(TrafficPolicy()).items() if label in used}


def _values(label: str, values: tuple[str, ...], other: str) -> str:
    shown = ", ".join(f"`{value}`" for value in values)
    if label in CONFIGURED:
        shown = f"{CONFIGURED[label]} (without one: {shown})"
    counted = label in ("route", "status", "code", "tenant", "class", "finished_reason")
    return f"{shown}; all else counts as `{other}`" if counted else shown


def _plain(bound: float) -> str:
    return f"{bound:.6f}".rstrip("0").rstrip(".")


def main(arguments: list[str]) -> int:
    """The exit status."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = page(text)
    if arguments == ["--check"]:
        if wanted != text:
            print("docs/metrics.md is stale: run python tools/metrics_page.py")
        return int(wanted != text)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

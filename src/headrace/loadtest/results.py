"""Figures of a run, as they are printed and saved. The names are stable: scripts rely on them.

Owns: RunResult and its parts. Runs in: load tool. Must not know: how figures are computed or drawn.
docs/measuring.md defines each figure.
"""

import msgspec

from headrace.loadtest.records import ClientLoad, RunSettings


class Distribution(msgspec.Struct, kw_only=True):
    """Of seconds. Percentiles are None when there is no sample. `ci95`: bootstrap intervals by name ("p50" -> [low, high])."""

    count: int
    mean: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None
    ci95: dict[str, tuple[float, float]] = {}


class RequestCounts(msgspec.Struct, kw_only=True):
    """Of the measured window. offered = completed + refused + failed (unfinished ones are among the failed)."""

    offered: int
    completed: int
    refused: int
    failed: int


class GoodputFigure(msgspec.Struct, kw_only=True):
    """Requests that met both targets, over all that were offered."""

    name: str  # "mlperf-interactive" and the like
    ttft_seconds: float
    tbt_seconds: float  # compared with the request's worst-10% TBT
    share: float
    per_second: float


class RunResult(msgspec.Struct, kw_only=True):
    """The figures of one run."""

    label: str = ""
    settings: RunSettings
    requests: RequestCounts
    errors: dict[str, int] = {}  # by kind, refused ones included
    first_errors: dict[str, str] = {}  # by kind, what was said of the first that said anything
    window_seconds: float
    requests_per_second: float  # completed
    offered_per_second: float
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens: int
    goodput: float  # share at the first target
    goodput_targets: list[GoodputFigure]
    ttft_seconds: Distribution
    tbt_seconds: Distribution  # per token, see token_counts
    tbt_chunk_seconds: Distribution  # per event with text
    tpot_seconds: Distribution  # per request
    worst_tbt_seconds: Distribution  # per request: mean of its largest 10 % of gaps
    e2e_seconds: Distribution
    first_event_seconds: Distribution  # the other definition of TTFT: any event, empty or not
    ttft_from_due_seconds: Distribution | None = (
        None  # open loop: from when the request was due, whatever the client's lateness
    )
    connect_seconds: Distribution | None = None  # of requests that opened a connection; in no other figure
    token_counts: str = "exact"  # noqa: S105 - "exact", "apportioned" (some events held several tokens), "chunks" (no usage)
    usage_mismatches: int = 0  # requests whose usage and events cannot both be right
    groups: dict[str, "RunResult"] = {}  # of a mix, by class or tenant
    client: ClientLoad
    warnings: list[str] = []  # for people, loudest first

"""The figures and their definitions: the one table behind --help, docs/measuring.md and every report.

Owns: DEFINITIONS. Runs in: load tool. Must not know: how a figure is computed or drawn.
"""

from typing import NamedTuple


class Definition(NamedTuple):
    """`key` is the field of RunResult where there is one, `name` what people read."""

    key: str
    name: str
    unit: str
    definition: str
    trap: str


DEFINITIONS: tuple[Definition, ...] = (
    Definition(
        "ttft_seconds",
        "TTFT",
        "seconds",
        "Time to first token: from the moment the request is sent to the arrival of the first non-empty text. One value a "
        "request; connection set-up is not in it (the pool is warmed first, or it is reported apart).",
        "A server that sends an empty role chunk on admission looks instant to tools that count any event; see first event. In "
        "a closed loop a slow server is asked less often, so its TTFT stays flattering: claims of capacity need an open loop.",
    ),
    Definition(
        "first_event_seconds",
        "First event",
        "seconds",
        "From send to the first stream event of any kind, empty or not. It is the TTFT of tools that do not look at the text.",
        "Far below TTFT: the server sends something before it has a token. Compare servers by TTFT.",
    ),
    Definition(
        "tbt_seconds",
        "TBT (ITL)",
        "seconds",
        "Time between tokens: the gap between two consecutive tokens of one answer; the distribution is over all gaps of all "
        "measured requests. An event that brings k tokens counts as one gap of the measured length and k-1 gaps of zero.",
        "Long answers have more gaps and so more weight: read it beside worst-10% TBT, which gives each request one voice. "
        "When events hold several tokens and the server does not say how many, tokens are apportioned by characters, and the "
        "report says so.",
    ),
    Definition(
        "tbt_chunk_seconds",
        "TBT per chunk",
        "seconds",
        "The gap between two consecutive events with text of one answer, however many tokens they bring.",
        "A server that merges tokens shows fewer and longer gaps here and the same TPOT; what a reader of the stream sees.",
    ),
    Definition(
        "tpot_seconds",
        "TPOT",
        "seconds",
        "Time per output token: for each request (arrival of its last text - arrival of its first text) / (output tokens - 1). "
        "One value a request; answers of one token have none.",
        "A mean hides stalls: a second of silence in an answer of 200 tokens moves it by 5 ms. Some tools call this ITL.",
    ),
    Definition(
        "worst_tbt_seconds",
        "Worst-10% TBT",
        "seconds",
        "For each request the mean of its longest tenth of gaps (at least one). One value a request: how bad its stalls were.",
        "Goodput compares this with the TBT target, so that a stalled answer cannot hide behind its own mean.",
    ),
    Definition(
        "e2e_seconds",
        "E2E",
        "seconds",
        "From send to the last text of a completed request; for an answer without streaming to the arrival of the whole.",
        "Depends on the length of answers: compare only runs with equal output lengths.",
    ),
    Definition(
        "output_tokens_per_second",
        "Output throughput",
        "tokens/s",
        "Output tokens of the measured requests over the length of the measured window. Tokens are those of the server's "
        "usage, checked against the events seen.",
        "In an open loop below saturation it equals what was offered, whatever the server could do.",
    ),
    Definition(
        "requests_per_second",
        "Request throughput",
        "requests/s",
        "Completed requests over the length of the measured window.",
        "See output throughput. Beside it stands the offered rate: when it is higher, the server is behind.",
    ),
    Definition(
        "goodput",
        "Goodput",
        "share",
        "Requests that completed with TTFT and worst-10% TBT both within a named target, over all requests that were offered: "
        "refused, failed and unfinished ones count as misses.",
        "Tools that leave refused requests out of percentiles reward a server for refusing. MLPerf's limits for 8B models are "
        "built in: mlperf 2000/100 ms, mlperf-interactive 500/30 ms.",
    ),
    Definition(
        "requests",
        "Requests",
        "count",
        "Offered = completed + refused + failed, of the measured window. Refused: 429, 503 or 529 before any output. Failed: "
        "every other status, an error or a cut inside a stream, no finish reason, time-out, or unfinished when the run ended.",
        "Latencies are those of requests that gave output; always read them beside this row.",
    ),
    Definition(
        "send_lag",
        "Send lag",
        "seconds",
        "Open loop: how much later than scheduled a request was sent. Requests are sent at absolute times, whatever is "
        "outstanding.",
        "It is the client's fault, not the server's: when its p99 is not small beside TTFT, the client was the bottleneck.",
    ),
    Definition(
        "percentiles",
        "Percentiles",
        "",
        "p50, p90, p99 and p99.9. The intervals (95 %) come from a bootstrap that draws whole requests with replacement, since "
        "gaps of one request are not independent.",
        "A percentile needs samples behind it: a p99 of 50 requests is their maximum. The report warns of it.",
    ),
    Definition(
        "capacity",
        "Capacity",
        "requests/s",
        "The highest offered Poisson rate at which goodput at a named target stays at least 0.99 (or 0.9), found by bisection "
        "and given as a bracket.",
        "Holds for this workload's lengths and sharing of prompts only.",
    ),
    Definition(
        "knee",
        "Knee",
        "clients or requests/s",
        "Where output throughput stops rising with load: the break of a two-segment fit, accepted only if the slope behind it "
        "is at most a quarter of the rise before it, the fit halves the squared error, and throughput there is near its peak.",
        "Beyond it more load buys latency only. A sweep that never saturates has none, and says so.",
    ),
)

BY_KEY: dict[str, Definition] = {definition.key: definition for definition in DEFINITIONS}


def definitions_text() -> str:
    """For --help: a short paragraph for each figure."""
    return "\n\n".join(f"{item.name}{f' ({item.unit})' if item.unit else ''}: {item.definition}" for item in DEFINITIONS)


def definitions_markdown() -> str:
    """The section of docs/measuring.md: a heading, a definition and its traps for each figure. Ends with a line feed."""
    blocks = []
    for item in DEFINITIONS:
        field = f" `{item.key}`" if item.key not in PROSE_KEYS else ""
        unit = f", {item.unit}" if item.unit else ""
        blocks.append(f"**{item.name}**{field}{unit}. {item.definition} *Trap:* {item.trap}\n")
    return "\n".join(blocks)


PROSE_KEYS = frozenset({"send_lag", "percentiles", "capacity", "knee"})  # not fields of the saved result

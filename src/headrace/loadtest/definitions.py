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
        "Time to first token: from the moment the request is sent to the arrival of the first non-empty text. One value for "
        "each completed request. An answer without streaming has its first text when it is whole.",
        "A server that sends an empty role chunk on admission looks instant to tools that count any event: see first event. In "
        "a closed loop a slow server is asked less often, which flatters it: claims of capacity need an open loop.",
    ),
    Definition(
        "ttft_from_due_seconds",
        "TTFT from due",
        "seconds",
        "Open loop only: from the moment the request was due by the schedule, so that lateness of the client is in it. Goodput "
        "judges by it.",
        "Where it is well above TTFT, requests were sent late, and TTFT alone leaves out their wait (coordinated omission).",
    ),
    Definition(
        "first_event_seconds",
        "First event",
        "seconds",
        "From send to the first stream event of any kind, empty or not: the TTFT of tools that do not look at the text.",
        "Far below TTFT, it says only that the server answers before it has a token. Compare servers by TTFT.",
    ),
    Definition(
        "tbt_seconds",
        "TBT (ITL)",
        "seconds",
        "Time between tokens: the gap between two consecutive tokens of one answer; the distribution is over all gaps of all "
        "completed streams. An event that brings k tokens counts as one gap of the measured length and k-1 gaps of zero. Where "
        "usage shows more tokens than events, they are shared out by characters, and the report says so.",
        "Long answers have more gaps and so more weight: read it beside worst-10% TBT, in which each request has one voice.",
    ),
    Definition(
        "tbt_chunk_seconds",
        "TBT per chunk",
        "seconds",
        "The gap between two consecutive events with text of one answer, however many tokens they bring: what a reader sees.",
        "A server that merges tokens shows fewer and longer gaps here, at the same TPOT.",
    ),
    Definition(
        "tpot_seconds",
        "TPOT",
        "seconds",
        "Time per output token: (arrival of the last text - arrival of the first) / (tokens with text - 1). One value for each "
        "completed stream; answers of one token have none.",
        "A mean hides stalls: a second of silence in an answer of 200 tokens moves it by 5 ms. Some tools call this ITL.",
    ),
    Definition(
        "worst_tbt_seconds",
        "Worst-10% TBT",
        "seconds",
        "For each completed stream the mean of the longest tenth of its gaps between tokens, at least one: how bad its stalls "
        "were. One value a request.",
        "Goodput compares this with the TBT target, so that a stalled answer cannot hide behind its own mean.",
    ),
    Definition(
        "e2e_seconds",
        "E2E",
        "seconds",
        "From send to the last text of a completed request.",
        "Grows with the length of answers: compare only runs whose answers are equally long.",
    ),
    Definition(
        "connect_seconds",
        "Connection set-up",
        "seconds",
        "TCP and TLS set-up of those requests that opened a connection. It is in no other figure; by default connections are "
        "opened before the clock starts, and kept.",
        "Tools that open a connection for each request have it inside TTFT.",
    ),
    Definition(
        "output_tokens_per_second",
        "Output throughput",
        "tokens/s",
        "Output tokens that arrived within the measured window, over its length. Tokens are those of the server's usage, "
        "checked against the events seen; answers that failed do not count.",
        "In an open loop below saturation it equals what was offered, whatever more the server could do.",
    ),
    Definition(
        "requests_per_second",
        "Request throughput",
        "requests/s",
        "Requests that completed within the measured window, over its length. Offered: those due in it.",
        "Where the offered rate is higher, the server is behind, and latency grows with the length of the run.",
    ),
    Definition(
        "goodput",
        "Goodput",
        "share",
        "Requests that completed with TTFT (open loop: from due) and worst-10% TBT both within a named target, over all that "
        "were offered: refused, failed and unfinished ones are misses. Built in: mlperf 2000/100 ms and mlperf-interactive "
        "500/30 ms, MLPerf's limits for models of 8B parameters.",
        "Tools that leave refused requests out of their percentiles reward a server for refusing.",
    ),
    Definition(
        "requests",
        "Requests",
        "count",
        "Offered = completed + refused + failed, of those due in the measured window. Refused: 429, 503 or 529 before any "
        "output. Failed: any other status, an error or a cut inside a stream, no finish reason, a time-out, or unfinished when "
        "the run ended.",
        "Latencies are those of completed requests alone: always read them beside this row.",
    ),
    Definition(
        "send_lag",
        "Send lag",
        "seconds",
        "Open loop: how much later than scheduled a request was sent. Requests go out at absolute times, whatever is "
        "outstanding.",
        "It is the client's fault, not the server's: where its p99 is not small beside TTFT, the client was the bottleneck.",
    ),
    Definition(
        "percentiles",
        "Percentiles",
        "",
        "p50, p90, p99 and p99.9. Their 95 % intervals come from a bootstrap that draws whole requests with replacement, since "
        "the gaps of one request are not independent.",
        "A percentile with fewer than two samples beyond it is next to the maximum; it is marked with a star.",
    ),
    Definition(
        "capacity",
        "Capacity",
        "requests/s",
        "The highest offered Poisson rate at which goodput at a named target is at least 0.99 (or another share), found by "
        "bisection and given as a bracket.",
        "It holds for this workload's lengths and shared prefixes only.",
    ),
    Definition(
        "knee",
        "Knee",
        "clients or requests/s",
        "Where output throughput stops rising with load: the break of a two-segment fit, accepted only if the slope behind it "
        "is at most a quarter of the rise before it, the fit halves the squared error, and throughput there is near its peak.",
        "Load beyond it buys latency only. A sweep that never saturates has none, and the report says so.",
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

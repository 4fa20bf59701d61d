"""Draws one frame as lines of a terminal, the less important left out where the screen is small.

Owns: draw. Runs in: CLI, pure. Must not know: HTTP, where numbers come from.
Colours only repeat what words say.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from headrace.monitor.model import Frame, Latency, Percentiles, RequestRow, Status
from headrace.monitor.wording import UNKNOWN, bar, number, per_second, percent, plain, seconds, spark

HISTORY_LENGTH = 30
WIDE_COLUMNS = 96  # from here on there is room for one more column
NARROW_SPARKS = 10  # cells of a sparkline on a line that is narrow
# Lines of a higher rank are left out first.
ALWAYS, DETAIL, MORE_REQUESTS, BY_CLASS, BLANK, REST = 0, 10, 20, 30, 40, 50
NUM_SURE_REQUESTS = 3  # shown before anything that is a detail
NUM_MORE_REQUESTS = 6  # shown before what is only by class
TITLE_CELLS = 10
SMALLEST_STAGE = 0.005  # of the steps' time; below it is in the rest
STATUS_WORDS = {
    Status.READY: ("READY", "bold green"),
    Status.NOT_READY: ("NOT READY", "bold yellow"),
    Status.UNREACHABLE: ("NOT REACHABLE, retrying", "bold red"),
    Status.UNKNOWN: ("NO HEALTH", "bold yellow"),
}
STAGE_ORDER = ("receive", "schedule", "execute_other", "forward", "sample", "apply", "publish")


@dataclass(slots=True)
class History:
    """What sparklines show: the last frames' output tokens per second and 99th percentile of TTFT."""

    output: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    ttft_p99: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))

    def note(self, frame: Frame) -> None:
        """Take one frame."""
        self.output.append(frame.throughput.output_tokens_per_second)
        self.ttft_p99.append(frame.latency_seconds.ttft.all.p99)


@dataclass(frozen=True, slots=True)
class _Line:
    rank: int
    text: Text


@dataclass(frozen=True, slots=True)
class _Page:
    """Makes the lines of one frame, closer together where the screen is narrow."""

    width: int

    @property
    def is_wide(self) -> bool:
        return self.width >= WIDE_COLUMNS

    def line(self, title: str, *pairs: tuple[str, str]) -> Text:
        """A title and pairs of a dim name and its value."""
        line = Text(f"{title:<{TITLE_CELLS}}", style="bold")
        return self.append(line, *pairs)

    def append(self, line: Text, *pairs: tuple[str, str]) -> Text:
        """More pairs, as far as the line reaches. One without a name is a value alone."""
        for name, value in pairs:
            if line.cell_len > self.width:
                break
            gap = "" if line.cell_len <= TITLE_CELLS else "   " if self.is_wide else "  "
            line.append(f"{gap}{name} " if name else gap, style="not bold dim")
            line.append(value, style="not bold default")
        return line


def draw(frame: Frame, history: History, width: int, height: int | None = None, silent_seconds: float = 0.0) -> Text:
    """At most `height` lines of at most `width` cells. `silent_seconds`: the server has not answered the next look so long."""
    page = _Page(width)
    lines = [*_head(frame, silent_seconds), *_throughput(page, frame, history), *_latencies(page, frame, history)]
    lines += [*_batch(page, frame), *_memory(page, frame), *_stalls(page, frame), *_requests(page, frame)]
    if height is not None and len(lines) > height:
        kept = sorted(range(len(lines)), key=lambda index: (lines[index].rank, index))[: max(1, height)]
        lines = [lines[index] for index in sorted(kept)]
    for line in lines:
        line.text.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="crop").join(line.text for line in lines)


def _head(frame: Frame, silent_seconds: float) -> Iterator[_Line]:
    server = frame.server
    title = Text("headrace top  ", style="bold")
    title.append(plain(server.url), style="not bold")
    names = [plain(name) for name in (server.model, server.version) if name]
    title.append("".join(f"   {name}" for name in names), style="not bold")
    clock = time.strftime("%H:%M:%S", time.localtime(frame.unix_seconds))
    title.append(f"   {clock}", style="not bold dim")
    yield _Line(ALWAYS, title)
    word, style = STATUS_WORDS[server.status]
    state = Text(word, style=style)
    if server.worker_up is not None:
        state.append(f"   worker {'up' if server.worker_up else 'DOWN'}", style="not bold default")
    if server.worker_restarts is not None:
        state.append(f"   worker restarts {server.worker_restarts}", style="not bold default")
    if server.reason:
        state.append(f"   {plain(server.reason)}", style="not bold default")
    if silent_seconds:
        state.append(f"   no answer for {silent_seconds:.0f} s", style="bold red")
    yield _Line(ALWAYS, state)
    if frame.metrics_error:
        yield _Line(ALWAYS, Text(f"no numbers: {plain(frame.metrics_error)}", style="yellow"))
    yield _Line(BLANK, Text())


def _throughput(page: _Page, frame: Frame, history: History) -> Iterator[_Line]:
    now = frame.throughput
    line = page.line("tokens", ("output", f"{number(now.output_tokens_per_second)} tok/s"))
    if len(history.output) > 1:
        num_cells = HISTORY_LENGTH if page.is_wide else NARROW_SPARKS
        line.append(f" {spark(list(history.output)[-num_cells:])}", style="not bold green")
    pairs = [("prompt", f"{number(now.prompt_tokens_per_second)} tok/s"), ("from cache", percent(now.cached_share))]
    yield _Line(ALWAYS, page.append(line, *pairs))
    ended = [(plain(reason), per_second(rate)) for reason, rate in now.finished_per_second.items() if rate > 0]
    none = UNKNOWN if not now.finished_per_second else "0/s"
    pairs = [("started", per_second(now.started_per_second)), *(ended or [("ended", none)])]
    yield _Line(ALWAYS, page.line("requests", *pairs, ("refused", per_second(now.refused_per_second))))
    yield _Line(BLANK, Text())


def _latencies(page: _Page, frame: Frame, history: History) -> Iterator[_Line]:
    rows: tuple[tuple[str, Latency], ...] = (
        ("TTFT", frame.latency_seconds.ttft),
        ("TBT", frame.latency_seconds.tbt),
        ("TPOT", frame.latency_seconds.tpot),
        ("queue", frame.latency_seconds.queue),
    )
    heading = f"{'':<14}{'p50':>10}{'p90':>10}{'p99':>10}{'count':>9}"
    yield _Line(ALWAYS, Text(heading, style="dim"))
    active = {name for _, latency in rows for name, found in latency.by_class.items() if found.count}
    for title, latency in rows:
        line = Text(f"{title:<14}", style="dim").append(_figures(latency.all), style="not dim")
        room = page.width - line.cell_len - 6
        if title == "TTFT" and len(history.ttft_p99) > 1 and room > 4:
            line.append("  p99 ").append(spark(list(history.ttft_p99)[-room:]), style="not dim cyan")
        yield _Line(ALWAYS, line)
        for name, found in latency.by_class.items():
            if len(active) > 1 and found.count:
                cell = set_cell_size(f"  {plain(name)}", 14)
                yield _Line(BY_CLASS, Text(cell, style="dim").append(_figures(found), style="not dim"))
    yield _Line(BLANK, Text())


def _figures(found: Percentiles) -> str:
    return f"{seconds(found.p50):>10}{seconds(found.p90):>10}{seconds(found.p99):>10}{found.count or UNKNOWN:>9}"


def _batch(page: _Page, frame: Frame) -> Iterator[_Line]:
    now = frame.batch
    line = page.line("batch", ("running", number(now.running)), ("waiting", number(now.waiting)))
    if now.blocked_by:
        page.append(line, ("blocked by", ", ".join(map(plain, now.blocked_by))))
    yield _Line(ALWAYS, line)
    pairs = [
        ("p50", seconds(now.step_seconds.p50)),
        ("p99", seconds(now.step_seconds.p99)),
        ("", per_second(now.steps_per_second)),
        ("rows", number(now.rows_per_step)),
        ("tokens", number(now.tokens_per_step)),
        ("prefill", percent(now.prefill_share)),
    ]
    if now.padding_share:
        pairs.append(("padding", percent(now.padding_share)))
    yield _Line(ALWAYS, page.line("step", *pairs))
    if now.stage_shares:
        shown = {name: share for name, share in now.stage_shares.items() if share >= SMALLEST_STAGE}
        ordered = sorted(shown, key=lambda name: (STAGE_ORDER.index(name) if name in STAGE_ORDER else 99, name))
        rest = max(0.0, 1.0 - sum(shown.values()))
        shares = [(plain(name), percent(shown[name])) for name in ordered]
        yield _Line(DETAIL, page.line("stages", *shares, ("rest", percent(rest))))
    if now.classes:
        loads = [(plain(name), f"{load.running} + {load.waiting}") for name, load in now.classes.items()]
        yield _Line(DETAIL, page.line("by class", *loads).append("  (running + waiting)", style="not bold dim"))


def _memory(page: _Page, frame: Frame) -> Iterator[_Line]:
    now = frame.cache
    line = page.line("KV cache", ("", f"{bar(now.usage, 16)} {percent(now.usage)}"))
    pairs = [("hit rate", percent(now.hit_rate)), ("evicted", per_second(now.evictions_per_second))]
    pairs.append(("preempted", per_second(now.preemptions_per_second)))
    if now.recomputed_tokens_per_second:
        pairs.append(("recomputed", f"{number(now.recomputed_tokens_per_second)} tok/s"))
    yield _Line(ALWAYS, page.append(line, *pairs))
    gateway = frame.gateway
    rings = [(f"{plain(name)} ring", percent(fill)) for name, fill in sorted(gateway.ring_fill.items())]
    pairs = [*(rings or [("rings", UNKNOWN)]), ("ring full", per_second(gateway.ring_full_per_second))]
    yield _Line(DETAIL, page.line("gateway", *pairs, ("CPU per token", seconds(gateway.cpu_seconds_per_token))))


def _stalls(page: _Page, frame: Frame) -> Iterator[_Line]:
    stalls = sorted((frame.stalls or {}).items(), key=lambda item: -item[1].seconds)
    pairs = [(plain(cause), f"{found.count} ({seconds(found.seconds)})") for cause, found in stalls]
    none = UNKNOWN if frame.stalls is None else "none"
    yield _Line(ALWAYS, page.line("stalls", *(pairs or [("", none)])))
    yield _Line(BLANK, Text())


@dataclass(frozen=True, slots=True)
class _Columns:
    """Of the table of requests: cells of each."""

    request_id: int
    tenant: int
    why: int

    @classmethod
    def of(cls, width: int) -> "_Columns":
        """What is left after the fixed ones goes to the id and the reason."""
        tenant = 12 if width >= WIDE_COLUMNS else 0
        left = max(24, width - 12 - tenant - 10 - 9 - 8 - 9)
        why = min(30, max(19, left // 2))
        return cls(min(40, left - why), tenant, why)


def _requests(page: _Page, frame: Frame) -> Iterator[_Line]:
    now = frame.requests
    if now.error:
        yield _Line(ALWAYS, page.line("live").append(f"not shown: {plain(now.error)}", style="not bold yellow"))
        return
    columns = _Columns.of(page.width)
    cells = ("id", "class", "tenant", "state", "age", "tokens", "last", "waits (longest)")
    heading = _row(columns, *cells)
    if now.num_live is not None:
        yield _Line(DETAIL, page.line("live", ("requests", number(now.num_live))))
    if not now.slowest:
        return
    yield _Line(ALWAYS, Text(heading, style="dim"))
    for index, request in enumerate(now.slowest):
        rank = ALWAYS if index < NUM_SURE_REQUESTS else MORE_REQUESTS if index < NUM_MORE_REQUESTS else REST
        style = "yellow" if request.waiting_for else ""
        yield _Line(rank, Text(_request(columns, request), style=style))


def _request(columns: _Columns, request: RequestRow) -> str:
    why = plain(request.waiting_for) if request.waiting_for else ""
    if request.longest_stall is not None:
        why = f"{why} ({plain(request.longest_stall.cause)} {seconds(request.longest_stall.seconds)})".strip()
    return _row(
        columns,
        plain(request.request_id),
        plain(request.service_class),
        plain(request.tenant),
        plain(request.state),
        seconds(request.age_seconds),
        number(request.output_tokens),
        seconds(request.last_token_seconds_ago),
        why,
    )


def _row(columns: _Columns, *cells: str) -> str:
    request_id, service_class, tenant, state, age, tokens, last, why = cells
    left = [(request_id, columns.request_id), (service_class, 12), (tenant, columns.tenant), (state, 10)]
    right = [(age, 9), (tokens, 8), (last, 9)]
    head = "".join(_cut(text, size - 1) + " " for text, size in left if size)
    return head + "".join(_cut(text, size, to_right=True) for text, size in right) + "  " + why


def _cut(text: str, size: int, *, to_right: bool = False) -> str:
    """Exactly so many cells."""
    if cell_len(text) > size:
        return set_cell_size(text, size - 1) + "…"
    blanks = " " * (size - cell_len(text))
    return blanks + text if to_right else text + blanks

"""What `headrace bench` shows while it measures: a live line for the run in progress, a line for each run that ended.

Owns: Display. Runs in: CLI, on standard error. Must not know: how runs are made or reports look.
"""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.loadtest.progress import LoadProgress
from headrace.loadtest.report.tables import number, percent, seconds
from headrace.loadtest.results import RunResult

BAR_CELLS = 24


class Display:
    """Live only on a terminal; elsewhere finished runs are lines, and a quiet display says nothing."""

    def __init__(self, console: Console, *, is_quiet: bool = False) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._live: Live | None = None
        self._title = ""

    @contextlib.contextmanager
    def measuring(self, title: str) -> Iterator[None]:
        """While one run is made; `update` shows how far it is."""
        self._title = title
        if self._is_quiet or not self._console.is_terminal:
            yield
            return
        with Live(Text(title), console=self._console, transient=True, auto_refresh=False) as self._live:
            try:
                yield
            finally:
                self._live = None

    def update(self, progress: LoadProgress) -> None:
        """Show how far the run is."""
        if self._live is not None:
            self._live.update(Text(progress_line(self._title, progress), no_wrap=True, overflow="ellipsis"), refresh=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._is_quiet:
            self._console.print(Text(text), soft_wrap=True)


def progress_line(title: str, progress: LoadProgress) -> str:
    """`8 clients  ████████░░░░  measuring 12 s  running 8  done 96 (2 failed)  412 tokens/s`."""
    parts = [
        title,
        _bar(progress),
        f"{progress.phase.value} {progress.elapsed_seconds:.0f} s",
        f"running {progress.num_running}",
    ]
    lost = [f"{count} {what}" for count, what in ((progress.num_refused, "refused"), (progress.num_failed, "failed")) if count]
    of_all = f"/{progress.max_requests}" if progress.max_requests is not None else ""
    parts.append(f"done {progress.num_done}{of_all}" + (f" ({', '.join(lost)})" if lost else ""))
    parts.append(f"{progress.output_tokens_per_second:.0f} tokens/s")
    if progress.max_send_lag_seconds > 0.05:
        parts.append(f"sent up to {seconds(progress.max_send_lag_seconds)} late")
    return "  ".join(part for part in parts if part)


def _bar(progress: LoadProgress) -> str:
    """By whichever limit is nearer; empty when there is none."""
    shares = []
    if progress.max_requests:
        shares.append(progress.num_done / progress.max_requests)
    if progress.max_seconds:
        shares.append(progress.elapsed_seconds / progress.max_seconds)
    if not shares:
        return ""
    filled = round(BAR_CELLS * min(1.0, max(shares)))
    return "█" * filled + "░" * (BAR_CELLS - filled)


def result_line(result: RunResult) -> str:
    """One finished run in a line."""
    counts = result.requests
    lost = counts.refused + counts.failed
    parts = [
        f"{result.label}:" if result.label else "",
        f"{number(result.output_tokens_per_second)} tokens/s",
        f"TTFT p50 {seconds(result.ttft_seconds.p50)} p99 {seconds(result.ttft_seconds.p99)}",
        f"TBT p50 {seconds(result.tbt_seconds.p50)} p99 {seconds(result.tbt_seconds.p99)}",
        f"goodput {percent(result.goodput)}",
        f"{counts.completed}/{counts.offered} completed" + (f", {lost} REFUSED OR FAILED" if lost else ""),
        "CLIENT WAS THE BOTTLENECK" if result.client.was_bottleneck else "",
    ]
    return "  ".join(part for part in parts if part)

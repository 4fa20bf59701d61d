"""How far a run is: what a live display shows.

Owns: LoadProgress, the tally behind it. Runs in: load tool; pure. Must not know: how it is drawn, how requests are sent.
"""

import enum
from collections import deque

import msgspec

from headrace.loadtest.records import Outcome, RequestRecord, RunSettings

RATE_SECONDS = 2.0  # the live tokens per second are taken over about this


class Phase(enum.Enum):
    """Where in its course a run stands."""

    CONNECTING = "connecting"  # processes start, connections are opened; the clock has not started
    WARM_UP = "warm-up"
    MEASURING = "measuring"
    COOL_DOWN = "cool-down"
    DRAINING = "draining"  # nothing new is sent, what runs may end


class LoadProgress(msgspec.Struct, kw_only=True, frozen=True):
    """A look at a run in progress. Tokens are text events until a request's usage is known: for people, not for reports."""

    phase: Phase
    elapsed_seconds: float = 0.0
    max_requests: int | None = None  # as the settings limit it
    max_seconds: float | None = None
    num_sent: int = 0
    num_running: int = 0
    num_completed: int = 0
    num_refused: int = 0
    num_failed: int = 0
    output_tokens: int = 0
    output_tokens_per_second: float = 0.0
    max_send_lag_seconds: float = 0.0  # open loop: the latest send so far, behind its due time

    @property
    def num_done(self) -> int:
        """Requests that ended, however."""
        return self.num_completed + self.num_refused + self.num_failed


class Tally:
    """Counts behind the live display, from what client processes report."""

    def __init__(self, num_processes: int) -> None:
        self._sent = [0] * num_processes
        self._running = [0] * num_processes
        self._texts = [0] * num_processes
        self._ended = dict.fromkeys(Outcome, 0)
        self._num_tokens_of_ended = 0
        self._num_texts_of_ended = 0
        self._max_send_lag_seconds = 0.0
        self._history: deque[tuple[float, int]] = deque()  # (time, tokens) of the last RATE_SECONDS

    def take(self, process: int, *, num_sent: int, num_running: int, num_texts: int, max_send_lag_seconds: float) -> None:
        """Note the counts of a process, since its start."""
        self._sent[process], self._running[process], self._texts[process] = num_sent, num_running, num_texts
        self._max_send_lag_seconds = max(self._max_send_lag_seconds, max_send_lag_seconds)

    def end(self, record: RequestRecord) -> None:
        """Note a request that ended."""
        self._ended[record.outcome] += 1
        self._num_texts_of_ended += record.counted_chunks
        self._num_tokens_of_ended += record.counted_chunks if record.output_tokens is None else record.output_tokens

    def progress(
        self, phase: Phase, elapsed_seconds: float, *, max_requests: int | None, max_seconds: float | None
    ) -> LoadProgress:
        """The state of `elapsed_seconds`; call it with rising times."""
        num_texts_of_running = max(0, sum(self._texts) - self._num_texts_of_ended)
        num_tokens = self._num_tokens_of_ended + num_texts_of_running
        self._history.append((elapsed_seconds, num_tokens))
        while len(self._history) > 2 and self._history[1][0] <= elapsed_seconds - RATE_SECONDS:
            self._history.popleft()
        begin, num_tokens_then = self._history[0]
        span = elapsed_seconds - begin
        return LoadProgress(
            phase=phase,
            elapsed_seconds=elapsed_seconds,
            max_requests=max_requests,
            max_seconds=max_seconds,
            num_sent=sum(self._sent),
            num_running=sum(self._running),
            num_completed=self._ended[Outcome.COMPLETED],
            num_refused=self._ended[Outcome.REFUSED],
            num_failed=self._ended[Outcome.FAILED] + self._ended[Outcome.UNFINISHED],
            output_tokens=num_tokens,
            output_tokens_per_second=max(0.0, (num_tokens - num_tokens_then) / span) if span > 0 else 0.0,
            max_send_lag_seconds=self._max_send_lag_seconds,
        )


def phase_at(settings: RunSettings, elapsed_seconds: float) -> Phase:
    """By the clock. A cool-down is known ahead only when the duration ends the run."""
    duration = settings.duration_seconds
    if duration is not None and elapsed_seconds >= duration:
        return Phase.DRAINING
    if elapsed_seconds < settings.warm_up_seconds:
        return Phase.WARM_UP
    if duration is not None and elapsed_seconds >= duration - settings.cool_down_seconds:
        return Phase.COOL_DOWN
    return Phase.MEASURING

"""How far a run is: what a live display shows.

Owns: LoadProgress. Runs in: load tool. Must not know: how it is drawn, how requests are sent.
"""

import enum

import msgspec


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
    output_tokens_per_second: float = 0.0  # over about the last two seconds
    max_send_lag_seconds: float = 0.0  # open loop: the latest send so far, behind its due time

    @property
    def num_done(self) -> int:
        """Requests that ended, however."""
        return self.num_completed + self.num_refused + self.num_failed

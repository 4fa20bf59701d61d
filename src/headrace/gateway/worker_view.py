"""The worker as the gateway sees it: which life of it is ready, what it offers, and why it is not there.

Owns: WorkerView. Runs in: gateway. Must not know: rings, streams, the clock (time is an argument).
"""

import math
from collections.abc import Callable, Mapping

from headrace.protocol.control import WorkerExited
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import WorkerHello, WorkerLimits
from headrace.protocol.stalls import StallCause
from headrace.telemetry.status_fields import blocked_by_cause

DEFAULT_LOAD_SECONDS = 5.0  # until one start of a worker was measured
MAX_RETRY_AFTER_SECONDS = 60
_NS_PER_SECOND = 1_000_000_000


class WorkerView:
    """Follows the worker's lives by their epochs. What an earlier life says is stale, however late it arrives.

    `read_status` gives the fields of the status page, `heartbeat_ns` among them.
    """

    def __init__(self, read_status: Callable[[], Mapping[str, int]], progress_timeout_seconds: float) -> None:
        self._read_status = read_status
        self._progress_timeout_ns = round(progress_timeout_seconds * _NS_PER_SECOND)
        self._oldest_valid_epoch = 0
        self._hello: WorkerHello | None = None
        self._exit: WorkerExited | None = None  # the last one
        self._start_ns = 0  # when the start that is under way was told; 0: none
        self._load_seconds = DEFAULT_LOAD_SECONDS

    @property
    def epoch(self) -> int | None:
        """The life whose events count; None while no worker is ready."""
        return None if self._hello is None else self._hello.epoch

    def note_started(self, epoch: int, now_ns: int) -> None:
        """A worker process of this epoch was started: every earlier one is gone."""
        self._forget_before(epoch)
        self._start_ns = now_ns

    def note_exited(self, message: WorkerExited) -> None:
        """The worker of this epoch is gone."""
        self._forget_before(message.epoch + 1)
        self._exit = message
        self._start_ns = 0

    def note_hello(self, hello: WorkerHello, now_ns: int) -> bool:
        """The worker of this epoch is ready. False for a stale greeting."""
        if hello.epoch < self._oldest_valid_epoch:
            return False
        if self._start_ns:
            self._load_seconds = (now_ns - self._start_ns) / _NS_PER_SECOND
            self._start_ns = 0
        self._oldest_valid_epoch = hello.epoch
        self._hello = hello
        return True

    def limits(self, now_ns: int) -> WorkerLimits:
        """What the ready worker offers. Raises RequestError NOT_READY."""
        problem = self.problem(now_ns)
        if problem is not None or self._hello is None:
            raise problem or self._not_ready("The model is not loaded.")
        return self._hello.limits

    def problem(self, now_ns: int) -> RequestError | None:
        """Why no request can be served now; None when one can."""
        if self._hello is None:
            return self._not_ready(self._reason())
        age_ns = now_ns - self._read_status()["heartbeat_ns"]
        if age_ns > self._progress_timeout_ns:
            return self._not_ready(f"The model has shown no progress for {age_ns // _NS_PER_SECOND} seconds.")
        return None

    def blocked_by(self) -> StallCause:
        """What keeps those that wait from their first step now: WORKER_BUSY where the worker names nothing else.

        Raises what reading the page raises.
        """
        return blocked_by_cause(self._read_status().get("blocked_by", 0)) or StallCause.WORKER_BUSY

    def num_running(self) -> int:
        """Requests in the running batch. Raises what reading the page raises."""
        return self._read_status().get("num_running", 0)

    def _reason(self) -> str:
        if self._exit is None:
            return "The model is being loaded."
        if self._exit.gives_up:
            return "The model cannot be started; the server's log says why."
        return "The model's process has stopped and is being started again."

    def _not_ready(self, reason: str) -> RequestError:
        delay = self._exit.restart_in_seconds if self._exit is not None and not self._start_ns else 0.0
        seconds = min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(delay + self._load_seconds)))
        return RequestError(reason, code=ErrorCode.NOT_READY, retry_after_seconds=seconds)

    def _forget_before(self, epoch: int) -> None:
        self._oldest_valid_epoch = max(self._oldest_valid_epoch, epoch)
        if self._hello is not None and self._hello.epoch < self._oldest_valid_epoch:
            self._hello = None

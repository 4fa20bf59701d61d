"""What a request's stalls must be, judged from its events and the clock alone.

Owns: StallOracle. Runs in: tests.
Must not know: the scheduler's insides.
"""

from headrace.protocol.messages import GenerationRequest, TokenEvent
from headrace.protocol.stalls import Stall, StallCause

QUEUE = {StallCause.WORKER_BUSY, StallCause.NO_SLOT, StallCause.NO_BLOCKS, StallCause.NO_BUDGET}
PREFILL = {StallCause.NO_BUDGET, StallCause.PREFILL, StallCause.SLOW_STEP}
BETWEEN_TOKENS = {StallCause.PREFILL, StallCause.SLOW_STEP}


class StallOracle:
    """Follows one request. Each wait that can be seen from outside is long exactly when a stall tells it, with its span."""

    def __init__(self, request: GenerationRequest, now_ns: int, threshold_ns: int) -> None:
        self.stalls: list[Stall] = []
        self._arrival_ns = min(request.arrival_ns, now_ns)
        self._threshold_ns = threshold_ns
        self._progress_ns = 0  # of the last token
        self._preempted_ns = 0

    def take(self, event: TokenEvent, now_ns: int) -> None:
        """Check the stalls of one event, which came now."""
        self._check_spans(event.stalls, now_ns)
        expected = self._expected(event, now_ns)
        if expected is not None:
            began_ns, duration_ns, causes = expected
            found = [stall for stall in event.stalls if (stall.began_ns, stall.duration_ns) == (began_ns, duration_ns)]
            is_long = duration_ns >= self._threshold_ns
            assert len(found) == is_long, f"{event} tells a wait of {duration_ns} from {began_ns} {len(found)} times"
            assert all(stall.cause in causes for stall in found)
            assert not is_long or len(event.stalls) <= 2  # the queue and the prefill
        if event.is_preempted and not self._preempted_ns:
            self._preempted_ns = now_ns
        if event.token_ids:
            self._progress_ns, self._preempted_ns = now_ns, 0
        self.stalls += event.stalls

    def _expected(self, event: TokenEvent, now_ns: int) -> tuple[int, int, set[StallCause]] | None:
        """Begin, length and possible causes of the wait that the event ends, where that can be told."""
        if not event.token_ids and not event.is_preempted and event.finish_reason is None:
            return None
        if self._preempted_ns:
            return None if event.is_preempted else (self._preempted_ns, now_ns - self._preempted_ns, {StallCause.PREEMPTED})
        if self._progress_ns:
            return self._progress_ns, now_ns - self._progress_ns, BETWEEN_TOKENS
        if event.first_scheduled_ns:
            return self._arrival_ns, event.first_scheduled_ns - self._arrival_ns, QUEUE
        return None

    def _check_spans(self, stalls: tuple[Stall, ...], now_ns: int) -> None:
        """Within the request's life, one after the other, none shorter than the threshold."""
        end_ns = self.stalls[-1].began_ns + self.stalls[-1].duration_ns if self.stalls else self._arrival_ns
        for stall in stalls:
            assert stall.duration_ns >= self._threshold_ns
            assert stall.began_ns >= end_ns
            end_ns = stall.began_ns + stall.duration_ns
        assert end_ns <= now_ns

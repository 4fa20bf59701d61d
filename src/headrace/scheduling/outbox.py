"""Events on their way out, by the ring that waits for them.

Owns: how token events are made. Runs in: worker, tests, simulation.
Must not know: rings' capacity, how events travel.
"""

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import TokenEvent
from headrace.protocol.step import StepFailure
from headrace.scheduling.sequence import Sequence


class EventOutbox:
    """Events since they were last taken. Indices of a request are contiguous because they are read off its token list."""

    def __init__(self) -> None:
        self._events: dict[int, list[TokenEvent]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether every event was taken."""
        return not self._events

    def put_token(self, sequence: Sequence) -> None:
        """The sequence's last token, just drawn, which does not end it."""
        index = sequence.num_output_tokens - 1
        scheduled_ns = sequence.first_scheduled_ns if index == 0 else 0
        usage = sequence.usage() if index == 0 else None  # for a gateway that ends the request itself, at a stop string
        event = TokenEvent(
            sequence.request_id,
            index,
            sequence.token_ids[-1:],
            usage=usage,
            first_scheduled_ns=scheduled_ns,
            stalls=sequence.wait.take_stalls(),
        )
        self._append(sequence, event)

    def put_preemption(self, sequence: Sequence) -> None:
        """The sequence's memory was taken just now."""
        stalls = sequence.wait.take_stalls()
        event = TokenEvent(sequence.request_id, sequence.num_output_tokens, [], stalls=stalls, is_preempted=True)
        self._append(sequence, event)

    def put_end(self, sequence: Sequence, reason: FinishReason, num_new_tokens: int, failure: StepFailure | None) -> None:
        """The sequence's end, with its last `num_new_tokens` (0 or 1) tokens, which were not emitted before."""
        index = sequence.num_output_tokens - num_new_tokens
        event = TokenEvent(
            sequence.request_id,
            index,
            sequence.token_ids[len(sequence.token_ids) - num_new_tokens :],
            finish_reason=reason,
            error_code=failure.code if failure is not None else "",
            error_message=failure.message if failure is not None else "",
            usage=sequence.usage(),
            first_scheduled_ns=sequence.first_scheduled_ns if index == 0 and num_new_tokens else 0,
            stalls=sequence.wait.take_stalls(),
        )
        self._append(sequence, event)

    def take(self) -> dict[int, list[TokenEvent]]:
        """All events, oldest first, by reply ring; the outbox is empty afterwards."""
        events, self._events = self._events, {}
        return events

    def _append(self, sequence: Sequence, event: TokenEvent) -> None:
        self._events.setdefault(sequence.request.reply_ring, []).append(event)

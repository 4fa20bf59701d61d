"""What became of each request: the ring of finished ones, the log line at the end, and those who listen.

Owns: Journal, RequestListener. Runs in: gateway, on the event loop. Must not know: HTTP, rings, what listeners do.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from headrace.telemetry.containment import Faults, contained
from headrace.telemetry.logs import get_logger
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot
from headrace.telemetry.timeline import RequestTimeline

DEFAULT_CAPACITY = 256
_NS_PER_MS = 1e6

log = get_logger("request")


class RequestListener(Protocol):
    """Is told of every request: once on_accepted and later once on_finished, or once on_refused.

    Called on the event loop, so it returns at once. What it raises is counted and fails no request. `prompt_token_ids` is
    not to be kept or changed.
    """

    def on_accepted(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        deadline_ns: int,
        cache_salt: str,
    ) -> None:
        """A request was accepted. `deadline_ns`: 0 for none. `cache_salt`: "" where the prefix cache is shared by all."""
        ...

    def on_refused(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        error_code: str,
        cache_salt: str,
    ) -> None:
        """A request was turned away at the door. `error_code`: the wire code. Its `request_id` is 0: it got none."""
        ...

    def on_finished(self, snapshot: TimelineSnapshot) -> None:
        """An accepted request ended; the snapshot is complete."""
        ...


class Journal:
    """Told of each request's begin and end, exactly once each. No method raises: a fault is counted, requests go on.

    The ring keeps the last `capacity` finished requests; a wait of a client that reads slowly is still added there.
    """

    def __init__(self, faults: Faults, *, capacity: int = DEFAULT_CAPACITY, listeners: Iterable[RequestListener] = ()) -> None:
        self.faults = faults
        self._finished: deque[RequestTimeline] = deque(maxlen=capacity)
        self._listeners = tuple(listeners)

    def accepted(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        deadline_ns: int,
        cache_salt: str,
    ) -> None:
        """A request is on its way to the worker."""
        for listener in self._listeners:
            try:
                listener.on_accepted(identity, arrival_ns, prompt_token_ids, deadline_ns, cache_salt)
            except Exception as error:  # noqa: BLE001 - no listener may fail a request
                self._note_fault(listener, error)

    def refused(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        error_code: str,
        cache_salt: str,
    ) -> None:
        """A request was turned away at the door. Logged at level debug: under overload there are many."""
        self._log_refused(identity, error_code)
        for listener in self._listeners:
            try:
                listener.on_refused(identity, arrival_ns, prompt_token_ids, error_code, cache_salt)
            except Exception as error:  # noqa: BLE001 - as above
                self._note_fault(listener, error)

    def finished(self, timeline: RequestTimeline, prompt_text: str = "") -> None:
        """An accepted request has ended. `prompt_text`: for the log, where the operator wants prompts in it."""
        self._finished.append(timeline)
        snapshot = timeline.snapshot()
        self._log_finished(snapshot, prompt_text)
        for listener in self._listeners:
            try:
                listener.on_finished(snapshot)
            except Exception as error:  # noqa: BLE001 - as above
                self._note_fault(listener, error)

    def recent(self, limit: int) -> list[TimelineSnapshot]:
        """What ended lately, the newest first."""
        return [timeline.snapshot() for timeline in islice(reversed(self._finished), limit)]

    @contained
    def _log_refused(self, identity: RequestIdentity, error_code: str) -> None:
        log.debug("request refused", **_who(identity), error_code=error_code)

    @contained
    def _log_finished(self, snapshot: TimelineSnapshot, prompt_text: str) -> None:
        stamps = snapshot.stamps
        longest = max(snapshot.stalls, key=lambda stall: stall.duration_ns, default=None)
        fields: dict[str, object] = {
            **_who(snapshot.identity),
            "cached_tokens": snapshot.num_cached_tokens,
            "output_tokens": snapshot.num_output_tokens,
            "queue_ms": _since(stamps.received_ns, stamps.first_scheduled_ns),
            "ttft_ms": _since(stamps.received_ns, stamps.first_token_ns),
            "total_ms": _since(stamps.received_ns, stamps.end_ns),
            "finish_reason": snapshot.finished_reason,
            "error_code": snapshot.error_code or None,
            "num_preemptions": snapshot.num_preemptions,
            "num_stalls": snapshot.num_stalls,
            "longest_stall": None if longest is None else longest.cause.value,
            "longest_stall_ms": None if longest is None else _ms(longest.duration_ns),
        }
        if prompt_text:
            fields["prompt_text"] = prompt_text
        log.info("request finished", **fields)

    def _note_fault(self, listener: RequestListener, error: Exception) -> None:
        self.faults.note(type(listener).__name__, error)


def _who(identity: RequestIdentity) -> dict[str, object]:
    return {
        "request_id": identity.client_request_id,
        "number": identity.request_id,
        "choice": identity.choice_index,
        "api": identity.api,
        "service_class": identity.service_class,
        "tenant": identity.tenant,
        "prompt_tokens": identity.num_prompt_tokens,
    }


def _since(began_ns: int, at_ns: int) -> float | None:
    return _ms(at_ns - began_ns) if at_ns else None


def _ms(duration_ns: int) -> float:
    return round(duration_ns / _NS_PER_MS, 3)

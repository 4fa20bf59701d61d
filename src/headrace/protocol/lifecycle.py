"""States of a request in the scheduler, and how it may end.

Owns: the transition table (a document page is drawn from it). Runs in: worker. Must not know: why a transition happens.
"""

import enum


class RequestState(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """How a request ended. The value travels on the wire."""

    STOP = "stop"  # end-of-sequence or a stop token; the gateway also uses it for stop strings
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # the client went, or the gateway had seen enough (stop string)
    DEADLINE = "deadline"
    ERROR = "error"


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


def check_transition(old: RequestState, new: RequestState) -> None:
    """Raise RuntimeError when the table has no such step: a defect of the scheduler, never of a request."""
    if new not in TRANSITIONS[old]:
        raise RuntimeError(f"no transition from {old.value} to {new.value}")

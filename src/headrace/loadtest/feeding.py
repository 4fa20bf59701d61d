"""From a plan to the client processes: which conversation goes to which process, and when the plan ends.

Owns: encoding, limits of the settings, the share of each process. Runs in: load tool (coordinating process); pure.
Must not know: pipes, processes, HTTP.
"""

from collections.abc import Iterator

import msgspec

from headrace.loadtest.client_messages import WireRequest
from headrace.loadtest.plan import LoadPlan, PlannedRequest

MAX_AHEAD_CONVERSATIONS = 256  # open loop: fed to a process ahead of their time
MAX_AHEAD_BYTES = 16 * 1024 * 1024  # of bodies, for each process; one conversation may be larger


class PlanReader:
    """The plan's conversations, encoded, in order, until one of its limits is reached."""

    def __init__(self, plan: LoadPlan) -> None:
        self.num_read = 0  # requests, turns counted
        self._requests: Iterator[PlannedRequest] = iter(plan.requests)
        self._settings = plan.settings
        self._is_open = plan.settings.arrival != "closed"
        self._last_due = 0.0
        self._encode = msgspec.json.Encoder().encode

    def next(self) -> WireRequest | None:
        """The next conversation; None at the end. ValueError for a request that the engine cannot send."""
        settings = self._settings
        num_left = None if settings.num_requests is None else settings.num_requests - self.num_read
        if num_left is not None and num_left <= 0:
            return None
        request = next(self._requests, None)
        if request is None:
            return None
        due = self._checked_due(request)
        if due is not None and settings.duration_seconds is not None and due >= settings.duration_seconds:
            return None
        turns = request.then if num_left is None else request.then[: num_left - 1]
        self.num_read += 1 + len(turns)
        wire = self._wire(request, due)
        wire.then = [self._wire(turn, None) for turn in turns]
        return wire

    def _checked_due(self, request: PlannedRequest) -> float | None:
        if not self._is_open:
            return None
        if request.due is None:
            raise ValueError(f"request {request.index} has no due time, which arrival {self._settings.arrival!r} needs")
        if not self._last_due <= request.due < float("inf"):
            raise ValueError(f"request {request.index} is due at {request.due}, before the one that precedes it")
        self._last_due = request.due
        return request.due

    def _wire(self, request: PlannedRequest, due: float | None) -> WireRequest:
        if not request.body or not request.body.keys().isdisjoint(("stream", "stream_options")):
            raise ValueError(f"the body of request {request.index} must not be empty, nor hold stream or stream_options")
        return WireRequest(
            index=request.index,
            due=due,
            group=request.group,
            body=self._encode(request.body),
            target_prompt_tokens=request.target_prompt_tokens,
            target_output_tokens=request.target_output_tokens,
            think_seconds=request.think_seconds,
            headers=request.headers,
        )


class Share:
    """What one process has in hand of the plan, and may still get."""

    def __init__(self, max_conversations: int) -> None:
        self.max_conversations = max_conversations
        self.num_waiting = 0
        self.num_waiting_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether another conversation may be fed to it."""
        if self.num_waiting == 0:
            return True
        return self.num_waiting < self.max_conversations and self.num_waiting_bytes < MAX_AHEAD_BYTES

    def give(self, request: WireRequest) -> None:
        """Note a conversation fed to it."""
        self.num_waiting += 1
        self.num_waiting_bytes += request.num_bytes

    def take(self, num_conversations: int, num_bytes: int) -> None:
        """Note conversations that it began."""
        self.num_waiting -= num_conversations
        self.num_waiting_bytes -= num_bytes


def split_clients(num_clients: int, num_processes: int) -> list[int]:
    """Clients of a closed loop for each process, as even as can be."""
    return [num_clients // num_processes + (place < num_clients % num_processes) for place in range(num_processes)]


def max_ahead(num_clients: int | None) -> int:
    """Conversations fed to a process ahead of need.

    In closed loop one for each client, so that all can go on at once when the server ends a batch, and no more, so that at the
    run's end no process sits on much work that another's idle clients could do.
    """
    return MAX_AHEAD_CONVERSATIONS if num_clients is None else num_clients


def neediest(shares: list[Share]) -> int | None:
    """The process to feed next: the one with the fewest conversations waiting, the first of equals; None when all are full."""
    places = [place for place, share in enumerate(shares) if share.has_room]
    return min(places, key=lambda place: shares[place].num_waiting, default=None)

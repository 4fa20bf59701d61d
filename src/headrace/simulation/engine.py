"""The simulated server: requests come, the real scheduler plans, and the clock moves on by what each step would take.

Owns: Simulation, its clock, the order of events. Runs in: simulator. Must not know: where traffic comes from, figures.

Requests that come during a step are seen at its end, as in the worker; the door decides at the moment they come. Time passes in
steps, and in nothing else but waiting for the next request.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import TokenEvent
from headrace.protocol.step import StepPlan, StepResult
from headrace.scheduling import SchedulerStatistics
from headrace.simulation.limits import MAX_END_NS
from headrace.simulation.policies import Machine, Policy
from headrace.simulation.requests import REFUSED, FinishedRequest, SimulatedRequest

START_NS = 1_000_000_000  # the scheduler's clock at the simulation's 0: 0 means "not yet" in some of its accounts
STEPS_PER_REPORT = 500
_COMPLETED = (FinishReason.LENGTH.value, FinishReason.STOP.value)


@dataclass(frozen=True, slots=True)
class Clients:
    """What refused callers do: come again after Retry-After, up to so many tries in all, or (1) never."""

    max_tries: int = 1


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens that were computed for the first time."""

    index: int  # the request's
    end_ns: int  # of the step
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that happened. end_ns = busy_ns + idle_ns."""

    finished: list[FinishedRequest]  # in the order of the requests' index
    chunks: list[PrefillChunk]
    num_refusals: int  # tries that were refused, repeated ones included
    num_steps: int
    busy_ns: int  # sum of all steps' durations
    idle_ns: int  # waiting for the next request
    end_ns: int
    statistics: SchedulerStatistics


Progress = Callable[[int, int], None]  # (requests ended, simulated nanoseconds)


class Simulation:
    """One policy on one traffic. `run` may be called once."""

    def __init__(
        self, requests: Iterable[SimulatedRequest], policy: Policy, machine: Machine, clients: Clients | None = None
    ) -> None:
        self._policy = policy
        self._machine = machine
        self._max_tries = (clients or Clients()).max_tries
        self._scheduler = policy.scheduler(policy.config(machine), machine.spec)
        self._admission = policy.admission(machine)
        self._gate = policy.gate(machine)
        self._step_model = machine.step_model
        self._now_ns = self._idle_ns = self._busy_ns = 0
        self._num_steps = self._num_refusals = 0
        self._numbers = itertools.count()
        self._arrivals = [(request.due_ns, next(self._numbers), request, 1) for request in requests]
        heapq.heapify(self._arrivals)
        self._at_gate: deque[FinishedRequest] = deque()
        self._inside: dict[int, FinishedRequest] = {}  # by request id
        self._served_until: dict[int, int] = {}  # request id -> prompt tokens computed
        self._finished: list[FinishedRequest] = []
        self._chunks: list[PrefillChunk] = []

    def run(self, on_progress: Progress | None = None) -> Outcome:
        """Until every request has ended. Raises ConfigurationError when that takes longer than can be counted."""
        while True:
            self._take_arrivals()
            self._pass_gate()
            if self._scheduler.has_work:
                self._step()
                if on_progress is not None and self._num_steps % STEPS_PER_REPORT == 0:
                    on_progress(len(self._finished), self._now_ns)
            elif self._at_gate:
                raise RuntimeError(f"policy {self._policy.name}: nobody is inside, and the gate lets nobody in")
            elif self._arrivals:
                due_ns = self._arrivals[0][0]
                self._idle_ns += due_ns - self._now_ns
                self._now_ns = due_ns
            else:
                break
        self._finished.sort(key=lambda item: item.request.index)
        return Outcome(
            finished=self._finished,
            chunks=self._chunks,
            num_refusals=self._num_refusals,
            num_steps=self._num_steps,
            busy_ns=self._busy_ns,
            idle_ns=self._idle_ns,
            end_ns=self._now_ns,
            statistics=self._scheduler.statistics(),
        )

    def _take_arrivals(self) -> None:
        arrivals, now_ns = self._arrivals, self._now_ns
        while arrivals and arrivals[0][0] <= now_ns:
            due_ns, _, request, num_tries = heapq.heappop(arrivals)
            refusal = self._admission.decide(request, due_ns + START_NS)
            if refusal is None:
                self._at_gate.append(
                    FinishedRequest(request=request, reason="", arrival_ns=due_ns, end_ns=-1, num_tries=num_tries)
                )
                continue
            self._num_refusals += 1
            if num_tries < self._max_tries:
                again_ns = due_ns + max(1, refusal.retry_after_ns)
                heapq.heappush(arrivals, (again_ns, next(self._numbers), request, num_tries + 1))
            else:
                self._finished.append(
                    FinishedRequest(request=request, reason=REFUSED, arrival_ns=due_ns, end_ns=due_ns, num_tries=num_tries)
                )

    def _pass_gate(self) -> None:
        """In order of arrival, none past another. Whoever waited too long leaves when its turn comes, as of its deadline."""
        at_gate, gate = self._at_gate, self._gate
        while at_gate:
            item = at_gate[0]
            request = item.request
            deadline_ns = item.arrival_ns + request.timeout_ns if request.timeout_ns else self._now_ns + 1
            if deadline_ns <= self._now_ns:
                at_gate.popleft()
                self._close(item, FinishReason.DEADLINE.value, deadline_ns)
            elif gate.has_room(request):
                at_gate.popleft()
                gate.enter(request)
                self._inside[request.request_id] = item
                generation = self._policy.rewrite(request.generation(item.arrival_ns + START_NS), self._machine)
                self._scheduler.add(generation, self._now_ns + START_NS)
            else:
                return

    def _step(self) -> None:
        scheduler = self._scheduler
        plan = scheduler.schedule(self._now_ns + START_NS)
        if plan.rows:
            decode_rows, prefill_tokens, context_tokens, tokens = self._measure(plan)
            duration_ns = self._step_model.duration_ns(decode_rows, prefill_tokens, context_tokens)
            self._now_ns += duration_ns
            if self._now_ns > MAX_END_NS:
                raise ConfigurationError(
                    f"policy {self._policy.name}: the simulation ran past {MAX_END_NS // 10**9} s of its own time: make steps "
                    "shorter (step model) or requests fewer."
                )
            self._busy_ns += duration_ns
            self._num_steps += 1
            scheduler.apply(plan, StepResult(plan.step_id, tokens), self._now_ns + START_NS)
            self._admission.note_step(decode_rows, prefill_tokens, context_tokens, duration_ns, self._now_ns + START_NS)
            if prefill_tokens:
                self._note_chunks(plan)
        for events in scheduler.take_events().values():
            self._take_events(events)

    def _measure(self, plan: StepPlan) -> tuple[int, int, int, dict[int, int]]:
        """(decode rows, prefill tokens, context tokens, a token for each row that samples).

        Tokens are the request's own number: answers to equal prompts differ, as sampled ones do.
        """
        decode_rows = context_tokens = 0
        tokens: dict[int, int] = {}
        for row in plan.rows:
            num_tokens = len(row.token_ids)
            context_tokens += row.start_position + num_tokens
            if num_tokens == 1:
                decode_rows += 1
            if row.samples:
                tokens[row.request_id] = row.request_id
        return decode_rows, plan.num_tokens - decode_rows, context_tokens, tokens

    def _note_chunks(self, plan: StepPlan) -> None:
        for row in plan.rows:
            num_tokens = len(row.token_ids)
            if num_tokens > 1:
                known = self._served_until.get(row.request_id, row.start_position)
                end = min(row.start_position + num_tokens, row.num_prompt_tokens)
                if end > known:
                    self._chunks.append(PrefillChunk(row.request_id - 1, self._now_ns, end - known))
                self._served_until[row.request_id] = max(known, end)

    def _take_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            item = self._inside[event.request_id]
            if event.token_ids:
                if not item.token_ns:
                    item.first_scheduled_ns = event.first_scheduled_ns - START_NS
                    self._admission.note_first_token(item.request, self._now_ns + START_NS)
                item.token_ns.append(self._now_ns)
            if event.finish_reason is not None:
                if event.usage is not None:
                    item.num_cached_tokens = event.usage.num_cached_tokens
                    item.num_preemptions = event.usage.num_preemptions
                del self._inside[event.request_id]
                self._served_until.pop(event.request_id, None)
                self._gate.leave(item.request)
                self._close(item, event.finish_reason.value, self._now_ns)

    def _close(self, item: FinishedRequest, reason: str, end_ns: int) -> None:
        """The one end of an accepted request."""
        item.reason, item.end_ns = reason, end_ns
        self._finished.append(item)
        self._admission.note_end(item.request, end_ns + START_NS, completed=reason in _COMPLETED)

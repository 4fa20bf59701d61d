"""Drives scheduler and FakeExecutor as the worker's loop does, and checks every step from the outside.

Owns: Driver, Outcome, make_request, make_spec. Runs in: tests.
Must not know: the scheduler's insides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import GenerationRequest, TokenEvent, Usage
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.stalls import Stall
from headrace.protocol.step import StepPlan, StepResult
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.testing import FakeExecutor, ManualClock
from tests.core.stall_oracle import StallOracle

EOS = 1
VOCAB_SIZE = 61


def make_spec(
    *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 256, vocab_size: int = VOCAB_SIZE
) -> ExecutorSpec:
    return ExecutorSpec("model", "fake", vocab_size, frozenset({EOS}), max_model_len, block_size, num_blocks)


def make_request(
    request_id: int,
    prompt: Sequence[int] = (5, 6, 7),
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    priority: int = 0,
    arrival_ns: int | None = None,
    deadline_ns: int = 0,
    cache_salt: str = "",
    reply_ring: int = 0,
    service_class: str = "standard",
    tenant_id: str = "default",
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        tenant_id=tenant_id,
        priority=priority,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(temperature=temperature, seed=seed),
        stopping=StopConditions(max_tokens, min_tokens, stop_token_ids, ignore_eos),
        arrival_ns=request_id if arrival_ns is None else arrival_ns,
        deadline_ns=deadline_ns,
        cache_salt=cache_salt,
        reply_ring=reply_ring,
        model_id="model",
        service_class=service_class,
    )


@dataclass
class Outcome:
    """What came out of one request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error_code: str = ""
    error_message: str = ""
    usage: Usage | None = None
    first_scheduled_ns: int = 0
    event_steps: list[int] = field(default_factory=list)  # driver steps in which an event came

    def take(self, event: TokenEvent, step: int) -> None:
        """INV-2, INV-3, INV-4: contiguous indices, one terminal event, usage with it and with the first token."""
        assert self.finish_reason is None, "an event after the terminal one"
        assert event.first_index == len(self.token_ids), "indices are not contiguous"
        says_more = bool(event.token_ids) or event.finish_reason is not None
        assert says_more != event.is_preempted, "an event that says nothing, or a preemption with more"
        is_first = event.first_index == 0 and bool(event.token_ids)
        assert (event.usage is not None) == (is_first or event.finish_reason is not None)
        assert (event.first_scheduled_ns != 0) == (event.first_index == 0 and bool(event.token_ids))
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.error_code, self.error_message = event.error_code, event.error_message
        self.usage = event.usage
        self.first_scheduled_ns = event.first_scheduled_ns or self.first_scheduled_ns
        self.event_steps.append(step)
        if event.usage is not None:
            assert event.usage.num_output_tokens == len(self.token_ids)


class Driver:
    """One scheduler over one FakeExecutor, with a clock that moves a millisecond in each step."""

    def __init__(
        self,
        spec: ExecutorSpec | None = None,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 256,
        enable_prefix_caching: bool = True,
        priority_aging_ns: int = 60_000_000_000,
        stall_threshold_ns: int = 250_000_000,
        min_chunk_tokens: int = 1,
        **config: Any,
    ) -> None:
        self.spec = spec or make_spec()
        self.config = SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            enable_prefix_caching,
            priority_aging_ns,
            stall_threshold_ns=stall_threshold_ns,
            min_chunk_tokens=min_chunk_tokens,
            **config,
        )
        self.scheduler = Scheduler(self.config, self.spec)
        self.executor = FakeExecutor(self.spec)
        self.clock = ManualClock()
        self.outcomes: dict[int, Outcome] = {}
        self.requests: dict[int, GenerationRequest] = {}
        self.plans: list[StepPlan] = []
        self.oracles: dict[int, StallOracle] = {}
        self.step_ns = 0  # how long a step takes, beside the millisecond before it

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.outcomes[request.request_id] = Outcome()
            self.oracles[request.request_id] = StallOracle(request, self.clock.now_ns(), self.config.stall_threshold_ns)
            self.scheduler.add(request, self.clock.now_ns())
        self._collect()

    def stalls(self, request_id: int) -> list[Stall]:
        """That its events told so far."""
        return self.oracles[request_id].stalls

    def cancel(self, request_id: int) -> None:
        self.scheduler.cancel(request_id, self.clock.now_ns())
        self._collect()

    def step(self) -> StepPlan:
        """schedule, execute, apply."""
        plan = self.schedule()
        if plan.rows:
            self.apply(plan, self.executor.execute(plan))
        return plan

    def schedule(self) -> StepPlan:
        self.clock.advance_ns(1_000_000)
        plan = self.scheduler.schedule(self.clock.now_ns())
        self._collect()
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        assert plan.rows or not self.scheduler.has_work
        expiry_ns = self.scheduler.next_expiry_ns
        assert expiry_ns is None or expiry_ns > self.clock.now_ns(), "somebody's time is over and it is still live"
        self.scheduler.check_integrity()
        self.plans.append(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> None:
        self.clock.advance_ns(self.step_ns)
        self.scheduler.apply(plan, result, self.clock.now_ns())
        self._collect()
        self.scheduler.check_integrity()

    def run(self, max_steps: int = 10_000) -> dict[int, Outcome]:
        """Step until nothing is live; then every block is free or cached, and every request has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {max_steps} steps: {self.scheduler.statistics()}"
        self.check_idle()
        return self.outcomes

    def check_idle(self) -> None:
        """INV-6 and the sums that must hold when nothing is live."""
        statistics = self.scheduler.statistics()
        assert statistics.num_used_blocks == 0
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.num_free_blocks + statistics.num_cached_blocks == statistics.num_blocks
        assert all(outcome.finish_reason is not None for outcome in self.outcomes.values())
        assert sum(statistics.num_finished.values()) == statistics.num_started == len(self.outcomes)
        assert statistics.num_generated_tokens == sum(len(outcome.token_ids) for outcome in self.outcomes.values())

    def _collect(self) -> None:
        for reply_ring, events in self.scheduler.take_events().items():
            for event in events:
                assert self.requests[event.request_id].reply_ring == reply_ring
                self.outcomes[event.request_id].take(event, len(self.plans))
                self.oracles[event.request_id].take(event, self.clock.now_ns())


def rows_of(plan: StepPlan) -> list[tuple[int, int]]:
    """(request id, tokens) of each row."""
    return [(row.request_id, len(row.token_ids)) for row in plan.rows]


def alone(request: GenerationRequest) -> Outcome:
    """The reference: the request by itself, computed whole, in ample memory, without a prefix cache."""
    spec = make_spec(num_blocks=64, block_size=8)
    driver = Driver(spec, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
    driver.add(request)
    return driver.run()[request.request_id]

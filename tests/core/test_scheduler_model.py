"""The scheduler under any sequence of calls: INV-1 to INV-4, INV-6 and INV-9, with cancellation and failures at any point."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.step import StepFailure, StepPlan
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy
from headrace.scheduling.prefill_budget import Lineup
from headrace.scheduling.sequence import Sequence
from tests.core.driver import Driver, alone, make_request, make_spec

PROMPTS = st.lists(st.integers(2, 4), min_size=1, max_size=20)

MS = 1_000_000


def traffic(queue_timeout_ms: int, tbt_target_ms: int) -> TrafficPolicy:
    """Three levels; the middle class has a limit of its time in the queue, the highest a target between tokens."""
    classes = (
        ServiceClass(name="interactive", level=0, weight=4.0, ttft_target_ms=5, tbt_target_ms=tbt_target_ms),
        ServiceClass(name="standard", level=1, ttft_target_ms=20, tbt_target_ms=0, queue_timeout_ms=queue_timeout_ms),
        ServiceClass(name="batch", level=2, ttft_target_ms=100, tbt_target_ms=0),
    )
    tenants = (Tenant(name=DEFAULT_TENANT), Tenant(name=OTHER_TENANT), Tenant(name="heavy", weight=3.0))
    return TrafficPolicy(classes=classes, tenants=tenants)


class PlacementWatch:
    """Sees who joins and who gives way in each step of a scheduler, and checks that it was right."""

    def __init__(self, driver: Driver) -> None:
        self._placement = driver.scheduler._planner._placement
        self._rules = driver.scheduler._rules
        self._step_ns = 0
        self._joined: set[int] = set()
        self._victim_levels: list[int] = []  # of those who gave way, and for whom nobody has joined yet
        self._inner_join, self._inner_preempt = self._placement.join, self._placement.preempt
        self._placement.join = self._join  # type: ignore[method-assign]
        self._placement.preempt = self._preempt  # type: ignore[method-assign]
        self.num_claim_preemptions = 0

    def end_step(self, now_ns: int) -> None:
        """Called at the latest by the first move of the next step."""
        if now_ns == self._step_ns:
            return
        self._step_ns = now_ns
        assert not self._victim_levels, "somebody was thrown out in vain"
        self._joined.clear()

    def _join(self, sequence: Sequence, num_spare_blocks: int, now_ns: int) -> bool:
        self.end_step(now_ns)
        has_joined = self._inner_join(sequence, num_spare_blocks, now_ns)
        if has_joined:
            assert all(level > sequence.claim.level for level in self._victim_levels), "an equal or higher claim gave way"
            self._victim_levels.clear()
            self._joined.add(sequence.request_id)
        return has_joined

    def _preempt(self, sequence: Sequence, now_ns: int, *, by_claim: bool) -> None:
        self.end_step(now_ns)
        assert sequence.request_id not in self._joined, "joined and thrown out in one step"
        if by_claim:
            self._victim_levels.append(sequence.claim.level)
            self.num_claim_preemptions += 1
        self._inner_preempt(sequence, now_ns, by_claim=by_claim)
        assert sequence.claim.num_claim_preemptions <= self._rules.max_num_claim_preemptions


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go; the driver checks each step, the end checks each request against itself alone."""

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(2, 14),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(0, 12),
        caching=st.booleans(),
        stall_threshold_ms=st.integers(1, 12),
        min_chunk_tokens=st.integers(1, 6),
        policy=st.sampled_from(["headrace", "headrace", "fcfs"]),
        class_aging_ms=st.sampled_from([4, 15, 1000]),
        queue_timeout_ms=st.sampled_from([0, 10, 40]),
        tbt_target_ms=st.sampled_from([0, 4, 30]),
        step_time_budget=st.booleans(),
    )
    def start(  # type: ignore[no-untyped-def]
        self,
        block_size,
        num_blocks,
        max_num_seqs,
        budget,
        caching,
        stall_threshold_ms,
        min_chunk_tokens,
        policy,
        class_aging_ms,
        queue_timeout_ms,
        tbt_target_ms,
        step_time_budget,
    ) -> None:
        self.driver = Driver(
            make_spec(num_blocks=num_blocks, block_size=block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_model_len=40,
            enable_prefix_caching=caching,
            priority_aging_ns=3_000_000,
            stall_threshold_ns=stall_threshold_ms * MS,
            min_chunk_tokens=min_chunk_tokens,
            policy=policy,
            class_aging_ns=class_aging_ms * MS,
            traffic=traffic(queue_timeout_ms, tbt_target_ms),
            step_time_budget=step_time_budget,
        )
        self.watch = PlacementWatch(self.driver)
        self.is_fcfs = policy == "fcfs"
        self.next_id = 0
        self.num_duplicates = 0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 12),
        ignore_eos=st.booleans(),
        priority=st.integers(-2, 2),
        lives_ms=st.sampled_from([0, 0, 0, 0, 4, 12]),
        reply_ring=st.integers(0, 1),
        arrival_offset_ns=st.integers(-5_000_000, 0),
        service_class=st.sampled_from(["interactive", "standard", "batch", "batch", "unheard of"]),
        tenant_id=st.sampled_from(["default", "heavy", "heavy", "nobody we know"]),
    )
    def add(  # type: ignore[no-untyped-def]
        self,
        prompt,
        max_tokens,
        min_tokens,
        ignore_eos,
        priority,
        lives_ms,
        reply_ring,
        arrival_offset_ns,
        service_class,
        tenant_id,
    ) -> None:
        now_ns = self.driver.clock.now_ns()
        self.driver.add(
            make_request(
                self.next_id,
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                priority=priority,
                arrival_ns=now_ns + arrival_offset_ns,
                deadline_ns=now_ns + lives_ms * 1_000_000 if lives_ms else 0,
                reply_ring=reply_ring,
                service_class=service_class,
                tenant_id=tenant_id,
            )
        )
        self.next_id += 1

    @rule(num_low=st.integers(1, 4), num_tokens=st.integers(1, 12), num_high=st.integers(1, 2), num_steps=st.integers(1, 3))
    def higher_claims_come(self, num_low: int, num_tokens: int, num_high: int, num_steps: int) -> None:
        """Low ones have begun, then higher ones want their places and their memory."""
        for service_class, number, steps in (("batch", num_low, num_steps), ("interactive", num_high, 1)):
            for _ in range(number):
                now_ns = self.driver.clock.now_ns()
                prompt = [2 + (self.next_id + index) % 3 for index in range(num_tokens)]
                asked = make_request(self.next_id, prompt, max_tokens=12, arrival_ns=now_ns, service_class=service_class)
                self.driver.add(asked)
                self.next_id += 1
            for _ in range(steps):
                self._step_with_progress()

    @precondition(lambda self: self.next_id > 0)
    @rule(data=st.data())
    def add_duplicate(self, data: st.DataObject) -> None:
        """A live id again: dropped; the live one is not disturbed."""
        live = [i for i, outcome in self.driver.outcomes.items() if outcome.finish_reason is None]
        if live:
            request_id = data.draw(st.sampled_from(live))
            self.driver.scheduler.add(make_request(request_id, [9], reply_ring=7), self.driver.clock.now_ns())
            assert self.driver.scheduler.take_events() == {}
            self.num_duplicates += 1

    @rule(request_id=st.integers(0, 30))
    def cancel(self, request_id: int) -> None:
        """Unknown and finished ids are fine."""
        self.driver.cancel(request_id)
        if request_id in self.driver.outcomes:
            assert self.driver.outcomes[request_id].finish_reason is not None

    @rule(reply_ring=st.integers(0, 2), below=st.integers(0, 30))
    def cancel_ring(self, reply_ring: int, below: int) -> None:
        self.driver.scheduler.cancel_ring(reply_ring, below, self.driver.clock.now_ns())
        self.driver._collect()
        for request_id, request in self.driver.requests.items():
            if request.reply_ring == reply_ring and request_id < below:
                assert self.driver.outcomes[request_id].finish_reason is not None

    @rule(step_ms=st.integers(0, 9))
    def steps_take(self, step_ms: int) -> None:
        """From now on; the driver's oracle judges by the clock which waits were long."""
        self.driver.step_ns = step_ms * 1_000_000

    @rule(idle_ms=st.integers(1, 20))
    def idle(self, idle_ms: int) -> None:
        """Nothing happens between two steps."""
        self.driver.clock.advance_ns(idle_ms * 1_000_000)

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step_with_progress()

    def _schedule(self) -> StepPlan:
        """INV-9: of the sequences that run, the first in claim has a row in every step, unless a light one's prompt passes it.

        The first prompt in turn always has one: by level, then a light account's before others'. What prompts get together is
        within the step's budget for them.
        """
        scheduler = self.driver.scheduler
        plan = self.driver.schedule()
        if plan.rows:
            lineup = Lineup(scheduler._live.running)
            planned = {row.request_id for row in plan.rows}
            first, (first_prompt, *_) = scheduler._live.running[0], [*scheduler._planner._in_turn(lineup.prompts)[0], None]
            assert {sequence.request_id for sequence in lineup.streams} <= planned
            if first_prompt is not None:
                assert first_prompt.request_id in planned
                assert first_prompt.claim.level == lineup.prompts[0].claim.level
            if first.request_id not in planned:
                assert first_prompt is not None
                assert scheduler._live.is_light(first_prompt)
                assert not scheduler._live.is_light(first)
            num_prefill_tokens = plan.num_tokens - len(lineup.streams)
            assert num_prefill_tokens <= scheduler._planner.prefill.num_tokens(lineup)
        return plan

    def _step_with_progress(self) -> None:
        plan = self._schedule()
        if plan.rows:
            self.driver.apply(plan, self.driver.executor.execute(plan))

    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        """INV-13, between schedule and execute: the row is computed, in memory nobody else gets; its token is dropped."""
        plan = self._schedule()
        if not plan.rows:
            return
        victims = data.draw(st.sets(st.sampled_from([row.request_id for row in plan.rows])))
        for request_id in victims:
            self.driver.cancel(request_id)
        self.driver.scheduler.check_integrity()
        num_tokens = {request_id: len(self.driver.outcomes[request_id].token_ids) for request_id in victims}
        self.driver.apply(plan, self.driver.executor.execute(plan))
        assert num_tokens == {request_id: len(self.driver.outcomes[request_id].token_ids) for request_id in victims}

    @rule(data=st.data())
    def fail_row(self, data: st.DataObject) -> None:
        """A row that fails ends its request alone."""
        plan = self._schedule()
        if not plan.rows:
            return
        request_id = data.draw(st.sampled_from([row.request_id for row in plan.rows]))
        self.driver.executor.failing[request_id] = StepFailure("execution_failed", "bad row")
        self.driver.apply(plan, self.driver.executor.execute(plan))
        outcome = self.driver.outcomes[request_id]
        assert (outcome.finish_reason, outcome.error_code) == (FinishReason.ERROR, "execution_failed")

    @rule()
    def fail_step(self) -> None:
        """INV-17: a step that fails ends its rows' requests; the others live on."""
        plan = self._schedule()
        if not plan.rows:
            return
        live_before = {i for i, outcome in self.driver.outcomes.items() if outcome.finish_reason is None}
        self.driver.executor.fail_next_step = RuntimeError("device lost")
        try:
            self.driver.executor.execute(plan)
        except RuntimeError as error:
            self.driver.scheduler.fail_step(plan, "execution_failed", str(error), self.driver.clock.now_ns())
        self.driver._collect()
        self.driver.scheduler.check_integrity()
        live_after = {i for i, outcome in self.driver.outcomes.items() if outcome.finish_reason is None}
        assert live_before - live_after == {row.request_id for row in plan.rows}

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        bound = sum(len(r.prompt_token_ids) + r.stopping.max_tokens for r in driver.requests.values())
        driver.run(max_steps=2 * bound)
        self.watch.end_step(driver.clock.now_ns() + 1)
        statistics = driver.scheduler.statistics()
        assert statistics.num_duplicates == self.num_duplicates
        assert statistics.num_claim_preemptions == self.watch.num_claim_preemptions
        assert not (self.is_fcfs and statistics.num_claim_preemptions)
        num_for_memory = statistics.num_preemptions - statistics.num_claim_preemptions
        assert num_for_memory <= statistics.num_generated_tokens  # one needs a block for a token drawn before
        max_model_len = driver.scheduler.limits.max_model_len
        for request_id, outcome in driver.outcomes.items():
            request = driver.requests[request_id]
            num_tokens = len(request.prompt_token_ids) + len(outcome.token_ids)
            if len(request.prompt_token_ids) >= max_model_len:
                assert not outcome.token_ids
                continue
            expected = alone(request)
            assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
            if outcome.finish_reason is FinishReason.STOP:
                assert outcome.token_ids == expected.token_ids
            elif outcome.finish_reason is FinishReason.LENGTH:
                assert len(outcome.token_ids) == request.stopping.max_tokens or num_tokens == max_model_len


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase

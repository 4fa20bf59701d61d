"""The scheduler: which tokens the next step computes, and what becomes of the step's result.

Owns: every live sequence and the order in which they get budget and memory. Runs in: worker, tests, simulation.
Must not know: devices, processes, clocks (time is an argument).
"""

from headrace.kvcache import KVCacheManager
from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason, RequestState
from headrace.protocol.messages import GenerationRequest, TokenEvent, WorkerLimits
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.stalls import StallCause
from headrace.protocol.step import StepFailure, StepPlan, StepResult
from headrace.scheduling.budget import StepDraft
from headrace.scheduling.config import SchedulerConfig, limits_of
from headrace.scheduling.in_flight import InFlight
from headrace.scheduling.integrity import check_classes, check_sequences
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.outbox import EventOutbox
from headrace.scheduling.policy import JoinPolicy, OpenBatch
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.stalls import StallWatch
from headrace.scheduling.statistics import Counters, SchedulerStatistics


class Scheduler:
    """Turns requests into step plans and step results into token events.

    Call schedule, execute the plan, then apply (or fail_step), in turn; add and cancel at any time. Every request taken by add
    ends with exactly one terminal event, made by one function (`_finish`). Nothing in a request makes these methods raise; a
    RuntimeError is a defect of the scheduler or of its caller.
    """

    def __init__(self, config: SchedulerConfig, spec: ExecutorSpec, policy: JoinPolicy | None = None) -> None:
        self._config = config
        self._spec = spec
        self._policy: JoinPolicy = policy or OpenBatch(config.max_num_seqs)
        self._limits = limits_of(config, spec)
        self._blocks = KVCacheManager(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            model_id=spec.model_id,
            kv_format=spec.kv_format,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._live = LiveSequences(len(config.traffic.classes))
        self._outbox = EventOutbox()
        self._counters = Counters()
        self._stalls = StallWatch(config.stall_threshold_ns)
        self._class_indices = {name: index for index, name in enumerate(config.traffic.class_names)}
        self._default_class = self._class_indices[config.traffic.default_class]
        self._released_ids: list[int] = []
        self._in_flight = InFlight(self._blocks)

    @property
    def limits(self) -> WorkerLimits:
        """What a request may ask: max_model_len is the least of configuration, model and pool."""
        return self._limits

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live.by_id)

    def add(self, request: GenerationRequest, now_ns: int) -> None:
        """Take a request. One that can never run ends at once with an error; one whose id is live is dropped and counted."""
        if request.request_id in self._live.by_id:
            self._counters.num_duplicates += 1
            return
        limits = self._limits
        class_index = self._class_indices.get(request.service_class, self._default_class)
        ageing_ns = self._config.priority_aging_ns
        sequence = Sequence(request, self._spec.eos_token_ids, limits.max_model_len, ageing_ns, class_index)
        self._counters.num_started += 1
        self._live.add(sequence)
        self._stalls.queue(sequence.wait, min(request.arrival_ns, now_ns))
        refusal = sequence.why_it_cannot_run(limits)
        if refusal is not None:
            self._finish(sequence, FinishReason.ERROR, now_ns, StepFailure(refusal[0].value.code, refusal[1]))

    def cancel(self, request_id: int, now_ns: int) -> None:
        """End a request with CANCELLED. Unknown and finished ids are fine: cancellation races with the end."""
        sequence = self._live.by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED, now_ns)

    def cancel_ring(self, reply_ring: int, below_request_id: int, now_ns: int) -> None:
        """End what an earlier gateway on this ring has left: its requests with ids below the given one."""
        for sequence in self._live.of_ring(reply_ring, below_request_id):
            self._finish(sequence, FinishReason.CANCELLED, now_ns)

    def schedule(self, now_ns: int) -> StepPlan:
        """The next step. It has rows whenever a request is live once those past their deadline have ended.

        First one row for each sequence with a single token to compute, so that prompts never make a stream wait; then prompts
        under way; then newcomers. Within each, by rank.
        """
        if not self._in_flight.is_empty:
            raise RuntimeError("schedule was called before the result of the plan before was applied")
        self._blocks.note_time(now_ns)
        self._stalls.begin_step(now_ns)
        while (overdue := self._live.deadlines.first_due(now_ns)) is not None:
            self._finish(overdue, FinishReason.DEADLINE, now_ns)
        max_num_tokens = self._config.max_num_batched_tokens
        draft = StepDraft(self._counters.num_steps, max_num_tokens)
        self._plan_single_tokens(draft, now_ns)
        self._plan_chunks(draft)
        blocked_by = self._admit(draft, now_ns)
        self._stalls.end_step(blocked_by, max_num_tokens - draft.num_tokens_left, draft.num_prefill_tokens)
        if not draft.sequences:
            if self.has_work:
                raise RuntimeError(f"a step without rows although there is work: {self.statistics()}")
            return draft.plan([])
        plan = draft.plan(self._released_ids)
        self._released_ids = []
        self._in_flight.launch(plan, draft.sequences)
        self._counters.num_steps += 1
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        """Take the step's tokens. Rows whose request ended meanwhile are ignored; a failed row ends its request alone."""
        if result.step_id != plan.step_id:
            raise RuntimeError(f"result of step {result.step_id} for step {plan.step_id}")
        sequences = self._land(plan, now_ns)
        self._counters.num_padding_tokens += result.num_padding_tokens
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if sequence.state is RequestState.FINISHED:
                continue
            num_tokens = len(row.token_ids)
            self._stalls.share(sequence.wait, num_tokens)
            failure = result.failures.get(row.request_id)
            if failure is not None:
                self._finish(sequence, FinishReason.ERROR, now_ns, failure)
                continue
            self._advance(sequence, num_tokens)
            if row.samples:
                self._take_token(sequence, result.tokens.get(row.request_id), now_ns)

    def fail_step(self, plan: StepPlan, code: str, message: str, now_ns: int) -> None:
        """The step as a whole failed: the requests of its rows end with this error, all others live on."""
        self._released_ids[:0] = plan.released_ids  # perhaps the executor never came to forget them
        for row, sequence in zip(plan.rows, self._land(plan, now_ns), strict=True):
            if sequence.state is not RequestState.FINISHED:
                self._stalls.share(sequence.wait, len(row.token_ids))
                self._finish(sequence, FinishReason.ERROR, now_ns, StepFailure(code, message))

    def take_events(self) -> dict[int, list[TokenEvent]]:
        """Events since the last call, oldest first, by reply ring."""
        return self._outbox.take()

    def take_evictions(self) -> list[tuple[int, int]]:
        """(lifetime, idle time before) in ns of the cached blocks evicted since the last call, at most 1,024 of them."""
        return self._blocks.take_evictions()

    def statistics(self) -> SchedulerStatistics:
        """A snapshot; cheap enough for every step."""
        return SchedulerStatistics.of(self._live, self._stalls.blocked_by, self._blocks.statistics(), self._counters)

    def check_integrity(self) -> None:
        """Raise RuntimeError when any account is wrong. Costs a walk over everything: for tests."""
        self._blocks.check_integrity()
        check_sequences(self._config, self._limits, self._live)
        check_classes(self._live)
        num_running, num_tables = len(self._live.running), self._blocks.num_tables
        if num_tables != num_running + self._in_flight.num_late_tables:
            raise RuntimeError(f"{num_tables} tables hold blocks, {num_running} sequences run")

    def _plan_single_tokens(self, draft: StepDraft, now_ns: int) -> None:
        """Rows of sequences with one token to compute. Where memory is short, the last in rank are preempted for the first."""
        index = 0
        running = self._live.running
        while index < len(running):
            sequence = running[index]
            index += 1
            if sequence.num_remaining_tokens > 1:
                continue
            while not self._blocks.extend(sequence.table, len(sequence.token_ids)):
                victim = running[-1]
                self._preempt(victim, now_ns)
                if victim is sequence:
                    return
            draft.add(sequence)

    def _plan_chunks(self, draft: StepDraft) -> None:
        """Rows of sequences with more to compute. Their memory was taken at admission; the first always gets budget."""
        for sequence in self._live.running:
            if draft.num_tokens_left == 0:
                return
            if sequence.num_remaining_tokens > 1:
                draft.add(sequence)

    def _admit(self, draft: StepDraft, now_ns: int) -> StallCause | None:
        """Let waiting sequences join, in order and without overtaking, while places, budget and memory last.

        Returns which of these was at its end; None when nobody waits any more.

        A sequence joins with memory for all its tokens, and only if every running one could still get a block afterwards:
        without that reserve an admission would be undone by the next preemption.
        """
        running, waiting = self._live.running, self._live.waiting
        num_places = self._policy.num_may_join(num_running=len(running), num_waiting=len(waiting), now_ns=now_ns)
        while (sequence := waiting.head()) is not None:
            if num_places <= 0:
                return StallCause.NO_SLOT
            if draft.num_tokens_left <= 0:
                return StallCause.NO_BUDGET
            num_cached_tokens = self._blocks.admit(
                sequence.table,
                sequence.token_ids,
                num_spare_blocks=len(running),
                counts_query=sequence.state is RequestState.WAITING,
            )
            if num_cached_tokens is None:
                return StallCause.NO_BLOCKS
            self._live.admit(sequence)
            self._counters.num_cached_prompt_tokens += sequence.start(num_cached_tokens, now_ns)
            self._stalls.admit(sequence.wait, now_ns)
            draft.add(sequence)
            num_places -= 1
        return None

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        """Take a running sequence's memory; its tokens are computed again later, but for what the prefix cache still has."""
        sequence.preempt()
        self._live.preempt(sequence)
        self._blocks.release(sequence.table)
        self._counters.num_preemptions += 1
        self._stalls.preempt(sequence.wait, now_ns)
        self._outbox.put_preemption(sequence)

    def _land(self, plan: StepPlan, now_ns: int) -> list[Sequence]:
        """The sequences of the plan in flight, which is not in flight any more."""
        self._blocks.note_time(now_ns)
        sequences = self._in_flight.land(plan)
        self._stalls.land(now_ns)
        return sequences

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Account for computed tokens and let full blocks be shared."""
        num_new_prompt_tokens, num_recomputed_tokens = sequence.advance(num_tokens)
        self._counters.num_prompt_tokens += num_new_prompt_tokens
        self._counters.num_recomputed_tokens += num_recomputed_tokens
        self._blocks.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)

    def _take_token(self, sequence: Sequence, token_id: int | None, now_ns: int) -> None:
        """Append a drawn token and emit it, with the end if it is the last."""
        if token_id is None or not 0 <= token_id < self._limits.vocab_size:
            message = f"The executor drew {'no token' if token_id is None else f'token {token_id}, which does not exist'}."
            self._finish(sequence, FinishReason.ERROR, now_ns, StepFailure(ErrorCode.INTERNAL.value.code, message))
            return
        self._stalls.progress(sequence.wait, now_ns)
        reason = sequence.append(token_id)
        self._counters.num_generated_tokens += 1
        if reason is None:
            self._outbox.put_token(sequence)
        else:
            self._finish(sequence, reason, now_ns, num_new_tokens=1)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        failure: StepFailure | None = None,
        num_new_tokens: int = 0,
    ) -> None:
        """End a live sequence, wherever it stands: the one place that emits terminal events."""
        self._live.remove(sequence)
        sequence.move_to(RequestState.FINISHED)
        self._in_flight.release(sequence)
        self._stalls.cut(sequence.wait, now_ns)
        if sequence.was_planned:
            self._released_ids.append(sequence.request_id)
        self._counters.num_finished[reason] += 1
        self._outbox.put_end(sequence, reason, num_new_tokens, failure)

"""The scheduler: which tokens the next step computes, and what becomes of the step's result.

Owns: every live sequence and the order in which they get budget and memory. Runs in: worker, tests, simulation.
Must not know: devices, processes, clocks (time is an argument).
"""

from headrace.kvcache import BlockTable, KVCacheManager
from headrace.protocol.errors import ConfigurationError, ErrorCode
from headrace.protocol.lifecycle import FinishReason, RequestState
from headrace.protocol.messages import GenerationRequest, TokenEvent, WorkerLimits
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.step import StepPlan, StepResult
from headrace.scheduling.budget import StepDraft
from headrace.scheduling.config import SchedulerConfig
from headrace.scheduling.integrity import check_sequences
from headrace.scheduling.outbox import EventOutbox
from headrace.scheduling.policy import JoinPolicy, OpenBatch
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.statistics import Counters, SchedulerStatistics
from headrace.scheduling.waiting import Deadlines, RankedSequences, WaitingQueue


class Scheduler:
    """Turns requests into step plans and step results into token events.

    Call schedule, execute the plan, then apply (or fail_step), in turn; add and cancel at any time. Every request taken by add
    ends with exactly one terminal event, made by one function (`_finish`). Nothing in a request makes these methods raise; a
    RuntimeError is a defect of the scheduler or of its caller.
    """

    def __init__(self, config: SchedulerConfig, spec: ExecutorSpec, policy: JoinPolicy | None = None) -> None:
        max_model_len = min(config.max_model_len, spec.max_model_len, spec.num_blocks * spec.block_size)
        if max_model_len < 2:
            raise ConfigurationError(
                f"The KV pool ({spec.num_blocks} blocks of {spec.block_size} tokens) or the model's context "
                f"({spec.max_model_len} tokens) cannot hold a prompt token and an output token."
            )
        self._config = config
        self._spec = spec
        self._policy: JoinPolicy = policy or OpenBatch(config.max_num_seqs)
        self._limits = WorkerLimits(spec.vocab_size, max_model_len, config.max_num_seqs, spec.num_blocks, spec.block_size)
        self._blocks = KVCacheManager(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            model_id=spec.model_id,
            kv_format=spec.kv_format,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._live: dict[int, Sequence] = {}
        self._running = RankedSequences()
        self._waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self._outbox = EventOutbox()
        self._counters = Counters()
        self._released_ids: list[int] = []
        self._in_flight: tuple[StepPlan, list[Sequence]] | None = None
        self._late_tables: list[BlockTable] = []  # of sequences that ended while the step in flight may still write there

    @property
    def limits(self) -> WorkerLimits:
        """What a request may ask: max_model_len is the least of configuration, model and pool."""
        return self._limits

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def add(self, request: GenerationRequest, now_ns: int) -> None:
        """Take a request. One that can never run ends at once with an error; one whose id is live is dropped and counted."""
        if request.request_id in self._live:
            self._counters.num_duplicates += 1
            return
        limits = self._limits
        sequence = Sequence(request, self._spec.eos_token_ids, limits.max_model_len, self._config.priority_aging_ns)
        self._counters.num_started += 1
        self._live[request.request_id] = sequence
        self._waiting.add_newcomer(sequence)
        self._deadlines.add(sequence)
        refusal = sequence.why_it_cannot_run(limits)
        if refusal is not None:
            self._finish(sequence, FinishReason.ERROR, code=refusal[0].value.code, message=refusal[1])

    def cancel(self, request_id: int, now_ns: int) -> None:
        """End a request with CANCELLED. Unknown and finished ids are fine: cancellation races with the end."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.CANCELLED)

    def cancel_ring(self, reply_ring: int, below_request_id: int, now_ns: int) -> None:
        """End what an earlier gateway on this ring has left: its requests with ids below the given one."""
        for sequence in list(self._live.values()):
            if sequence.request.reply_ring == reply_ring and sequence.request_id < below_request_id:
                self._finish(sequence, FinishReason.CANCELLED)

    def schedule(self, now_ns: int) -> StepPlan:
        """The next step. It has rows whenever a request is live once those past their deadline have ended.

        First one row for each sequence with a single token to compute, so that prompts never make a stream wait; then prompts
        under way; then newcomers. Within each, by rank.
        """
        if self._in_flight is not None:
            raise RuntimeError("schedule was called before the result of the plan before was applied")
        while (overdue := self._deadlines.first_due(now_ns)) is not None:
            self._finish(overdue, FinishReason.DEADLINE)
        draft = StepDraft(self._counters.num_steps, self._config.max_num_batched_tokens)
        self._plan_single_tokens(draft)
        self._plan_chunks(draft)
        self._admit(draft, now_ns)
        if not draft.sequences:
            if self._live:
                raise RuntimeError(f"a step without rows although there is work: {self.statistics()}")
            return draft.plan([])
        plan = draft.plan(self._released_ids)
        self._released_ids = []
        self._in_flight = (plan, draft.sequences)
        self._counters.num_steps += 1
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        """Take the step's tokens. Rows whose request ended meanwhile are ignored; a failed row ends its request alone."""
        if result.step_id != plan.step_id:
            raise RuntimeError(f"result of step {result.step_id} for step {plan.step_id}")
        for row, sequence in zip(plan.rows, self._land(plan), strict=True):
            if sequence.state is RequestState.FINISHED:
                continue
            failure = result.failures.get(row.request_id)
            if failure is not None:
                self._finish(sequence, FinishReason.ERROR, code=failure.code, message=failure.message)
                continue
            self._advance(sequence, len(row.token_ids))
            if row.samples:
                self._take_token(sequence, result.tokens.get(row.request_id))

    def fail_step(self, plan: StepPlan, code: str, message: str, now_ns: int) -> None:
        """The step as a whole failed: the requests of its rows end with this error, all others live on."""
        self._released_ids[:0] = plan.released_ids  # perhaps the executor never came to forget them
        for sequence in self._land(plan):
            if sequence.state is not RequestState.FINISHED:
                self._finish(sequence, FinishReason.ERROR, code=code, message=message)

    def take_events(self) -> dict[int, list[TokenEvent]]:
        """Events since the last call, oldest first, by reply ring."""
        return self._outbox.take()

    def statistics(self) -> SchedulerStatistics:
        """A snapshot; cheap enough for every step."""
        return SchedulerStatistics.of(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            blocks=self._blocks.statistics(),
            counters=self._counters,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError when any account is wrong. Costs a walk over everything: for tests."""
        self._blocks.check_integrity()
        check_sequences(self._config, self._limits, self._live, self._running, self._waiting, self._deadlines)
        if self._blocks.num_tables != len(self._running) + len(self._late_tables):
            raise RuntimeError(f"{self._blocks.num_tables} tables hold blocks, {len(self._running)} sequences run")

    def _plan_single_tokens(self, draft: StepDraft) -> None:
        """Rows of sequences with one token to compute. Where memory is short, the last in rank are preempted for the first."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            index += 1
            if sequence.num_remaining_tokens > 1:
                continue
            while not self._blocks.extend(sequence.table, len(sequence.token_ids)):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return
            draft.add(sequence)

    def _plan_chunks(self, draft: StepDraft) -> None:
        """Rows of sequences with more to compute. Their memory was taken at admission; the first always gets budget."""
        for sequence in self._running:
            if draft.num_tokens_left == 0:
                return
            if sequence.num_remaining_tokens > 1:
                draft.add(sequence)

    def _admit(self, draft: StepDraft, now_ns: int) -> None:
        """Let waiting sequences join, in order and without overtaking, while places, budget and memory last.

        A sequence joins with memory for all its tokens, and only if every running one could still get a block afterwards:
        without that reserve an admission would be undone by the next preemption.
        """
        num_places = self._policy.num_may_join(num_running=len(self._running), num_waiting=len(self._waiting), now_ns=now_ns)
        while num_places > 0 and draft.num_tokens_left > 0:
            sequence = self._waiting.head()
            if sequence is None:
                return
            num_cached_tokens = self._blocks.admit(
                sequence.table,
                sequence.token_ids,
                num_spare_blocks=len(self._running),
                counts_query=sequence.state is RequestState.WAITING,
            )
            if num_cached_tokens is None:
                return
            self._waiting.remove(sequence)
            self._counters.num_cached_prompt_tokens += sequence.start(num_cached_tokens, now_ns)
            self._running.add(sequence)
            draft.add(sequence)
            num_places -= 1

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's memory; its tokens are computed again later, but for what the prefix cache still has."""
        sequence.preempt()
        self._running.remove(sequence)
        self._blocks.release(sequence.table)
        self._counters.num_preemptions += 1
        self._waiting.add_preempted(sequence)

    def _land(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of the plan in flight, which is not in flight any more."""
        if self._in_flight is None and not plan.rows:
            return []
        if self._in_flight is None or self._in_flight[0] is not plan:
            raise RuntimeError(f"step {plan.step_id} is not in flight")
        sequences = self._in_flight[1]
        self._in_flight = None
        for table in self._late_tables:
            self._blocks.release(table)
        self._late_tables.clear()
        return sequences

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Account for computed tokens and let full blocks be shared."""
        num_new_prompt_tokens, num_recomputed_tokens = sequence.advance(num_tokens)
        self._counters.num_prompt_tokens += num_new_prompt_tokens
        self._counters.num_recomputed_tokens += num_recomputed_tokens
        self._blocks.commit(sequence.table, sequence.token_ids, sequence.num_computed_tokens)

    def _take_token(self, sequence: Sequence, token_id: int | None) -> None:
        """Append a drawn token and emit it, with the end if it is the last."""
        if token_id is None or not 0 <= token_id < self._limits.vocab_size:
            message = f"The executor drew {'no token' if token_id is None else f'token {token_id}, which does not exist'}."
            self._finish(sequence, FinishReason.ERROR, code=ErrorCode.INTERNAL.value.code, message=message)
            return
        reason = sequence.append(token_id)
        self._counters.num_generated_tokens += 1
        if reason is None:
            self._outbox.put_token(sequence)
        else:
            self._finish(sequence, reason, num_new_tokens=1)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, num_new_tokens: int = 0, code: str = "", message: str = ""
    ) -> None:
        """End a live sequence, wherever it stands: the one place that emits terminal events."""
        if sequence.state is RequestState.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move_to(RequestState.FINISHED)
        if self._in_flight is not None and sequence in self._in_flight[1]:
            self._late_tables.append(sequence.table)
        else:
            self._blocks.release(sequence.table)
        self._deadlines.remove(sequence)
        del self._live[sequence.request_id]
        if sequence.was_planned:
            self._released_ids.append(sequence.request_id)
        self._counters.num_finished[reason] += 1
        self._outbox.put_end(sequence, reason, num_new_tokens, code, message)

"""The scheduler: which tokens the next step computes, and what becomes of the step's result.

Owns: every live sequence and the order in which they get budget and memory. Runs in: worker, tests, simulation.
Must not know: devices, processes, clocks (time is an argument).
"""

from headrace.kvcache import KVCacheManager
from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason, RequestState
from headrace.protocol.messages import GenerationRequest, TokenEvent, WorkerLimits
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.step import StepFailure, StepPlan, StepResult
from headrace.scheduling.claims import Account, Claim
from headrace.scheduling.config import SchedulerConfig, claim_rules_of, limits_of
from headrace.scheduling.in_flight import InFlight
from headrace.scheduling.integrity import check_classes, check_sequences
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.outbox import EventOutbox
from headrace.scheduling.placement import Placement
from headrace.scheduling.planner import StepPlanner
from headrace.scheduling.policy import JoinPolicy
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.stalls import StallWatch, WaitKind
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
        self._limits = limits_of(config, spec)
        self._blocks = KVCacheManager(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            model_id=spec.model_id,
            kv_format=spec.kv_format,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._rules = claim_rules_of(config)
        self._live = LiveSequences(len(config.traffic.classes), self._rules)
        self._outbox = EventOutbox()
        self._counters = Counters()
        self._stalls = StallWatch(config.stall_threshold_ns)
        placement = Placement(self._live, self._blocks, self._stalls, self._counters, self._outbox)
        self._planner = StepPlanner(config, self._live, self._blocks, placement, policy)
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

    @property
    def has_events(self) -> bool:
        """Whether take_events has something to give."""
        return not self._outbox.is_empty

    @property
    def next_expiry_ns(self) -> int | None:
        """When the next live request must leave, at its deadline or at the end of its time in the queue; None: never."""
        times_ns = (self._live.deadlines.next_ns, self._live.waiting.next_expiry_ns())
        return min((at_ns for at_ns in times_ns if at_ns is not None), default=None)

    def add(self, request: GenerationRequest, now_ns: int) -> None:
        """Take a request. One that can never run ends at once with an error; one whose id is live is dropped and counted."""
        if request.request_id in self._live.by_id:
            self._counters.num_duplicates += 1
            return
        limits = self._limits
        class_index = self._class_indices.get(request.service_class, self._default_class)
        claim = self._rules.claim(request)
        sequence = Sequence(request, self._spec.eos_token_ids, limits.max_model_len, claim, class_index)
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
        """The next step. It has rows whenever a request is live once those past their deadline have ended."""
        if not self._in_flight.is_empty:
            raise RuntimeError("schedule was called before the result of the plan before was applied")
        self._blocks.note_time(now_ns)
        self._stalls.begin_step(now_ns)
        self._end_overdue(now_ns)
        draft, blocked_by = self._planner.plan(self._counters.num_steps, now_ns)
        self._stalls.end_step(blocked_by, draft.num_tokens, draft.num_prefill_tokens)
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
        if plan.rows:
            self._planner.land(now_ns)
        tokens, failures = result.tokens, result.failures
        num_drawn_by_claim: dict[tuple[int, Account], list[Claim]] = {}
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if sequence.state is RequestState.FINISHED:
                continue
            num_tokens = len(row.token_ids)
            if sequence.wait.kind is WaitKind.PREFILL:
                self._stalls.share(sequence.wait, num_tokens)
            if failures and row.request_id in failures:
                self._finish(sequence, FinishReason.ERROR, now_ns, failures[row.request_id])
                continue
            self._advance(sequence, num_tokens)
            if row.samples:
                claim = sequence.claim
                key = (claim.level, claim.account)
                if key in num_drawn_by_claim:
                    num_drawn_by_claim[key].append(claim)
                else:
                    num_drawn_by_claim[key] = [claim]
                self._take_token(sequence, tokens.get(row.request_id), now_ns)
        for claims in num_drawn_by_claim.values():
            self._live.charge(claims[0], now_ns, num_output_tokens=len(claims))

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
        return SchedulerStatistics.of(
            self._live, self._stalls.blocked_by, self._blocks.statistics(), self._counters, self._planner.prefill
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError when any account is wrong. Costs a walk over everything: for tests."""
        self._blocks.check_integrity()
        check_sequences(self._config, self._limits, self._live)
        check_classes(self._live)
        num_running, num_tables = len(self._live.running), self._blocks.num_tables
        if num_tables != num_running + self._in_flight.num_late_tables:
            raise RuntimeError(f"{num_tables} tables hold blocks, {num_running} sequences run")

    def _end_overdue(self, now_ns: int) -> None:
        """End those whose deadline has passed, and newcomers that have waited for as long as their class lets them."""
        while (overdue := self._live.deadlines.first_due(now_ns)) is not None:
            failure = StepFailure(ErrorCode.DEADLINE_EXCEEDED.value.code, "The request's own deadline has passed.")
            self._finish(overdue, FinishReason.DEADLINE, now_ns, failure)
        for sequence in self._live.waiting.expired(now_ns):
            message = f"The request waited for longer than its class {sequence.request.service_class!r} allows."
            failure = StepFailure(ErrorCode.DEADLINE_EXCEEDED.value.code, message)
            self._finish(sequence, FinishReason.DEADLINE, now_ns, failure)

    def _land(self, plan: StepPlan, now_ns: int) -> list[Sequence]:
        """The sequences of the plan in flight, which is not in flight any more."""
        self._blocks.note_time(now_ns)
        sequences = self._in_flight.land(plan)
        self._stalls.land(now_ns)
        return sequences

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Account for computed tokens and let full blocks be shared."""
        if num_tokens == 1 and sequence.num_computed_tokens == sequence.num_ever_computed_tokens >= sequence.num_prompt_tokens:
            num_computed_tokens = sequence.num_computed_tokens + 1  # a stream's row, by far the most frequent
            sequence.num_computed_tokens = sequence.num_ever_computed_tokens = num_computed_tokens
            if num_computed_tokens % self._blocks.block_size == 0:
                self._blocks.commit(sequence.table, sequence.token_ids, num_computed_tokens)
            return
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
        self._live.remove(sequence, now_ns)
        if not self._live.by_id:
            self._planner.rest()
        sequence.move_to(RequestState.FINISHED)
        self._in_flight.release(sequence)
        self._stalls.cut(sequence.wait, now_ns)
        if sequence.was_planned:
            self._released_ids.append(sequence.request_id)
        self._counters.num_finished[reason] += 1
        self._outbox.put_end(sequence, reason, num_new_tokens, failure)

"""The planning of one step: who joins, whose tokens are computed.

Owns: StepPlanner. Runs in: worker, tests, simulation.
Must not know: what becomes of a step's result, events.
"""

from headrace.kvcache import KVCacheManager
from headrace.protocol.lifecycle import RequestState
from headrace.protocol.stalls import StallCause
from headrace.scheduling.budget import StepDraft
from headrace.scheduling.config import SchedulerConfig
from headrace.scheduling.joining import Joining
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.placement import Placement
from headrace.scheduling.policy import JoinPolicy, OpenBatch
from headrace.scheduling.prefill_budget import Lineup, PrefillBudget
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.step_time import StepShape


class StepPlanner:
    """Plans steps, and learns from how long they take what the next ones may hold."""

    def __init__(
        self,
        config: SchedulerConfig,
        live: LiveSequences,
        blocks: KVCacheManager,
        placement: Placement,
        policy: JoinPolicy | None,
    ) -> None:
        self.prefill = PrefillBudget(config, blocks.block_size)
        self._max_num_tokens = config.max_num_batched_tokens
        self._live = live
        self._blocks = blocks
        self._placement = placement
        self._joining = Joining(
            policy or OpenBatch(config.max_num_seqs),
            blocks,
            live,
            placement,
            min_chunk_tokens=config.min_chunk_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self._passed_over: list[Sequence] = []  # prompts of which the last step computed nothing
        self._shape = StepShape(0, 0, 0)  # of the last step
        self._scheduled_ns = 0  # when it was planned
        self._landed_ns = 0  # when its result, or the last one before it, came; 0: nobody was live since

    def plan(self, step_id: int, now_ns: int) -> tuple[StepDraft, StallCause | None]:
        """The next step, and what keeps the next waiting sequence from joining.

        Those that wait join in order of their claims, where need be in place of lower ones. Then one row for each sequence with
        a single token to compute, so that prompts never make a stream wait; prompts share what is left of the step's budget.
        """
        live, prefill = self._live, self.prefill
        live.waiting.advance(now_ns)
        for sequence in self._passed_over:
            if sequence.state is RequestState.RUNNING:
                live.pass_over(sequence, now_ns - self._scheduled_ns)
        lineup, num_changes = Lineup(live.running), live.num_changes
        blocked_by = self._joining.admit(prefill.num_tokens(lineup), now_ns) if len(live.waiting) else None
        if live.num_changes != num_changes:
            lineup = Lineup(live.running)
        draft = StepDraft(step_id, self._max_num_tokens)
        self._plan_streams(draft, lineup, now_ns)
        self._passed_over = prefill.share(draft, *self._in_turn(lineup.prompts), prefill.num_tokens(lineup))
        self._scheduled_ns, self._shape = now_ns, draft.shape()
        prefill.expect(self._shape)
        return draft, blocked_by

    def _in_turn(self, prompts: list[Sequence]) -> tuple[list[Sequence], list[int]]:
        """The prompts in the order in which they get tokens, and the rank of each: by level, light accounts' before others'."""
        is_light = self._live.is_light
        ranked = [(2 * sequence.claim.level + (not is_light(sequence)), sequence) for sequence in prompts]
        ranked.sort(key=_rank_of)  # stable
        return [sequence for _, sequence in ranked], [rank for rank, _ in ranked]

    def land(self, now_ns: int) -> None:
        """The result of the last step is there.

        Its time is that from the result before: what a stream of both sees between its tokens, whatever the worker does besides
        computing. Where nothing ran before, it is counted from the plan.
        """
        self.prefill.observe(self._shape, now_ns - (self._landed_ns or self._scheduled_ns))
        self._landed_ns = now_ns

    def rest(self) -> None:
        """Nobody is live: the time to the next step is nobody's wait."""
        self._landed_ns = 0

    def _plan_streams(self, draft: StepDraft, lineup: Lineup, now_ns: int) -> None:
        """Rows of sequences with one token to compute. Where memory is short, the last in rank are preempted for the first.

        The last in rank has no row yet, for rows are added in that order. Prompts that lost their memory leave the lineup.
        """
        block_size = self._blocks.block_size
        has_preempted = False
        for sequence in lineup.streams:
            if has_preempted and sequence.state is not RequestState.RUNNING:
                continue
            if len(sequence.token_ids) > len(sequence.table.block_ids) * block_size:
                has_preempted |= self._extend(sequence, now_ns)
                if sequence.state is not RequestState.RUNNING:
                    continue
            draft.add(sequence, 1)
        if has_preempted:
            lineup.prompts = [sequence for sequence in lineup.prompts if sequence.state is RequestState.RUNNING]

    def _extend(self, sequence: Sequence, now_ns: int) -> bool:
        """Memory for its next token, at worst by preempting the last in rank, itself included. Whether anybody was."""
        has_preempted = False
        while not self._blocks.extend(sequence.table, len(sequence.token_ids)):
            victim = self._live.running[-1]
            self._placement.preempt(victim, now_ns, by_claim=False)
            has_preempted = True
            if victim is sequence:
                break
        return has_preempted


def _rank_of(ranked: tuple[int, Sequence]) -> int:
    return ranked[0]

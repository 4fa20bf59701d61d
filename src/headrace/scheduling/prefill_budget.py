"""How many prompt tokens a step may hold, and for whom: steps are bounded in time, by what steps have taken so far.

Owns: PrefillBudget. Runs in: worker, tests, simulation.
Must not know: blocks, who joins.
"""

from collections.abc import Iterable

from headrace.scheduling.budget import StepDraft
from headrace.scheduling.config import SchedulerConfig
from headrace.scheduling.prefill_share import share_prefill
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.step_time import StepShape, StepTimeModel


class Lineup:
    """The running sequences by what they need next, each kind in order of claims, and what the streams' rows will read."""

    __slots__ = ("num_context_tokens", "prompts", "start_position", "streams", "target_ns")

    def __init__(self, running: Iterable[Sequence]) -> None:
        self.streams: list[Sequence] = []  # one token to compute
        self.prompts: list[Sequence] = []  # more: prompts, and what is computed again
        self.num_context_tokens = 0  # KV positions that the streams read
        self.target_ns = 0  # the tightest TBT target of those that have begun to answer; 0: none has one
        self.start_position = 0  # the largest of the prompts
        streams = self.streams
        num_context_tokens = target_ns = 0
        for sequence in running:
            num_tokens = len(sequence.token_ids)
            if num_tokens - sequence.num_computed_tokens > 1:
                self.prompts.append(sequence)
                self.start_position = max(self.start_position, sequence.num_computed_tokens)
                continue
            streams.append(sequence)
            num_context_tokens += num_tokens
            own_ns = sequence.claim.tbt_target_ns
            if own_ns and (own_ns < target_ns or not target_ns) and num_tokens > sequence.num_prompt_tokens:
                target_ns = own_ns
        self.num_context_tokens, self.target_ns = num_context_tokens, target_ns


MAX_GRAIN_TOKENS = 16  # chunks are multiples of it: few different shapes for kernels, and little of the budget left over


class PrefillBudget:
    """The largest prefill with which the step is predicted to end within the tightest TBT target of the streams in it.

    So Sarathi-Serve (OSDI 2024) bounds steps by a token budget; here the budget follows from a model of step times that is
    fitted as steps come (Niyama, 2025, has such a dynamic chunk). A step in which nobody decodes is bounded by
    max_num_batched_tokens alone. At least `min_chunk_tokens` are allowed, so that prompts always get on.
    """

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.model = StepTimeModel()
        self.target_ns = 0  # the tightest TBT target of the last step's streams; 0: there was none
        self.predicted_ns = 0  # of the last step
        self._config = config
        self._grain = min(block_size, MAX_GRAIN_TOKENS)

    def num_tokens(self, lineup: Lineup) -> int:
        """Most prefill tokens of a step with these sequences."""
        target_ns = self.target_ns = lineup.target_ns if self._config.step_time_budget else 0
        num_rows = len(lineup.streams)
        max_tokens = self._config.max_num_batched_tokens - num_rows
        if not target_ns:
            return max_tokens
        decode = StepShape(num_rows, 0, lineup.num_context_tokens)
        found = self.model.largest_prefill(
            decode, budget_ns=target_ns, start_position=lineup.start_position, max_tokens=max_tokens
        )
        return min(max_tokens, max(found, self._config.min_chunk_tokens))

    def share(self, draft: StepDraft, prompts: list[Sequence], ranks: list[int], num_tokens: int) -> list[Sequence]:
        """Add rows of prompts for at most so many tokens; a lower rank goes before a higher. Returns those that got nothing."""
        if not prompts:
            return []
        shares = share_prefill(
            min(num_tokens, draft.num_tokens_left),
            [sequence.num_remaining_tokens for sequence in prompts],
            ranks,
            min_chunk=self._config.min_chunk_tokens,
            block_size=self._grain,
        )
        passed_over = []
        for sequence, share in zip(prompts, shares, strict=True):
            if share:
                draft.add(sequence, share)
            else:
                passed_over.append(sequence)
        return passed_over

    def expect(self, shape: StepShape) -> None:
        """A step of this shape was planned."""
        self.predicted_ns = self.model.predict(shape)

    def observe(self, shape: StepShape, duration_ns: int) -> None:
        """A step of this shape has taken so long."""
        self.model.observe(shape, max(0, duration_ns))

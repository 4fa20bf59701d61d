"""What one step may spend, and the plan that spends it.

Owns: the token budget and the rows under construction. Runs in: worker, tests, simulation.
Must not know: who comes first, blocks.
"""

from headrace.protocol.step import StepPlan, StepRow
from headrace.scheduling.sequence import Sequence


class StepDraft:
    """A plan in the making: rows are added while tokens of the budget are left."""

    def __init__(self, step_id: int, max_num_tokens: int) -> None:
        self.sequences: list[Sequence] = []  # one for each row
        self.num_tokens_left = max_num_tokens
        self.num_prefill_tokens = 0  # tokens of rows with more than one
        self._step_id = step_id
        self._max_num_tokens = max_num_tokens
        self._rows: list[StepRow] = []

    def add(self, sequence: Sequence) -> None:
        """Add a row for as many of the sequence's remaining tokens as the budget holds; at least one must be left."""
        num_tokens = min(sequence.num_remaining_tokens, self.num_tokens_left)
        if num_tokens < 1:
            raise RuntimeError(f"request {sequence.request_id} has no token to compute, or the step has no budget for one")
        start = sequence.num_computed_tokens
        end = start + num_tokens
        history = sequence.token_ids
        row = StepRow(
            request_id=sequence.request_id,
            token_ids=history[start:end],
            start_position=start,
            block_ids=sequence.table.block_ids,
            samples=end == len(history),
            sampling=sequence.request.sampling,
            history=history,
            num_prompt_tokens=sequence.num_prompt_tokens,
            forbidden_token_ids=tuple(sequence.forbidden_token_ids),
        )
        self._rows.append(row)
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        if num_tokens > 1:
            self.num_prefill_tokens += num_tokens
        sequence.was_planned = True

    def plan(self, released_ids: list[int]) -> StepPlan:
        """The finished plan."""
        return StepPlan(self._step_id, self._rows, self._max_num_tokens - self.num_tokens_left, released_ids)

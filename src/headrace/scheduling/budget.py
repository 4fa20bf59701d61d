"""What one step may spend, and the plan that spends it.

Owns: the token budget and the rows under construction. Runs in: worker, tests, simulation.
Must not know: who comes first, blocks.
"""

from headrace.protocol.step import StepPlan, StepRow
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.step_time import StepShape, prefill_pairs


class StepDraft:
    """A plan in the making: rows are added while tokens of the budget are left."""

    def __init__(self, step_id: int, max_num_tokens: int) -> None:
        self.sequences: list[Sequence] = []  # one for each row
        self.num_tokens_left = max_num_tokens
        self.num_prefill_tokens = 0  # tokens of rows with more than one
        self._num_context_tokens = 0  # positions that rows of one token read
        self._num_prefill_pairs = 0
        self._step_id = step_id
        self._max_num_tokens = max_num_tokens
        self._rows: list[StepRow] = []

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Add a row for so many of the sequence's remaining tokens. RuntimeError when it has not so many, or the budget."""
        history = sequence.token_ids
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if num_tokens < 1 or end > len(history) or num_tokens > self.num_tokens_left:
            raise RuntimeError(f"request {sequence.request_id} cannot have {num_tokens} tokens of this step")
        request = sequence.request
        # Positional: of a row for each token, the names would cost as much as the row.
        row = StepRow(
            sequence.request_id,
            history[start:end],
            start,
            sequence.table.block_ids,
            end == len(history),  # samples
            request.sampling,
            history,
            sequence.num_prompt_tokens,
            tuple(sequence.stop_token_ids) if len(history) < sequence.min_tokens else (),
        )
        self._rows.append(row)
        self.sequences.append(sequence)
        self.num_tokens_left -= num_tokens
        if num_tokens > 1:
            self.num_prefill_tokens += num_tokens
            self._num_prefill_pairs += prefill_pairs(start, num_tokens)
        else:
            self._num_context_tokens += end
        sequence.was_planned = True

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return self._max_num_tokens - self.num_tokens_left

    def shape(self) -> StepShape:
        """What the step's time depends on."""
        num_rows = self.num_tokens - self.num_prefill_tokens
        return StepShape(num_rows, self.num_prefill_tokens, self._num_context_tokens, self._num_prefill_pairs)

    def plan(self, released_ids: list[int]) -> StepPlan:
        """The finished plan."""
        return StepPlan(self._step_id, self._rows, self.num_tokens, released_ids)

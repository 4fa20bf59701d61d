"""A step plan laid out as the ragged arrays that the paged graph takes.

Owns: StepPlan -> numpy arrays. Runs in: worker, in every step. Must not know: OpenVINO, sampling.
Names and shapes of the arrays are in protocol/graph.py.
"""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.protocol.step import StepPlan, StepRow

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The inputs of one step: T tokens, S rows, R of them sampling, B entries of block tables."""

    input_ids: Int64Array  # [T]
    position_ids: Int64Array  # [T]
    past_lens: Int32Array  # [S]
    subsequence_begins: Int32Array  # [S + 1]
    block_indices: Int32Array  # [B]
    block_indices_begins: Int32Array  # [S + 1]
    max_context_len: Int32Array  # []
    sampled_tokens_indices: Int32Array  # [R]
    sampling_rows: list[StepRow]  # the R rows, in the order of sampled_tokens_indices


class PagedLayout:
    """Lays out plans for a pool of `num_blocks` blocks and a vocabulary of `vocab_size` tokens.

    The storage has one block more: where a plan has a single token, a filler row of one token that no one reads is computed
    there beside it. Products of one row take another way through the device's library than those of several, and their last
    bits differ; where activations are quantized on the way, that grows to 0.6 in a logit of the default model. With the filler,
    a decoding row over int8 weights gets the same bits alone and beside others, and a second row costs next to nothing.

    Everything that the device would use as an address is checked here: a wrong block or token id would otherwise read or
    write foreign memory without any error.
    """

    def __init__(self, block_size: int, num_blocks: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size

    @property
    def num_storage_blocks(self) -> int:
        """Blocks that the storage must have: those of the pool, and the filler's."""
        return self._num_blocks + 1

    def arrange(self, plan: StepPlan) -> PagedInputs:
        """Arrays of a plan with at least one row. Raises ValueError when the plan contradicts itself (a scheduler's defect)."""
        rows = plan.rows
        num_rows = len(rows)
        block_size = self._block_size
        lengths = [len(row.token_ids) for row in rows]
        starts = [row.start_position for row in rows]
        num_row_blocks = [-(-(start + length) // block_size) for start, length in zip(starts, lengths, strict=True)]
        if min(lengths) < 1 or min(starts) < 0:
            raise ValueError(f"step {plan.step_id}: a row has no tokens or starts before 0")

        past_lens = np.array(starts, np.int32)
        row_lens = np.array(lengths, np.int32)
        begins = np.zeros(num_rows + 1, np.int32)
        np.cumsum(row_lens, out=begins[1:])
        num_tokens = int(begins[-1])
        if num_tokens != plan.num_tokens:
            raise ValueError(f"step {plan.step_id}: its rows have {num_tokens} tokens, the plan says {plan.num_tokens}")

        input_ids = np.fromiter(chain.from_iterable([row.token_ids for row in rows]), np.int64, num_tokens)
        if num_tokens == num_rows:  # decoding only
            position_ids = past_lens.astype(np.int64)
        else:
            position_ids = np.arange(num_tokens, dtype=np.int64) + np.repeat(past_lens - begins[:-1], row_lens)

        block_begins = np.zeros(num_rows + 1, np.int32)
        np.cumsum(np.array(num_row_blocks, np.int32), out=block_begins[1:])
        block_indices = self._block_indices(plan, num_row_blocks, int(block_begins[-1]))
        self._check_range(plan, "token", input_ids, self._vocab_size)
        self._check_range(plan, "block", block_indices, self._num_blocks)

        samples = [index for index, row in enumerate(rows) if row.samples]
        inputs = PagedInputs(
            input_ids=input_ids,
            position_ids=position_ids,
            past_lens=past_lens,
            subsequence_begins=begins,
            block_indices=block_indices,
            block_indices_begins=block_begins,
            max_context_len=np.array(max(map(int.__add__, starts, lengths)), np.int32),
            sampled_tokens_indices=begins[1:][samples] - 1,
            sampling_rows=[rows[index] for index in samples],
        )
        return self._with_filler(inputs) if num_tokens == 1 else inputs

    def filler(self) -> PagedInputs:
        """A step of two filler rows, which reads and writes nothing of the pool's."""
        return self._with_filler(
            PagedInputs(
                input_ids=np.zeros(1, np.int64),
                position_ids=np.zeros(1, np.int64),
                past_lens=np.zeros(1, np.int32),
                subsequence_begins=np.array([0, 1], np.int32),
                block_indices=np.array([self._num_blocks], np.int32),
                block_indices_begins=np.array([0, 1], np.int32),
                max_context_len=np.array(1, np.int32),
                sampled_tokens_indices=np.zeros(1, np.int32),
                sampling_rows=[],
            )
        )

    def _with_filler(self, inputs: PagedInputs) -> PagedInputs:
        """The inputs of a single-token step with the filler row after it. It does not sample."""
        zero = np.zeros(1, np.int64)
        begins, block_begins = inputs.subsequence_begins, inputs.block_indices_begins
        return replace(
            inputs,
            input_ids=np.concatenate([inputs.input_ids, zero]),
            position_ids=np.concatenate([inputs.position_ids, zero]),
            past_lens=np.append(inputs.past_lens, np.int32(0)),
            subsequence_begins=np.append(begins, begins[-1:] + 1),
            block_indices=np.append(inputs.block_indices, np.int32(self._num_blocks)),
            block_indices_begins=np.append(block_begins, block_begins[-1:] + 1),
        )

    def _block_indices(self, plan: StepPlan, num_row_blocks: list[int], total: int) -> Int32Array:
        """The used beginning of every row's block table, one after another."""
        tables = []
        for row, needed in zip(plan.rows, num_row_blocks, strict=True):
            table = row.block_ids
            if len(table) != needed:
                if len(table) < needed:
                    raise ValueError(
                        f"step {plan.step_id}: request {row.request_id} needs {needed} blocks and has {len(table)}"
                    )
                table = table[:needed]
            tables.append(table)
        return np.fromiter(chain.from_iterable(tables), np.int32, total)

    @staticmethod
    def _check_range(plan: StepPlan, what: str, ids: Int32Array | Int64Array, limit: int) -> None:
        if int(ids.min()) < 0 or int(ids.max()) >= limit:
            raise ValueError(f"step {plan.step_id}: a {what} id lies outside 0..{limit - 1}")

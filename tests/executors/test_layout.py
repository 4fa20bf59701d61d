"""StepPlan -> arrays, against a plain loop; and plans that contradict themselves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.executors.layout import PagedInputs, PagedLayout
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.step import StepPlan, StepRow

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 50, 100
INT32_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "sampled_tokens_indices")


def make_row(request_id: int, start: int, token_ids: list[int], block_ids: list[int], samples: bool) -> StepRow:
    history = [0] * start + token_ids
    return StepRow(request_id, token_ids, start, block_ids, samples, SamplingParams(), history, 1)


def plan_of(*rows: StepRow) -> StepPlan:
    return StepPlan(3, list(rows), sum(len(row.token_ids) for row in rows))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = []
    for request_id in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 20))
        token_ids = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
        needed = -(-(start + len(token_ids)) // BLOCK_SIZE)
        spare = draw(st.integers(0, 2))
        block_ids = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=needed + spare, max_size=needed + spare))
        rows.append(make_row(request_id, start, token_ids, block_ids, draw(st.booleans())))
    return plan_of(*rows)


def arrange(plan: StepPlan) -> PagedInputs:
    return PagedLayout(BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE).arrange(plan)


@given(plans())
def test_arrays_say_what_the_plan_says(plan: StepPlan) -> None:
    inputs = arrange(plan)
    has_filler = plan.num_tokens == 1
    assert len(inputs.past_lens) == len(plan.rows) + has_filler
    for index, row in enumerate(plan.rows):
        begin, end = inputs.subsequence_begins[index : index + 2]
        positions = range(row.start_position, row.start_position + len(row.token_ids))
        assert inputs.input_ids[begin:end].tolist() == list(row.token_ids)
        assert inputs.position_ids[begin:end].tolist() == list(positions)
        assert inputs.past_lens[index] == row.start_position
        first, last = inputs.block_indices_begins[index : index + 2]
        table = inputs.block_indices[first:last].tolist()
        assert table == list(row.block_ids)[: positions[-1] // BLOCK_SIZE + 1]
    sampling = [row for row in plan.rows if row.samples]
    ends = np.cumsum([len(row.token_ids) for row in plan.rows])
    assert inputs.sampling_rows == sampling
    assert inputs.sampled_tokens_indices.tolist() == [
        end - 1 for end, row in zip(ends.tolist(), plan.rows, strict=True) if row.samples
    ]
    assert inputs.max_context_len == max(row.start_position + len(row.token_ids) for row in plan.rows)
    assert len(inputs.input_ids) == len(inputs.position_ids) == inputs.subsequence_begins[-1] == plan.num_tokens + has_filler
    assert len(inputs.block_indices) == inputs.block_indices_begins[-1]


@given(plans())
def test_types_are_the_graphs_and_memory_is_contiguous(plan: StepPlan) -> None:
    inputs = arrange(plan)
    assert inputs.input_ids.dtype == inputs.position_ids.dtype == np.int64
    for name in INT32_INPUTS:
        array = getattr(inputs, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert inputs.max_context_len.dtype == np.int32
    assert inputs.max_context_len.shape == ()


def test_a_single_token_gets_a_filler_outside_the_pool() -> None:
    """It is computed in the extra block, at position 0, and nothing of it is sampled."""
    layout = PagedLayout(BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE)
    inputs = layout.arrange(plan_of(make_row(1, 9, [7], [4, 2, 6], samples=True)))
    assert inputs.input_ids.tolist() == [7, 0]
    assert inputs.position_ids.tolist() == [9, 0]
    assert inputs.past_lens.tolist() == [9, 0]
    assert inputs.block_indices.tolist() == [4, 2, 6, NUM_BLOCKS]
    assert inputs.block_indices_begins.tolist() == [0, 3, 4]
    assert inputs.sampled_tokens_indices.tolist() == [0]
    assert layout.num_storage_blocks == NUM_BLOCKS + 1
    assert set(layout.filler().block_indices.tolist()) == {NUM_BLOCKS}


GOOD = make_row(1, 3, [5, 6], [1, 2], samples=True)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (replace(plan_of(GOOD), num_tokens=3), "the plan says 3"),
        (plan_of(replace(GOOD, block_ids=[1])), "needs 2 blocks and has 1"),
        (plan_of(replace(GOOD, block_ids=[1, NUM_BLOCKS])), "block id"),
        (plan_of(replace(GOOD, block_ids=[-1, 1])), "block id"),
        (plan_of(replace(GOOD, token_ids=[5, VOCAB_SIZE])), "token id"),
        (plan_of(replace(GOOD, token_ids=[5, -1])), "token id"),
        (plan_of(GOOD, replace(GOOD, token_ids=[])), "no tokens"),
        (plan_of(replace(GOOD, start_position=-1)), "before 0"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(plan: StepPlan, says: str) -> None:
    """Addresses are checked before the device uses them."""
    with pytest.raises(ValueError, match=says):
        arrange(plan)

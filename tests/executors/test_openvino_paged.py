"""The OpenVINO executor on a tiny random graph: opening, KV precisions, bad numbers, exactness."""

import gc
from collections.abc import Callable, Iterator

import numpy as np
import openvino as ov
import pytest

from headrace.executors.openvino_paged import OpenVINOExecutor
from headrace.protocol.errors import ConfigurationError, ErrorCode, ModelError
from headrace.protocol.graph import BLOCK_SIZE, LOG_NORMALIZER, PAST_LENS
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.step import StepPlan
from tests.contracts.executor_contract import Stepper, Story
from tests.executors.tiny_graph import HEAD_SIZE, KV_HEADS, LAYERS, MANIFEST, NAN_TOKEN, VOCAB_SIZE, tiny_graph

PROMPT = [2 + 7 * i % 300 for i in range(2 * BLOCK_SIZE + 5)]


def open_tiny(
    num_blocks: int | Callable[[int], int] = 12, kv_precision: str = "f32", with_nan: bool = False
) -> OpenVINOExecutor:
    return OpenVINOExecutor.open(
        lambda: tiny_graph(with_nan),
        MANIFEST,
        num_blocks=num_blocks,
        kv_precision=kv_precision,  # type: ignore[arg-type]
        max_num_threads=1,
    )


@pytest.fixture
def executor() -> Iterator[OpenVINOExecutor]:
    executor = open_tiny()
    yield executor
    executor.close()


def logits_of(executor: OpenVINOExecutor, *rows: tuple[Story, int | None]) -> np.ndarray:
    """Steps once and gives the logits of the rows that sampled."""
    Stepper(executor).step(*rows)
    return executor._scores().logits.copy()


def test_the_spec_says_what_was_made(executor: OpenVINOExecutor) -> None:
    spec = executor.spec
    assert spec.model_id == MANIFEST.identity
    assert spec.kv_format == "openvino-f32-32"
    assert (spec.block_size, spec.num_blocks, spec.vocab_size) == (BLOCK_SIZE, 12, VOCAB_SIZE)
    assert executor.bytes_per_block == 2 * LAYERS * KV_HEADS * BLOCK_SIZE * HEAD_SIZE * 4
    assert executor.num_threads == 1


def test_the_pool_may_be_sized_when_the_size_of_a_block_is_known() -> None:
    asked: list[int] = []

    def blocks_for_a_budget(bytes_per_block: int) -> int:
        asked.append(bytes_per_block)
        return 300_000 // bytes_per_block

    executor = open_tiny(blocks_for_a_budget)
    assert asked == [executor.bytes_per_block]
    assert executor.spec.num_blocks == 300_000 // executor.bytes_per_block
    executor.close()
    with pytest.raises(ConfigurationError, match="no room for one block"):
        open_tiny(lambda bytes_per_block: 0)


@pytest.mark.parametrize("precision", ["auto", "u8", "f16", "f32"])
def test_kv_precisions(precision: str) -> None:
    """Each computes nearly the same logits, also when it reads back what an earlier step wrote."""
    executor, exact = open_tiny(kv_precision=precision), open_tiny()
    expected = logits_of(exact, (Story(1, PROMPT, [0, 1, 2]), None))
    story = Story(1, PROMPT, [7, 3, 5])
    Stepper(executor).step((story, 50))
    found = logits_of(executor, (story, None))
    assert np.abs(found - expected)[:, :VOCAB_SIZE].max() < (1e-4 if precision == "f32" else 0.2)
    assert executor.spec.kv_format.split("-")[1] in ((precision,) if precision != "auto" else ("u8", "f16", "f32"))
    assert executor.bytes_per_block <= exact.bytes_per_block
    executor.close()
    exact.close()


def test_a_precision_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bf16 is not offered here; choose one of auto, f32"):
        open_tiny(kv_precision="bf16")


def test_a_rows_logits_are_the_same_in_any_step(executor: OpenVINOExecutor) -> None:
    """DET-04: whole, in chunks, a single token alone, a single token beside others; over float32 weights but for rounding."""
    whole = logits_of(executor, (Story(1, PROMPT, [0, 1, 2]), None))[0, :VOCAB_SIZE]
    chunked, single, beside = (Story(i, PROMPT, [3 * i, 3 * i + 1, 3 * i + 2]) for i in (1, 2, 3))
    stepper = Stepper(executor)
    while chunked.num_computed < len(PROMPT) - 9:
        stepper.step((chunked, 9))
    stepper.step((single, len(PROMPT) - 1), (beside, len(PROMPT) - 1))
    other = Story(4, PROMPT[:20], [0])
    for found in (
        logits_of(executor, (chunked, None))[0],
        logits_of(executor, (single, None))[0],
        logits_of(executor, (other, None), (beside, None))[1],
    ):
        assert np.abs(found[:VOCAB_SIZE] - whole).max() < 1e-5


def test_bad_numbers_fail_their_row_alone() -> None:
    """INP-16: NaN logits are an error of that request; its neighbour gets the token that it gets alone."""
    executor = open_tiny(with_nan=True)
    expected = Stepper(executor).generate(Story(1, PROMPT, [0, 1, 2]), 1)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(repetition_penalty=1.5)):
        bad = Story(2, [5, NAN_TOKEN] * 10, [9], sampling).row()
        good = Story(1, PROMPT, [0, 1, 2]).row()
        result = executor.execute(StepPlan(1, [bad, good], len(bad.token_ids) + len(PROMPT)))
        assert result.tokens == {1: expected[0]}
        assert ErrorCode.from_wire(result.failures[2].code) is ErrorCode.EXECUTION_FAILED
    # The block goes to another sequence, which overwrites only a part of it: the rest must not count.
    short = Stepper(executor).generate(Story(3, PROMPT[:2], [8]), 3)
    assert Stepper(executor).generate(Story(4, PROMPT[:2], [9]), 3) == short
    executor.close()


def test_padding_rows_of_the_embedding_are_never_drawn(executor: OpenVINOExecutor) -> None:
    """GGU-10."""
    stepper = Stepper(executor)
    for seed in range(30):
        story = Story(seed, PROMPT[:3], [seed % 12], SamplingParams(temperature=2.0, seed=seed))
        assert max(stepper.generate(story, 2)) < VOCAB_SIZE


def test_storage_outlives_the_collector(executor: OpenVINOExecutor) -> None:
    """The device's tensors do not own the KV memory."""
    stepper, story = Stepper(executor), Story(1, PROMPT, [0, 1, 2])
    expected = logits_of(executor, (Story(2, PROMPT, [3, 4, 5]), None))
    stepper.step((story, 60))
    gc.collect()
    rubbish = [np.full(100_000, np.nan) for _ in range(50)]
    assert (logits_of(executor, (story, None)) == expected).all()
    del rubbish


def test_a_step_without_rows_only_forgets(executor: OpenVINOExecutor) -> None:
    stepper = Stepper(executor)
    story = Story(5, PROMPT[:4], [0], SamplingParams(repetition_penalty=1.2))
    stepper.step((story, None))
    assert executor._sampler.num_held == 1
    stepper.step(released=[5])
    assert executor._sampler.num_held == 0


def test_a_plan_that_would_write_outside_the_pool_raises(executor: OpenVINOExecutor) -> None:
    row = Story(1, PROMPT, [0, 1, 12]).row()
    with pytest.raises(ValueError, match="block id"):
        executor.execute(StepPlan(0, [row], len(PROMPT)))
    assert Stepper(executor).generate(Story(2, PROMPT, [0, 1, 2]), 1)  # and the next step works


def test_other_graphs_are_refused_with_what_is_wrong() -> None:
    graph = tiny_graph()
    next(port for port in graph.outputs if LOG_NORMALIZER in port.get_names()).set_names({"other"})
    next(port for port in graph.inputs if PAST_LENS in port.get_names()).set_names({"attention_mask"})
    with pytest.raises(ModelError, match=r"attention_mask, log_normalizer, past_lens"):
        OpenVINOExecutor.open(graph, MANIFEST, num_blocks=4)
    plain = ov.opset13.parameter([1], np.float32)
    with pytest.raises(ModelError, match="not a graph for paged attention"):
        OpenVINOExecutor.open(ov.Model([ov.opset13.relu(plain).output(0)], [plain]), MANIFEST, num_blocks=4)

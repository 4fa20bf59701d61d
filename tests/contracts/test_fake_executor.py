"""The fake executor keeps the executor contract, and finds every kind of wrong plan that it is there to find."""

import pytest

from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.step import StepFailure, StepPlan, StepRow
from headrace.testing import FakeExecutor, MemoryFault
from tests.contracts.executor_contract import ExecutorContract, MakeExecutor

SPEC = ExecutorSpec("model", "fake", 61, frozenset({1}), 256, 4, 16)


class TestFakeExecutor(ExecutorContract):
    @pytest.fixture
    def make_executor(self) -> MakeExecutor:
        return lambda: FakeExecutor(SPEC)


def row(
    request_id: int, history: list[int], start: int, block_ids: list[int], *, end: int | None = None, **changes: object
) -> StepRow:
    end = len(history) if end is None else end
    values = {
        "request_id": request_id,
        "token_ids": history[start:end],
        "start_position": start,
        "block_ids": block_ids,
        "samples": end == len(history),
        "sampling": SamplingParams(temperature=0.0),
        "history": history,
        "num_prompt_tokens": 1,
    }
    return StepRow(**(values | changes))  # type: ignore[arg-type]


def plan(step_id: int, *rows: StepRow, **changes: object) -> StepPlan:
    values = {"step_id": step_id, "rows": list(rows), "num_tokens": sum(len(r.token_ids) for r in rows)}
    return StepPlan(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def executor() -> FakeExecutor:
    """Request 1 has five tokens in blocks 3 and 5."""
    executor = FakeExecutor(SPEC)
    executor.execute(plan(0, row(1, [7, 8, 9, 10, 11], 0, [3, 5])))
    return executor


LONG = [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (plan(1, row(1, LONG, 5, [5, 3])), "should hold"),  # blocks in the wrong order
        (plan(1, row(1, LONG, 5, [3, 6])), "holds nothing"),  # a block never written
        (plan(1, row(1, [7, 8, 9, 10, 4, 12], 5, [3, 5])), "should hold"),  # another history
        (plan(1, row(2, [4, 8, 9, 10, 6], 4, [3, 6])), "should hold"),  # a share that is no prefix
        (plan(1, row(2, LONG, 4, [3, 5])), "which request 1 reads"),  # writes what a live request reads
        (plan(1, row(2, [4, 4], 0, [9]), row(3, [5, 5], 0, [9])), "both write"),
        (plan(1, row(2, [4, 4], 0, [9]), row(2, [5, 5], 0, [8])), "two rows"),
        (plan(1, row(2, [4, 4], 0, [9], token_ids=[4, 5])), "not those of its history"),
        (plan(1, row(2, [4, 4], 0, [9], samples=False)), "samples is"),
        (plan(1, row(2, [4, 4], 0, [9], end=1, samples=True)), "samples is"),
        (plan(1, row(2, [4] * 5, 0, [9])), "do not cover"),
        (plan(1, row(2, [4] * 5, 0, [9, 9])), "block table"),
        (plan(1, row(2, [4], 0, [16])), "block table"),
        (plan(1, row(2, [4], 0, [9], num_prompt_tokens=2)), "prompt tokens"),
        (plan(1, row(2, [4], 0, [9]), num_tokens=2), "another sum"),
        (plan(0, row(2, [4], 0, [9])), "after step"),
        (plan(1, row(2, [4], 0, [9], forbidden_token_ids=range(61))), "every token"),
    ],
)
def test_a_wrong_plan_is_found(executor: FakeExecutor, bad: StepPlan, says: str) -> None:
    with pytest.raises(MemoryFault, match=says):
        executor.execute(bad)


def test_equal_tokens_after_another_prefix_are_no_match(executor: FakeExecutor) -> None:
    """What a real KV entry would tell: the same token id in the slot does not make it the same context."""
    executor.execute(plan(1, row(2, [9, 9, 9, 9, 11], 0, [8, 9])))
    with pytest.raises(MemoryFault, match="holds token 11 of"):
        executor.execute(plan(2, row(3, [7, 8, 9, 10, 11, 5], 5, [3, 9])))


def test_a_released_requests_slots_may_be_written(executor: FakeExecutor) -> None:
    executor.execute(plan(1, row(2, [4] * 5, 0, [5, 3]), released_ids=[1]))
    assert executor.live_request_ids == {2}


def test_what_fails_is_as_told(executor: FakeExecutor) -> None:
    failure = StepFailure("execution_failed", "told to")
    executor.failing[1] = failure
    result = executor.execute(plan(1, row(1, LONG, 5, [3, 5]), row(2, [4], 0, [9])))
    assert result.failures == {1: failure}
    assert set(result.tokens) == {2}
    executor.fail_next_step = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        executor.execute(plan(2, row(2, [4], 0, [9])))
    executor.execute(plan(3, row(2, [4], 0, [9])))
    executor.close()
    with pytest.raises(MemoryFault, match="after close"):
        executor.execute(plan(4, row(2, [4], 0, [9])))


def test_the_seed_counts_only_when_drawing(executor: FakeExecutor) -> None:
    """Different seeds give different tokens somewhere, and never when greedy."""

    def draw(step_id: int, temperature: float) -> int:
        sampling = SamplingParams(temperature=temperature, seed=step_id)
        drawing = row(step_id, LONG, 5, [3, 5], sampling=sampling)
        return executor.execute(plan(step_id, drawing, released_ids=[step_id - 1])).tokens[step_id]

    executor.execute(plan(1, row(1, [4], 0, [9])))
    assert len({draw(step_id, 1.0) for step_id in range(2, 12)}) > 5
    assert len({draw(step_id, 0.0) for step_id in range(12, 22)}) == 1


def test_the_plan_is_seen_before_it_is_executed() -> None:
    seen: list[int] = []
    FakeExecutor(SPEC, on_step=lambda p: seen.append(p.step_id)).execute(plan(4, row(1, [4], 0, [9])))
    assert seen == [4]

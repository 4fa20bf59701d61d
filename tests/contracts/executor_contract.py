"""What every Executor must do. A test class inherits ExecutorContract and gives the fixture `make_executor`.

The fixture is a function without arguments that returns a fresh executor with at least 16 blocks of 4 or more tokens, and a
vocabulary of at least 16; one is like another. Tokens are compared exactly: an executor whose arithmetic depends on the form of
a batch must be given a model in which no two candidates are close, or the precision that makes it so.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from headrace.protocol.ports import Executor, ExecutorSpec
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.step import StepPlan, StepResult, StepRow

MakeExecutor = Callable[[], Executor]
GREEDY = SamplingParams(temperature=0.0)


class Story:
    """A sequence as its caller keeps it: tokens, block table, and how much is computed."""

    def __init__(
        self, request_id: int, prompt: Sequence[int], block_ids: Iterable[int], sampling: SamplingParams = GREEDY
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(self.tokens)
        self.block_ids = list(block_ids)
        self.sampling = sampling
        self.num_computed = 0
        self.forbidden: tuple[int, ...] = ()

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def row(self, max_tokens: int | None = None) -> StepRow:
        """As many of the remaining tokens as allowed."""
        end = len(self.tokens) if max_tokens is None else min(len(self.tokens), self.num_computed + max_tokens)
        return StepRow(
            request_id=self.request_id,
            token_ids=self.tokens[self.num_computed : end],
            start_position=self.num_computed,
            block_ids=self.block_ids,
            samples=end == len(self.tokens),
            sampling=self.sampling,
            history=self.tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            forbidden_token_ids=self.forbidden,
        )


class Stepper:
    """Runs plans and applies them to the stories; checks what every result must satisfy."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.spec: ExecutorSpec = executor.spec
        self.num_steps = 0

    def step(self, *rows: tuple[Story, int | None], released: Iterable[int] = ()) -> StepResult:
        """One step over (story, most tokens); drawn tokens are appended to their stories."""
        step_rows = [story.row(max_tokens) for story, max_tokens in rows]
        plan = StepPlan(self.num_steps, step_rows, sum(len(row.token_ids) for row in step_rows), list(released))
        self.num_steps += 1
        result = self.executor.execute(plan)
        assert result.step_id == plan.step_id
        assert not result.failures
        assert set(result.tokens) == {row.request_id for row in step_rows if row.samples}
        assert all(0 <= token < self.spec.vocab_size for token in result.tokens.values())
        assert result.forward_ns >= 0
        assert result.sample_ns >= 0
        for (story, _), row in zip(rows, step_rows, strict=True):
            story.num_computed += len(row.token_ids)
            if row.samples:
                story.tokens.append(int(result.tokens[row.request_id]))
        return result

    def generate(self, story: Story, num_tokens: int, max_chunk: int | None = None) -> list[int]:
        """Step this story alone until it has so many output tokens."""
        while len(story.output) < num_tokens:
            self.step((story, max_chunk))
        return story.output


class ExecutorContract:
    """Inherit, and define the fixture `make_executor`."""

    @pytest.fixture
    def stepper(self, make_executor: MakeExecutor) -> Iterator[Stepper]:
        executor = make_executor()
        yield Stepper(executor)
        executor.close()

    @pytest.fixture
    def prompt(self, stepper: Stepper) -> list[int]:
        """Two full blocks and a bit."""
        spec = stepper.spec
        ordinary = [token for token in range(spec.vocab_size) if token not in spec.eos_token_ids]
        return [ordinary[(3 + 7 * index) % len(ordinary)] for index in range(2 * spec.block_size + 3)]

    @pytest.fixture
    def expected(self, make_executor: MakeExecutor, prompt: list[int]) -> list[int]:
        """Six greedy tokens after the prompt, computed whole and alone."""
        executor = make_executor()
        output = Stepper(executor).generate(Story(1, prompt, range(4)), 6)
        executor.close()
        return output

    def test_spec_is_constant_and_usable(self, stepper: Stepper) -> None:
        spec = stepper.spec
        assert stepper.executor.spec == spec
        assert min(spec.vocab_size, spec.max_model_len, spec.block_size, spec.num_blocks) > 0
        assert spec.model_id
        assert spec.kv_format
        assert all(0 <= token < spec.vocab_size for token in spec.eos_token_ids)

    @pytest.mark.parametrize("max_chunk", [1, 2, 7, 10_000])
    def test_chunks_give_the_tokens_of_the_whole(
        self, stepper: Stepper, prompt: list[int], expected: list[int], max_chunk: int
    ) -> None:
        assert stepper.generate(Story(5, prompt, [7, 2, 9, 4]), 6, max_chunk) == expected

    def test_tokens_once_drawn_may_be_computed_as_a_prompt(
        self, stepper: Stepper, prompt: list[int], expected: list[int]
    ) -> None:
        """As after a preemption: prompt and output are computed anew, in other blocks, and the next token is the same."""
        story = Story(1, prompt, range(4))
        stepper.generate(story, 4)
        story.num_computed = 0
        story.block_ids = [8, 6, 10, 5]
        assert stepper.generate(story, 6) == expected

    def test_rows_of_a_step_do_not_disturb_one_another(self, stepper: Stepper, prompt: list[int], expected: list[int]) -> None:
        """One is computed whole and then token by token, another in chunks beside it, their blocks interleaved."""
        first = Story(1, prompt, [0, 2, 4, 6, 8])
        second = Story(2, prompt[::-1], [1, 3, 5, 7, 9])
        while len(first.output) < 6 or len(second.output) < 6:
            stepper.step((second, stepper.spec.block_size), (first, None))
        assert first.output[:6] == expected
        other = Story(3, prompt[::-1], [8, 0, 6, 2, 4])  # where the first one was
        stepper.step((other, None), released=[first.request_id])
        assert stepper.generate(other, 6) == second.output[:6]

    def test_order_of_rows_does_not_matter(self, stepper: Stepper, prompt: list[int]) -> None:
        stories = {
            request_id: Story(request_id, prompt[request_id:], range(4 * request_id, 4 * request_id + 4))
            for request_id in (0, 1, 2)
        }
        copies = {request_id: Story(10 + request_id, story.tokens, story.block_ids) for request_id, story in stories.items()}
        for _ in range(3):
            stepper.step(*((stories[i], None) for i in (0, 1, 2)))
        stepper.step((copies[0], None), released=[0, 1, 2])
        stepper.step((copies[2], None), (copies[1], None), (copies[0], None))
        stepper.step((copies[1], None), (copies[0], None), (copies[2], None))
        stepper.step((copies[2], None), (copies[1], None))
        assert [copy.output for copy in copies.values()] == [story.output for story in stories.values()]

    def test_shared_full_blocks_are_read(self, stepper: Stepper, prompt: list[int], expected: list[int]) -> None:
        """A prefix-cache hit: the second sequence holds the first one's full blocks and computes only what follows."""
        size = stepper.spec.block_size
        first = Story(1, prompt, [3, 8, 1, 6])
        stepper.generate(first, 2)
        second = Story(2, prompt, [3, 8, 11, 5])
        second.num_computed = 2 * size
        third = Story(3, prompt[: size + 2], [3, 9, 12])
        third.num_computed = size
        for _ in range(4):
            stepper.step((first, None), (second, None), (third, None))
        assert second.output == first.output[:4] == expected[:4]
        fresh = Story(4, prompt[: size + 2], [0, 2, 13])
        assert third.output == stepper.generate(fresh, 4)

    def test_the_block_table_is_read_anew_in_each_step(self, stepper: Stepper, prompt: list[int], expected: list[int]) -> None:
        """INV-14: equal full blocks may be exchanged between steps, the list itself staying the same object."""
        first, second = Story(1, prompt, [0, 1, 2, 3]), Story(2, prompt, [4, 5, 6, 7])
        stepper.step((first, None), (second, None))
        second.block_ids[:2] = first.block_ids[:2]
        blind = Story(3, prompt[::-1], [4, 5, 8, 9])  # overwrites what the second one held
        for _ in range(5):
            stepper.step((first, None), (second, None), (blind, None))
        assert first.output == second.output == expected

    def test_rows_that_do_not_sample_give_no_token(self, stepper: Stepper, prompt: list[int]) -> None:
        """Neither alone in a step nor beside one that samples."""
        first, second = Story(1, prompt, [0, 1, 2]), Story(2, prompt[:4], [3, 4])
        assert stepper.step((first, 2)).tokens == {}
        assert set(stepper.step((first, 2), (second, None)).tokens) == {2}

    def test_forbidden_tokens_are_not_drawn(self, stepper: Stepper, prompt: list[int], expected: list[int]) -> None:
        story = Story(1, prompt, range(4))
        story.forbidden = (expected[0],)
        assert stepper.generate(story, 1)[0] != expected[0]
        drawn = Story(2, prompt, range(4, 8), SamplingParams(temperature=1.0, seed=1))
        drawn.forbidden = tuple(token for token in range(stepper.spec.vocab_size) if token != expected[0])
        assert stepper.generate(drawn, 1) == expected[:1]

    def test_a_drawn_token_depends_on_seed_and_context_alone(self, stepper: Stepper, prompt: list[int]) -> None:
        """The same (seed, position) gives the same token alone, in a batch and after chunks; greedy ignores the seed."""
        warm = SamplingParams(temperature=1.0, seed=1234)
        alone = stepper.generate(Story(1, prompt, range(4), warm), 5)
        stories = [
            Story(2, prompt, range(4, 8), warm),
            Story(3, prompt[::-1], range(8, 12), SamplingParams(temperature=1.0, seed=9)),
        ]
        while len(stories[0].output) < 5:
            stepper.step((stories[1], 4), (stories[0], 5), released=[1] if stepper.num_steps == 5 else [])
        assert stories[0].output[:5] == alone
        seeded = Story(4, prompt, range(4), SamplingParams(temperature=0.0, seed=77))
        stepper.step((seeded, None), released=[2, 3])
        assert seeded.output == stepper.generate(Story(5, prompt, range(4, 8)), 1)

    def test_a_released_request_may_be_followed_by_one_with_its_id(
        self, stepper: Stepper, prompt: list[int], expected: list[int]
    ) -> None:
        """Nothing of the earlier one is left: not its tokens, not its counts."""
        stepper.generate(Story(1, prompt[::-1], range(4)), 3)
        again = Story(1, prompt, range(4))
        stepper.step((again, None), released=[1])
        assert stepper.generate(again, 6) == expected

    def test_releasing_unknown_requests_is_fine(self, stepper: Stepper, prompt: list[int]) -> None:
        stepper.step((Story(1, prompt, range(4)), None), released=[99, 99])

    def test_close_may_be_called_twice(self, make_executor: MakeExecutor) -> None:
        executor = make_executor()
        executor.close()
        executor.close()

"""The simulated model: its time, its text, its ends and its faults. Time is a number that the sleeps move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.executors.simulated import MAX_OVERSLEPT_NS, SimulatedExecutor, SimulatedModel
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.step import StepPlan, StepResult, StepRow
from tests.executors.sampling_rows import sampling_row
from tests.executors.tiny_graph import MANIFEST

WORDS = list(range(10, 200))
EOS = 1


class Time:
    def __init__(self) -> None:
        self.now_ns = 0
        self.sleeps: list[float] = []
        self.too_long_seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_ns += round((seconds + self.too_long_seconds) * 1e9)


def make(text: str = "", time: Time | None = None) -> SimulatedExecutor:
    time = time or Time()
    return SimulatedExecutor.from_spec(text, MANIFEST, WORDS, now_ns=lambda: time.now_ns, sleep=time.sleep)


def step(executor: SimulatedExecutor, *rows: StepRow, released: tuple[int, ...] = ()) -> StepResult:
    return executor.execute(StepPlan(0, list(rows), sum(len(row.token_ids) for row in rows), list(released)))


def generate(executor: SimulatedExecutor, prompt: tuple[int, ...], num_tokens: int, **sampling: object) -> list[int]:
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(step(executor, sampling_row(1, prompt=prompt, output=tuple(output), **sampling)).tokens[1])
    return output


def test_a_step_takes_what_the_formula_says() -> None:
    time = Time()
    executor = make("sim:step_ms=4,token_us=100,row_us=10,kv_ns=1000", time)
    result = step(executor, sampling_row(1, prompt=(5,) * 30), sampling_row(2, prompt=(6,) * 20))
    seconds = 0.004 + 2 * 100e-6 + 2 * 10e-6 + (30 + 20) * 1e-6
    assert time.sleeps == [pytest.approx(seconds)]
    assert result.forward_ns == pytest.approx(seconds * 1e9)
    assert SimulatedModel.parse("step_ms=4,token_us=100,row_us=10,kv_ns=1000").seconds(2, 2, 50) == pytest.approx(seconds)


def test_a_sleep_that_was_too_long_shortens_the_next() -> None:
    """Steps keep their mean time on a machine whose timers are late, but do not make up for a long standstill."""
    time = Time()
    executor = make("sim:step_ms=4,token_us=0", time)
    time.too_long_seconds = 0.001
    step(executor, sampling_row())
    time.too_long_seconds = 5.0
    step(executor, sampling_row())
    step(executor, sampling_row())
    assert time.sleeps == [pytest.approx(0.004), pytest.approx(0.003), pytest.approx(0.004 - MAX_OVERSLEPT_NS / 1e9)]


def test_nothing_to_do_takes_no_time() -> None:
    time = Time()
    assert make(time=time).execute(StepPlan(9, [], 0, [1])) == StepResult(9, {})
    assert time.sleeps == []


@given(st.lists(st.integers(0, 319), min_size=1, max_size=20), st.integers(0, 2**63 - 1))
def test_text_is_a_function_of_prompt_seed_and_position(prompt: list[int], seed: int) -> None:
    """Alone, beside others, in another executor, after a start in the middle (as after a preemption or a crash)."""
    executor = make()
    alone = generate(executor, tuple(prompt), 4, seed=seed)
    row = sampling_row(7, prompt=tuple(prompt), output=tuple(alone[:2]), seed=seed)
    beside = step(make(), sampling_row(3, prompt=(9,), seed=seed), row, sampling_row(4, prompt=(8, 8)))
    assert beside.tokens[7] == alone[2]
    assert set(alone) <= set(WORDS)


def test_seed_prompt_and_salt_change_the_text_and_greedy_ignores_the_seed() -> None:
    texts = {
        tuple(generate(make(text), prompt, 12, seed=seed))
        for text in ("", "salt=1")
        for prompt in ((5, 6), (5, 6, 7), (6, 5))
        for seed in (0, 1, 2)
    }
    assert len(texts) == 18
    for greedy in ({"temperature": 0.0}, {"top_k": 1}):
        assert len({tuple(generate(make(), (5, 6), 12, seed=seed, **greedy)) for seed in range(5)}) == 1


def test_a_row_that_does_not_sample_gives_nothing() -> None:
    row = sampling_row(1, prompt=(5, 6, 7))
    part = StepRow(1, [5, 6], 0, [0], False, row.sampling, row.history, 3)
    assert step(make(), part).tokens == {}


def test_ends_around_the_length_asked_for_and_nowhere_else() -> None:
    lengths = []
    for request in range(40):
        output = generate(make("output_tokens=10"), (request,), 15)
        assert EOS in output
        lengths.append(output.index(EOS) + 1)
        assert output.count(EOS) == 1  # ignore_eos goes on with words
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(set(lengths)) > 5
    assert EOS not in generate(make(), (3,), 50)


def test_a_forbidden_end_comes_as_soon_as_it_may() -> None:
    executor = make("output_tokens=4")
    output: list[int] = []
    while len(output) < 10:
        forbidden = (EOS,) if len(output) < 8 else ()
        output.append(step(executor, sampling_row(1, prompt=(3,), output=tuple(output), forbidden=forbidden)).tokens[1])
    assert output.index(EOS) == 8


def test_forbidden_words_are_passed_over() -> None:
    executor = make()
    free = generate(executor, (3,), 1)[0]
    assert step(executor, sampling_row(1, prompt=(3,), forbidden=(free,))).tokens[1] in set(WORDS) - {free}
    assert set(step(executor, sampling_row(1, prompt=(3,), forbidden=tuple(WORDS))).failures) == {1}


def test_faults_are_where_they_are_asked_for() -> None:
    executor = make("fail_after_tokens=2")
    assert len(generate(executor, (3,), 2)) == 2
    result = step(executor, sampling_row(1, prompt=(3,), output=(10, 11)), sampling_row(2, prompt=(4,)))
    assert set(result.failures) == {1}
    assert set(result.tokens) == {2}
    half = make("fail_after_tokens=0,fail_rate=0.5")
    failures = step(half, *(sampling_row(i, prompt=(i,)) for i in range(200))).failures
    assert 60 < len(failures) < 140
    stumbling = make("fail_step_every=3")
    for _ in range(2):
        step(stumbling, sampling_row())
        step(stumbling, sampling_row())
        with pytest.raises(RuntimeError, match="fail_step_every"):
            step(stumbling, sampling_row())


def test_released_requests_are_forgotten() -> None:
    """An id that comes again with another prompt gets that prompt's text."""
    executor = make()
    generate(executor, (3,), 1)
    other = step(executor, sampling_row(1, prompt=(4,)), released=(1,)).tokens
    assert other == step(make(), sampling_row(1, prompt=(4,))).tokens


def test_the_spec_is_made_of_parameters_and_tokenizer() -> None:
    spec = make("sim:num_blocks=7,block_size=16,max_model_len=99,salt=5").spec
    assert (spec.num_blocks, spec.block_size, spec.max_model_len) == (7, 16, 99)
    assert (spec.vocab_size, spec.eos_token_ids) == (MANIFEST.vocab_size, frozenset({EOS}))
    assert make().spec.max_model_len == MANIFEST.max_model_len
    assert spec.model_id != make().spec.model_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sim:stepms=5", "there are step_ms, token_us"),
        ("sim:step_ms=fast", "a number, not 'fast'"),
        ("sim:num_blocks=1.5", "a whole number"),
        ("sim:num_blocks", "a whole number"),
        ("sim:num_blocks=0", "between 1 and"),
        ("sim:num_blocks=999999999999", "between 1 and 10000000"),
        ("sim:step_ms=-1", "at least 0"),
        ("sim:step_ms=nan", "at least 0"),
        ("sim:step_ms=inf", "at least 0"),
        ("sim:fail_after_tokens=1,fail_rate=2", "between 0 and 1"),
        ("sim:fail_rate=0.5", "needs fail_after_tokens"),
        ("sim:step_ms=1,step_ms=2", "given twice"),
    ],
)
def test_parameters_that_cannot_be_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(text)


@pytest.mark.parametrize("words", [[], [1, 2], [5, 320], [-1]])
def test_words_that_cannot_be_are_refused(words: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="word"):
        SimulatedExecutor.from_spec("", MANIFEST, words)

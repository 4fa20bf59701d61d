"""The step-time model: it finds the coefficients, follows changes, is not upset by pauses, and its inverse keeps the budget."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.errors import ConfigurationError
from headrace.scheduling.step_time import StepShape, StepTimeModel, StepTimePrior, prefill_pairs

TRUE = StepTimePrior(8e6, 0.9e6, 0.25e6, 1500.0, 60.0)


def draw_shape(rng: random.Random) -> StepShape:
    """A step as a busy server has it: up to 8 streams, half of the steps with a chunk at some position."""
    num_rows = rng.randint(0, 8)
    num_tokens = rng.choice([16, 32, 64, 128, 256]) if rng.random() < 0.5 else 0
    start = rng.choice([0, 256, 1024, 4096])
    num_context_tokens = num_rows * rng.randint(10, 4000)
    return StepShape(num_rows, num_tokens, num_context_tokens, prefill_pairs(start, num_tokens))


def duration_ns(truth: StepTimePrior, shape: StepShape) -> float:
    features = (1, shape.num_decode_rows, shape.num_prefill_tokens, shape.num_context_tokens, shape.num_prefill_pairs)
    return sum(weight * value for weight, value in zip(truth.coefficients, features, strict=True))


def scaled(truth: StepTimePrior, factor: float) -> StepTimePrior:
    return StepTimePrior(*(factor * value for value in truth.coefficients))


def teach(model: StepTimeModel, truth: StepTimePrior, rng: random.Random, num_steps: int, noise: float) -> None:
    for _ in range(num_steps):
        shape = draw_shape(rng)
        model.observe(shape, round(max(0.0, duration_ns(truth, shape) * (1 + rng.gauss(0, noise)))))


def worst_prediction(model: StepTimeModel, truth: StepTimePrior, rng: random.Random) -> float:
    shapes = [draw_shape(rng) for _ in range(200)]
    return max(abs(model.predict(shape) / duration_ns(truth, shape) - 1) for shape in shapes)


@pytest.mark.parametrize("seed", range(4))
def test_known_coefficients_are_found_under_noise(seed: int) -> None:
    rng = random.Random(seed)
    model = StepTimeModel()
    teach(model, TRUE, rng, 4000, noise=0.03)
    for found, true in zip(model.coefficients_ns, TRUE.coefficients, strict=True):
        assert found == pytest.approx(true, rel=0.05)
    assert model.error_ratio == pytest.approx(0.03 * 0.8, rel=0.6)  # mean size of a normal error: 0.8 of its deviation


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_lasting_change_is_followed(factor: float) -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    teach(model, TRUE, rng, 2000, noise=0.03)
    changed = scaled(TRUE, factor)
    assert worst_prediction(model, changed, rng) > 0.5
    teach(model, changed, rng, 400, noise=0.03)
    assert worst_prediction(model, changed, rng) < 0.15


def test_paused_steps_do_not_count() -> None:
    rng = random.Random(6)
    model = StepTimeModel()
    teach(model, TRUE, rng, 1500, noise=0.02)
    for _ in range(40):
        shape = draw_shape(rng)
        model.observe(shape, round(100 * duration_ns(TRUE, shape)))
        teach(model, TRUE, rng, 30, noise=0.02)
    assert worst_prediction(model, TRUE, rng) < 0.05


def test_what_steps_do_not_tell_stands_still() -> None:
    """An hour of streams alone: what a prompt token costs is not forgotten, and nothing underflows into nonsense."""
    rng = random.Random(7)
    model = StepTimeModel()
    teach(model, TRUE, rng, 2000, noise=0.02)
    before = model.coefficients_ns[2]
    for _ in range(60_000):
        num_rows = rng.randint(1, 8)
        shape = StepShape(num_rows, 0, 700 * num_rows)
        model.observe(shape, round(duration_ns(TRUE, shape)))
    assert model.coefficients_ns[2] == pytest.approx(before, rel=0.1)
    assert model.confidence < 0.1  # and it says that this is a memory
    teach(model, TRUE, rng, 500, noise=0.02)
    assert model.coefficients_ns[2] == pytest.approx(TRUE.prefill_token_ns, rel=0.1)


def test_a_slowdown_seen_in_streams_alone_does_not_make_prompts_seem_cheaper() -> None:
    rng = random.Random(8)
    model = StepTimeModel()
    teach(model, TRUE, rng, 2000, noise=0.02)
    before = model.coefficients_ns[2]
    for factor, num_steps in ((1.0, 8000), (2.5, 3000)):
        for _ in range(num_steps):
            num_rows = rng.randint(1, 8)
            shape = StepShape(num_rows, 0, num_rows * rng.randint(10, 4000))
            model.observe(shape, round(factor * duration_ns(TRUE, shape)))
    assert model.predict(StepShape(4, 0, 4000)) == pytest.approx(2.5 * duration_ns(TRUE, StepShape(4, 0, 4000)), rel=0.02)
    assert model.coefficients_ns[2] == pytest.approx(before, rel=0.1)


def test_long_noisy_steps_do_not_blur_short_ones() -> None:
    """Errors count in proportion: a third of the steps take a hundred times as long as the others, give or take a tenth."""
    rng = random.Random(9)
    model = StepTimeModel()
    for _ in range(4000):
        shape = draw_shape(rng)
        if rng.random() < 0.3:
            shape = StepShape(rng.randint(0, 8), 2048, 0, prefill_pairs(8192, 2048))
        model.observe(shape, round(max(0.0, duration_ns(TRUE, shape) * (1 + rng.gauss(0, 0.1)))))
    for num_rows in (0, 1, 4, 8):
        shape = StepShape(num_rows, 0, 500 * num_rows)
        assert model.predict(shape) == pytest.approx(duration_ns(TRUE, shape), rel=0.04)


def test_a_constant_batch_is_predicted_although_its_parts_cannot_be_told_apart() -> None:
    model = StepTimeModel()
    for index in range(2000):
        shape = StepShape(4, 0, 4 * (500 + index))
        model.observe(shape, round(duration_ns(TRUE, shape)))
    shape = StepShape(4, 0, 4 * 2500)
    assert model.predict(shape) == pytest.approx(duration_ns(TRUE, shape), rel=0.03)


SHAPES = st.builds(StepShape, st.integers(0, 512), st.integers(0, 8192), st.integers(0, 10**8), st.integers(0, 10**9))


@given(st.lists(st.tuples(SHAPES, st.integers(0, 10**12)), max_size=60), SHAPES)
def test_whatever_it_is_told_it_predicts_a_finite_time_that_is_not_negative(
    steps: list[tuple[StepShape, int]], shape: StepShape
) -> None:
    model = StepTimeModel()
    for step, duration in steps:
        model.observe(step, duration)
    assert 0 <= model.predict(shape) < 10**30
    assert all(value >= 0 for value in model.coefficients_ns)
    assert 0 < model.error_ratio < 10**6
    assert 0 <= model.confidence < 1


@given(
    st.tuples(*[st.floats(0, 1e7)] * 2, st.floats(1, 1e7), *[st.floats(0, 1e4)] * 2),
    st.integers(0, 64),
    st.integers(0, 10**6),
    st.integers(0, 20_000),
    st.integers(0, 10**9),
    st.integers(0, 4096),
)
def test_the_largest_prefill_keeps_the_budget_and_one_more_token_does_not(
    prior: tuple[float, float, float, float, float],
    num_rows: int,
    num_context_tokens: int,
    start: int,
    budget_ns: int,
    max_tokens: int,
) -> None:
    model = StepTimeModel(StepTimePrior(*prior))
    decode = StepShape(num_rows, 0, num_context_tokens)

    def predicted(num_tokens: int) -> int:
        return model.predict(StepShape(num_rows, num_tokens, num_context_tokens, prefill_pairs(start, num_tokens)))

    found = model.largest_prefill(decode, budget_ns=budget_ns, start_position=start, max_tokens=max_tokens)
    assert 0 <= found <= max_tokens
    rounding_ns = 2 + budget_ns * 1e-9
    if found:
        assert predicted(found) <= budget_ns + rounding_ns
    if found < max_tokens:
        assert predicted(found + 1) > budget_ns - rounding_ns


@pytest.mark.parametrize(("num_tokens", "start"), [(1, 0), (7, 0), (100, 3), (64, 4096)])
def test_the_largest_prefill_is_exact(num_tokens: int, start: int) -> None:
    model = StepTimeModel(StepTimePrior(0, 0, 8, 0, 1024))
    budget_ns = model.predict(StepShape(0, num_tokens, 0, prefill_pairs(start, num_tokens)))
    decode = StepShape(0, 0, 0)
    for spare_ns, expected in ((0, num_tokens), (1, num_tokens), (-1, num_tokens - 1)):
        found = model.largest_prefill(decode, budget_ns=budget_ns + spare_ns, start_position=start, max_tokens=1000)
        assert found == expected


def test_the_prior_alone_speaks_at_first() -> None:
    model = StepTimeModel(TRUE)
    assert model.coefficients_ns == TRUE.coefficients
    assert model.confidence == 0
    shape = StepShape(3, 64, 900, prefill_pairs(128, 64))
    assert model.predict(shape) == round(duration_ns(TRUE, shape))
    for _ in range(40):
        model.observe(shape, model.predict(shape))
    assert 0.8 < model.confidence < 1
    assert model.predict(shape) == pytest.approx(duration_ns(TRUE, shape), rel=0.001)


def test_pairs_are_those_of_causal_attention() -> None:
    assert prefill_pairs(0, 1) == 1
    assert prefill_pairs(10, 3) == 11 + 12 + 13
    assert prefill_pairs(7, 5) + prefill_pairs(12, 4) == prefill_pairs(7, 9)


def test_impossible_times_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        StepTimePrior(prefill_token_ns=0)
    with pytest.raises(ConfigurationError):
        StepTimePrior(base_ns=-1)
    with pytest.raises(ConfigurationError):
        StepTimePrior(base_ns=float("nan"))
    with pytest.raises(ValueError, match="cannot have taken"):
        StepTimeModel().observe(StepShape(1, 0, 1), -1)

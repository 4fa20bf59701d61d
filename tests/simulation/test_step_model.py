import numpy as np
import pytest

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import RecordStep
from headrace.simulation.step_model import StepModel, fit_steps, non_negative_least_squares


def step(at_us: int, duration_us: float, decode: int, prefill: int, context: int, running: int = 0) -> RecordStep:
    return RecordStep(
        at_us=at_us, epoch=1, duration_us=round(duration_us), forward_us=0, sample_us=0, decode_rows=decode,
        prefill_rows=int(prefill > 0), prefill_tokens=prefill, context_tokens=context, running=running, waiting=0,
    )  # fmt: skip


def recorded(model: StepModel, num_steps: int, noise: float, between_us: int = 0) -> list[RecordStep]:
    source = np.random.default_rng(3)
    steps, at_us = [], 0
    for number in range(num_steps):
        decode, prefill = int(source.integers(0, 33)), int(source.integers(0, 200)) * (number % 3 == 0)
        context = prefill + int(source.integers(0, 2000)) * decode
        if decode + prefill == 0:
            continue
        duration = model.duration_ns(decode, prefill, context) / 1e3 * (1 + noise * source.standard_normal())
        steps.append(step(at_us, duration, decode, prefill, context, running=1))
        at_us += round(duration) + between_us
    return steps


def test_a_duration_is_the_sum_of_its_terms() -> None:
    model = StepModel(step_ms=2, row_us=30, token_us=50, kv_ns=7, between_us=11)
    assert model.duration_ns(4, 100, 1000) == 2_000_000 + 4 * 30_000 + 100 * 50_000 + 1000 * 7 + 11_000


def test_parsing_takes_what_is_named_and_nothing_else() -> None:
    assert StepModel.parse("step_ms=20, kv_ns=3") == StepModel(step_ms=20, row_us=0, token_us=0, kv_ns=3, between_us=0)
    for text, word in (
        ("step=1", "no parameter 'step'"), ("step_ms=x", "must be a number"), ("step_ms=1,step_ms=2", "twice"),
        ("step_ms=-1", "between 0 and 1000000"), ("step_ms=nan", "not nan"), ("token_us=5", "must take time"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=word):
            StepModel.parse(text)


def test_a_fit_finds_the_coefficients_under_noise() -> None:
    true = StepModel(step_ms=12, row_us=800, token_us=350, kv_ns=400)
    fit = fit_steps(recorded(true, 3000, noise=0.03, between_us=120))
    for name in ("step_ms", "row_us", "token_us", "kv_ns"):
        assert getattr(fit.model, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert fit.model.between_us == pytest.approx(120, abs=1)
    assert fit.mean_error == pytest.approx(0.03 * (2 / np.pi) ** 0.5, rel=0.15)  # mean of |noise|
    assert fit.total_ratio == pytest.approx(1.0, abs=0.01)
    assert fit.r_squared > 0.98


def test_a_fit_never_goes_below_zero() -> None:
    """Durations that fall with the context would want a negative kv_ns."""
    steps = [step(i * 50_000, 20_000 - number, number % 7 + 1, 0, number * 10) for i, number in enumerate(range(100))]
    model = fit_steps(steps).model
    assert min(model.step_ms, model.row_us, model.token_us, model.kv_ns) >= 0
    assert model.kv_ns == 0


def test_constrained_least_squares_is_at_least_as_good_as_any_grid_point() -> None:
    source = np.random.default_rng(1)
    columns, values = source.normal(size=(40, 3)), source.normal(size=40)
    found = non_negative_least_squares(columns, values)
    assert (found >= 0).all()
    best = float(((columns @ found - values) ** 2).sum())
    grid = np.linspace(0, 1, 11)
    for point in np.array(np.meshgrid(grid, grid, grid)).reshape(3, -1).T:
        assert best <= float(((columns @ point - values) ** 2).sum()) + 1e-9


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(ConfigurationError, match="20 recorded steps"):
        fit_steps(recorded(StepModel(), 10, 0.0))

"""How long a step takes: a line in what the step holds, given or fitted from a recorded run.

Owns: StepModel, fit_steps. Runs in: simulator. Must not know: schedulers, files.

    step_ms/1e3 + row_us/1e6 * decode rows + token_us/1e6 * prefill tokens + kv_ns/1e9 * context tokens      seconds,

and `between_us` more until the next step can begin. Decode rows compute one token; prefill tokens are those of all other rows;
context tokens are what all rows read, their own tokens included. The model has no term for prefill tokens times context, by
which very long prompts cost more, nor for how evenly rows are long.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import RecordStep
from headrace.simulation.limits import RANGES, check_range

MIN_FITTED_STEPS = 20
MIN_R_SQUARED = 0.5  # of a fit that nobody need be warned of
MAX_MEAN_ERROR = 0.3
_NS_PER_US, _NS_PER_MS = 1e3, 1e6
Floats = npt.NDArray[np.float64]


class StepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Coefficients, named and measured as in `--model sim:...`; there, though, a decode row costs row_us + token_us.

    The default is an example, of the size of a small model on a few CPU cores: 15 ms for a step, 0.5 ms more for each stream in
    it and 0.4 ms for each prompt token. Raises ConfigurationError for what cannot be.
    """

    step_ms: float = 15.0
    row_us: float = 500.0  # of each decode row
    token_us: float = 400.0  # of each prefill token
    kv_ns: float = 200.0  # of each context token
    between_us: float = 0.0  # from a step's end to the next one's begin

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_range(name, getattr(self, name), RANGES[name], "step model: ")
        if not (self.step_ms or self.row_us or self.between_us):
            raise ConfigurationError("step model: a step must take time: give step_ms, row_us or between_us.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "step_ms=20,token_us=800"; what is not named is 0. Raises ConfigurationError naming what exists."""
        values: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in cls.__struct_fields__:
                raise ConfigurationError(f"step model: no parameter {name!r}; there are {', '.join(cls.__struct_fields__)}.")
            if name in values:
                raise ConfigurationError(f"step model: {name} is given twice.")
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigurationError(f"step model: {name} must be a number, not {value!r}.") from None
        return cls(**(dict.fromkeys(cls.__struct_fields__, 0.0) | values))

    def duration_ns(self, decode_rows: int, prefill_tokens: int, context_tokens: int) -> int:
        """Until the next step can begin, at least 1 ns."""
        return max(
            1,
            round(
                self.step_ms * _NS_PER_MS
                + (self.between_us + self.row_us * decode_rows + self.token_us * prefill_tokens) * _NS_PER_US
                + self.kv_ns * context_tokens
            ),
        )


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model, and how far it is from the steps that it was fitted to."""

    model: StepModel
    num_steps: int
    mean_error: float  # mean of |predicted - recorded| / recorded
    p50_error: float
    p90_error: float
    total_ratio: float  # sum of predicted durations / sum of recorded ones
    r_squared: float  # share of the durations' variance that is explained

    @property
    def warnings(self) -> list[str]:
        """Why results that stand on this fit are not to be trusted; empty for a fair one."""
        faults = []
        if self.r_squared < MIN_R_SQUARED:
            faults.append(f"R2 {self.r_squared:.3f} is below {MIN_R_SQUARED:g}")
        if self.mean_error > MAX_MEAN_ERROR:
            faults.append(f"the error of a step, {self.mean_error:.1%} in the mean, is above {MAX_MEAN_ERROR:.0%}")
        if not faults:
            return []
        return [f"warning: the step model fits badly ({'; '.join(faults)}): do not rely on what is simulated with it"]


_NUM_REWEIGHTINGS = 5
_HUBER_ERRORS = 2.0  # from so many median errors on a step counts less


def fit_steps(steps: Iterable[RecordStep]) -> StepFit:
    """Least squares of relative errors, with coefficients that are not negative. ConfigurationError for too few steps.

    Relative, because most steps are short and a simulation adds them up by the thousand; steps that are far off (the machine
    did something else) count less (iteratively reweighted least squares with Huber's weights: Holland and Welsch, 1977).

    Four coefficients allow the exact way: the best of the least-squares solutions over all subsets of columns whose
    coefficients are positive is the solution of the constrained problem (Lawson and Hanson, Solving Least Squares Problems,
    1974, chapter 23). `between_us` is the median time between two steps of a worker that had work left.
    """
    kept = [step for step in steps if step.duration_us > 0 and step.decode_rows + step.prefill_tokens > 0]
    if len(kept) < MIN_FITTED_STEPS:
        raise ConfigurationError(f"A step model needs {MIN_FITTED_STEPS} recorded steps at least; the record has {len(kept)}.")
    kept.sort(key=lambda step: (step.epoch, step.at_us))
    columns = np.array([(1.0, step.decode_rows, step.prefill_tokens, step.context_tokens) for step in kept], dtype=np.float64)
    durations = np.array([step.duration_us for step in kept], dtype=np.float64)
    coefficients = _robust_fit(columns, durations)
    predicted = columns @ coefficients
    errors = np.abs(predicted - durations) / durations
    spread = float(((durations - durations.mean()) ** 2).sum())
    constant, row, token, context = (float(value) for value in coefficients)
    return StepFit(
        model=StepModel(step_ms=constant / 1e3, row_us=row, token_us=token, kv_ns=context * 1e3, between_us=_between_us(kept)),
        num_steps=len(kept),
        mean_error=float(errors.mean()),
        p50_error=float(np.quantile(errors, 0.5)),
        p90_error=float(np.quantile(errors, 0.9)),
        total_ratio=float(predicted.sum() / durations.sum()),
        r_squared=1.0 - float(((predicted - durations) ** 2).sum()) / spread if spread > 0 else 1.0,
    )


def _robust_fit(columns: Floats, durations: Floats) -> Floats:
    weights = 1.0 / durations
    coefficients = non_negative_least_squares(columns * weights[:, None], durations * weights)
    for _ in range(_NUM_REWEIGHTINGS):
        errors = np.abs(columns @ coefficients - durations) / durations
        limit = max(_HUBER_ERRORS * float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12))) / durations
        coefficients = non_negative_least_squares(columns * weights[:, None], durations * weights)
    # Steps far above the line are time as well: all together take as long as they did.
    whole = float(durations.sum()) / max(float((columns @ coefficients).sum()), 1e-12)
    scaled: Floats = coefficients * whole
    return scaled


def non_negative_least_squares(columns: Floats, values: Floats) -> Floats:
    """min ||columns @ x - values|| with x >= 0, for few columns; of equally good ones the solution with fewest of them."""
    num_columns = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled = columns / scale
    best, best_error = np.zeros(num_columns), float(values @ values)
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], values, rcond=None)
            if (found < 0).any():
                continue
            rest = scaled[:, chosen] @ found - values
            error = float(rest @ rest)
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = found
    best /= scale
    return best


def _between_us(steps: Sequence[RecordStep]) -> float:
    gaps = [
        after.at_us - before.at_us - before.duration_us
        for before, after in itertools.pairwise(steps)
        if before.epoch == after.epoch and before.running + before.waiting > 0
    ]
    return max(0.0, float(np.median(gaps))) if gaps else 0.0

"""How long a step takes: a linear model fitted to the steps as they come.

Owns: StepShape, StepTimePrior, StepTimeModel. Runs in: worker, tests, simulation.
Must not know: devices, sequences, clocks.
"""

import math
from dataclasses import dataclass

from headrace.protocol.errors import ConfigurationError

_NUM_FEATURES = 5
_RETENTION = 0.999  # what a later step leaves of a step's weight: about the last 1000 count
_PRIOR_STEPS = 4.0  # steps that the prior counts as
_MIN_EVIDENCE = 2.0  # below so many (decayed) steps with a feature its coefficient stands still: the rest would be noise
_FAST_RETENTION = 0.97  # the same while the errors have one sign: what was true before is no more
_BIAS_RATIO = 0.6  # mean of the errors / mean of their sizes from which they have; chance alone seldom comes so far
_MIN_BIAS = 0.05  # a smaller mean error is no reason to forget
_ERROR_RETENTION = 0.96  # of the mean relative errors: about the last 25 steps count
_OUTLIER_ERRORS = 4.0  # a residual beyond so many mean errors counts as that far off, and no more (Huber)
_MIN_ERROR_RATIO = 0.01  # clocks and kernels are no more exact than that
_NUM_SWEEPS = 2


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes, as far as its time depends on it."""

    num_decode_rows: int  # rows of one token whose sequence has begun to answer
    num_prefill_tokens: int
    num_context_tokens: int  # KV positions that the decode rows read: the sum of their lengths
    num_prefill_pairs: int = 0  # (token, KV position) pairs of the prefill rows: the sum of their `prefill_pairs`


def prefill_pairs(start_position: int, num_tokens: int) -> int:
    """Pairs that causal attention looks at for a chunk: its first token reads start_position + 1 positions, and so on."""
    return num_tokens * start_position + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class StepTimePrior:
    """What is believed before the first step, in nanoseconds. The defaults are a slow machine's: first chunks are small."""

    base_ns: float = 5e6
    decode_row_ns: float = 2e6
    prefill_token_ns: float = 1e6
    context_token_ns: float = 500.0
    prefill_pair_ns: float = 50.0

    def __post_init__(self) -> None:
        if min(self.coefficients) < 0 or not all(map(math.isfinite, self.coefficients)) or self.prefill_token_ns <= 0:
            raise ConfigurationError("times of a step must not be negative, and a prefill token must take some.")

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """In the order of the model."""
        return (self.base_ns, self.decode_row_ns, self.prefill_token_ns, self.context_token_ns, self.prefill_pair_ns)


# A step about as large as a first one: it says how strongly the prior holds each coefficient.
_TYPICAL = (1.0, 4.0, 64.0, 1024.0, 16384.0)


class StepTimeModel:
    """duration = base + b * decode rows + c * prefill tokens + d * context tokens + e * prefill pairs, none negative.

    Fitted by weighted least squares with exponential forgetting (recursive least squares: Ljung, System Identification, 11.2),
    on relative errors, by non-negative coordinate descent over the decayed normal equations (Franc, Hlavac, Navara 2005), which
    unlike the usual matrix update has nothing that could lose its definiteness or wind up: a coefficient of which no step has
    told anything lately stands still. Residuals are clipped as Huber's loss does, so that one paused step does not count, while
    a lasting change does: while errors have one sign, the past is forgotten faster.

    Left out: what sampling parameters cost, the number of prefill rows, padding of a rectangular layout, jumps of kernel times
    at tile sizes, clock frequency and other processes. All of it shows in `error_ratio`.
    """

    def __init__(self, prior: StepTimePrior | None = None) -> None:
        self._theta = list((prior or StepTimePrior()).coefficients)
        typical_ns = sum(weight * value for weight, value in zip(self._theta, _TYPICAL, strict=True))
        self._evidence = [0.0] * _NUM_FEATURES  # decayed number of steps that had the feature
        self._matrix = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._vector = [0.0] * _NUM_FEATURES
        for index, value in enumerate(_TYPICAL):
            strength = _PRIOR_STEPS * (value / typical_ns) ** 2
            self._matrix[index][index] = strength
            self._vector[index] = strength * self._theta[index]
        self._error_ratio = 0.5
        self._bias_ratio = 0.0

    @property
    def coefficients_ns(self) -> tuple[float, ...]:
        """Base, for each decode row, prefill token, context token, prefill pair."""
        return tuple(self._theta)

    @property
    def error_ratio(self) -> float:
        """Mean |measured - predicted| / predicted of about the last 25 steps, before each was learnt; 0.5 at first.

        A step far off counts as four times the mean, so that it is a steady figure.
        """
        return self._error_ratio

    @property
    def confidence(self) -> float:
        """0: the prior alone speaks; towards 1: what prompts cost was measured. What a step was not like stays a guess."""
        steps = self._evidence[2]
        return steps / (steps + _PRIOR_STEPS)

    def predict(self, shape: StepShape) -> int:
        """Nanoseconds; never negative."""
        base, row, token, context, pair = self._theta
        return round(
            base
            + row * shape.num_decode_rows
            + token * shape.num_prefill_tokens
            + context * shape.num_context_tokens
            + pair * shape.num_prefill_pairs
        )

    def observe(self, shape: StepShape, duration_ns: int) -> None:
        """Learn from a step. Raises ValueError for a negative duration."""
        if duration_ns < 0:
            raise ValueError(f"a step cannot have taken {duration_ns} ns")
        predicted_ns = max(1, self.predict(shape))
        limit = _OUTLIER_ERRORS * self._error_ratio
        residual_ratio = max(-limit, min(limit, (duration_ns - predicted_ns) / predicted_ns))
        error_ratio = _ERROR_RETENTION * self._error_ratio + (1 - _ERROR_RETENTION) * abs(residual_ratio)
        self._error_ratio = max(_MIN_ERROR_RATIO, error_ratio)
        self._bias_ratio = _ERROR_RETENTION * self._bias_ratio + (1 - _ERROR_RETENTION) * residual_ratio
        is_biased = abs(self._bias_ratio) > max(_MIN_BIAS, _BIAS_RATIO * error_ratio)
        retention = _FAST_RETENTION if is_biased else _RETENTION
        self._remember(shape, predicted_ns * (1 + residual_ratio), 1.0 / predicted_ns**2, retention)
        for _ in range(_NUM_SWEEPS):
            self._sweep()

    def largest_prefill(self, decode: StepShape, *, budget_ns: int, start_position: int, max_tokens: int) -> int:
        """Most prefill tokens with which the step is predicted to stay within the budget, 0 to `max_tokens`.

        `decode`: the step's other rows. `start_position`: the largest of the prompts under way. All tokens are taken to stand
        from there on in one row, the dearest case for attention. Closed form: the positive root of
        e/2 n^2 + (c + e (start + 1/2)) n = budget - rest.
        """
        rest_ns = budget_ns - self.predict(decode)
        if rest_ns < 0 or max_tokens < 1:
            return 0
        pair = self._theta[4]
        linear = self._theta[2] + pair * (start_position + 0.5)
        divisor = linear + math.sqrt(linear * linear + 2.0 * pair * rest_ns)
        if 2.0 * rest_ns >= divisor * max_tokens:  # also where prefill seems to cost nothing
            return max_tokens
        return int(2.0 * rest_ns / divisor)

    def _remember(self, shape: StepShape, target_ns: float, weight: float, retention: float) -> None:
        """Let the normal equations fade, and add a step."""
        features = (
            1.0,
            float(shape.num_decode_rows),
            float(shape.num_prefill_tokens),
            float(shape.num_context_tokens),
            float(shape.num_prefill_pairs),
        )
        vector, evidence = self._vector, self._evidence
        for index, row in enumerate(self._matrix):
            value = features[index]
            scaled = weight * value
            vector[index] = retention * vector[index] + scaled * target_ns
            evidence[index] = retention * evidence[index] + (value > 0.0)
            for other in range(_NUM_FEATURES):
                row[other] = retention * row[other] + scaled * features[other]

    def _sweep(self) -> None:
        """One pass of coordinate descent; what steps have told enough about moves."""
        theta, vector = self._theta, self._vector
        for index, row in enumerate(self._matrix):
            if self._evidence[index] < _MIN_EVIDENCE or row[index] <= 0.0:
                continue
            t0, t1, t2, t3, t4 = theta
            gradient = vector[index] - (row[0] * t0 + row[1] * t1 + row[2] * t2 + row[3] * t3 + row[4] * t4)
            theta[index] = max(0.0, theta[index] + gradient / row[index])

"""Rotary position embedding: from a model's parameters to one angle speed for each pair of components.

Owns: the scaling formulas. Runs in: launch, before serving. Must not know: files, graphs.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions beyond the trained ones are reached. Fields that a kind does not use stay at their defaults.

    linear: all angles divided by `factor`. llama3: slow ones divided, fast ones kept, between them a blend.
    yarn: the same idea by number of turns within the original context, and attention sharpened. explicit: divisors given.
    """

    kind: Literal["linear", "llama3", "yarn", "explicit"]
    factor: float = 1.0
    original_max_tokens: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    divisors: tuple[float, ...] = ()  # explicit: one for each pair


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model. All `head_size` components rotate."""

    theta: float
    head_size: int
    scaling: RopeScaling | None = None

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """[head_size / 2] radians per position. RoFormer (arXiv 2104.09864), eq. 15, scaled as `scaling` says."""
        plain = self.theta ** (-np.arange(0, self.head_size, 2, dtype=np.float64) / self.head_size)
        scaling = self.scaling
        if scaling is None:
            scaled = plain
        elif scaling.kind == "linear":
            scaled = plain / scaling.factor
        elif scaling.kind == "explicit":
            scaled = plain / np.array(scaling.divisors)
        elif scaling.kind == "llama3":
            scaled = _llama3(plain, scaling)
        else:
            scaled = self._yarn(plain, scaling)
        return scaled.astype(np.float32)

    def magnitude(self) -> float:
        """What cosine and sine are multiplied with: 1 except for yarn (arXiv 2309.00071, section 3.4)."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1.0 if self.scaling.factor > 1 else 1.0

    def _yarn(self, plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
        """arXiv 2309.00071, section 3.2: pairs that turn often are kept, those that turn less than once are divided."""

        def pair_with_turns(turns: float) -> float:
            wave = scaling.original_max_tokens / (turns * 2 * math.pi)
            return self.head_size * math.log(wave) / (2 * math.log(self.theta))

        low = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
        high = min(math.ceil(pair_with_turns(scaling.beta_slow)), self.head_size - 1)
        ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
        blended: NDArray[np.float64] = plain * (1 - ramp) + plain / scaling.factor * ramp
        return blended


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Llama 3.1's rule: by wavelength, relative to the original context."""
    turns = scaling.original_max_tokens * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    blended: NDArray[np.float64] = plain * blend + plain / scaling.factor * (1 - blend)
    return blended

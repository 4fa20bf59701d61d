"""How long prompts and answers are: fixed, or drawn from the shape of recorded traffic.

Owns: LengthShape, the built-in shapes, how they are scaled. Runs in: load tool. Must not know: texts, arrival times, servers.
"""

import bisect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Lengths(NamedTuple):
    """Of one request, in tokens; both at least 1."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class QuantileTable:
    """A distribution by its quantiles: `shares` rise from 0 to 1, `values` are the tokens at each. Linear in between."""

    shares: tuple[float, ...]
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.values) or len(self.shares) < 2:
            raise ValueError("a table of quantiles needs as many values as shares, two at least")
        if self.shares[0] != 0.0 or self.shares[-1] != 1.0:
            raise ValueError("the shares of a table of quantiles go from 0 to 1")
        if any(b <= a for a, b in zip(self.shares, self.shares[1:], strict=False)):
            raise ValueError("the shares of a table of quantiles must rise")
        if any(b < a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError("the values of a table of quantiles must not fall")

    def at(self, share: float) -> float:
        """The quantile: what a `share` (0..1) of the values stays below."""
        place = min(max(bisect.bisect_right(self.shares, share) - 1, 0), len(self.shares) - 2)
        low, high = self.shares[place], self.shares[place + 1]
        return self.values[place] + (self.values[place + 1] - self.values[place]) * (share - low) / (high - low)


@dataclass(frozen=True)
class LengthShape:
    """Prompt and output lengths of recorded traffic. They are drawn apart: in these traces they hardly correlate."""

    name: str
    source: str  # whose traffic, and where it was published
    prompt: QuantileTable
    output: QuantileTable


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


_SHARES = (0.0, 0.01, 0.05, *(round(0.05 * step, 2) for step in range(2, 20)), 0.97, 0.99, 0.995, 0.999, 1.0)
_GAP_SHARES = tuple(sorted({*_SHARES, 0.66, 0.67, 0.68, 0.69}))  # finer where a distribution of two humps has its gap
_AZURE = "Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024; data CC BY 4.0)"
_MOONCAKE = "Mooncake conversation trace (Qin et al., Mooncake, FAST 2025; data Apache-2.0)"

AZURE_CODE = LengthShape(
    name="azure-code",
    source=f"{_AZURE}, code",
    prompt=QuantileTable(
        _SHARES,
        _tokens(
            "3 17 75 147 232 386 578 770 938 1075 1261 1469 1690 1909 2164 2433 2745 3192 3919 5186 7302 7435 "
            "7436 7436 7437 7437"
        ),
    ),
    output=QuantileTable(
        _SHARES,
        _tokens("6 6 6 7 7 8 9 9 10 11 12 13 14 16 18 20 24 29 39 55 90 128 252 361 824 1899"),
    ),
)
AZURE_CONVERSATION = LengthShape(
    name="azure-conversation",
    source=f"{_AZURE}, conversation",
    prompt=QuantileTable(
        _SHARES,
        _tokens(
            "2 29 181 207 372 387 396 403 414 703 984 1020 1045 1071 1097 1130 1189 1315 1876 2734 4083 4090 4142 "
            "4831 6212 14050"
        ),
    ),
    output=QuantileTable(
        _GAP_SHARES,
        _tokens(
            "7 16 41 54 67 77 85 91 96 103 113 129 151 177 217 237 371 375 378 384 395 400 411 424 451 509 601 643 954 1000"
        ),
    ),
)
MOONCAKE_CONVERSATION = LengthShape(
    name="mooncake-conversation",
    source=_MOONCAKE,
    prompt=QuantileTable(
        _SHARES,
        _tokens(
            "891 894 901 964 1261 1662 2307 3263 4250 4993 5871 6909 8187 9570 11239 13196 15366 17869 21467 "
            "27367 39549 52215 85401 100886 121301 126195"
        ),
    ),
    output=QuantileTable(
        _SHARES,
        _tokens("1 3 10 24 46 100 157 213 256 291 323 350 375 399 423 447 472 504 543 597 698 800 1120 1570 2000 2000"),
    ),
)
SHAPES: dict[str, LengthShape] = {shape.name: shape for shape in (AZURE_CODE, AZURE_CONVERSATION, MOONCAKE_CONVERSATION)}


def draw_lengths(shape: LengthShape, scale: float, seed: str) -> Iterator[Lengths]:
    """Endless lengths of that shape, both multiplied by `scale` (> 0); the same for the same seed."""
    source = random.Random(seed)  # noqa: S311 - not for secrets; seeded by text, so the same on each machine
    while True:
        prompt, output = shape.prompt.at(source.random()), shape.output.at(source.random())
        yield scaled(Lengths(round(prompt), round(output)), scale)


def scaled(lengths: Lengths, scale: float) -> Lengths:
    """Both lengths times `scale`, at least 1."""
    return Lengths(max(1, round(lengths.prompt_tokens * scale)), max(1, round(lengths.output_tokens * scale)))


def cut_to_context(lengths: Lengths, context_tokens: int | None) -> Lengths:
    """Lengths that fit a model's context together: the prompt is cut first, the answer only when it alone is too long."""
    if context_tokens is None or lengths.prompt_tokens + lengths.output_tokens <= context_tokens:
        return lengths
    output = min(lengths.output_tokens, max(1, context_tokens - 1))
    return Lengths(max(1, context_tokens - output), output)

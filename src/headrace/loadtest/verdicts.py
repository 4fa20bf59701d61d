"""The form of an answer to "is there a sign of ...?": yes, no or cannot be told, with the numbers and a sentence.

Owns: Finding, and what all signs share. Runs in: load tool. Must not know: what is looked for.
"""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.loadtest.records import RequestRecord

LONG_PROMPT_SHARE = 0.5


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """`found` is False too when it was not judged; `sentence` is complete in itself in all three cases."""

    name: str
    found: bool
    is_judged: bool
    evidence: dict[str, float] = {}
    sentence: str

    @classmethod
    def not_judged(cls, name: str, why: str, evidence: dict[str, float] | None = None) -> Self:
        """Nothing can be said; `why` is a whole sentence."""
        return cls(name=name, found=False, is_judged=False, evidence=evidence or {}, sentence=why)


def num_prompt_tokens(record: RequestRecord) -> int | None:
    """Tokens of the prompt: the server's count, or what was meant where there is none."""
    return record.prompt_tokens if record.prompt_tokens is not None else record.target_prompt_tokens


def long_prompt_tokens(lengths: Sequence[int] | npt.NDArray[np.float64]) -> float:
    """From how many tokens on a prompt counts as long among these: half the 99th percentile. Infinite without lengths."""
    return LONG_PROMPT_SHARE * float(np.quantile(lengths, 0.99, method="higher")) if len(lengths) else math.inf


def milliseconds(seconds: float) -> str:
    """For sentences: "12.3 ms", "1.20 s" from a second on."""
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < 1.0 else f"{seconds:.2f} s"

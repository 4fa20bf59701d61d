"""The form of an answer to "is there a sign of ...?": yes, no or cannot be told, with the numbers and a sentence.

Owns: Finding. Runs in: load tool. Must not know: what is looked for.
"""

from typing import Self

import msgspec


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

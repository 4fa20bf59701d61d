"""Typed look-up in what a model file says of itself, with faults that name the missing or wrong key.

Owns: Fields. Runs in: launch, before serving. Must not know: what any key means.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping read from `origin` (a file's name, for messages). `prefix` is put before every key asked for."""

    values: Mapping[str, Any]
    origin: str
    prefix: str = ""

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError when it is missing without a default, or no positive integer."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self.origin}: {self.prefix}{key} is {_shown(value)}; a positive whole number is needed.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Raises ModelError as integer() does."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self.origin}: {self.prefix}{key} is {_shown(value)}; a positive number is needed.")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises ModelError as integer() does."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.origin}: {self.prefix}{key} is {_shown(value)}; a string is needed.")
        return value

    def has(self, key: str) -> bool:
        """True when the key is there and is not null."""
        return self.values.get(self.prefix + key) is not None

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(self.prefix + key)

    def section(self, key: str) -> "Fields":
        """The mapping under a key; an empty one when it is missing. Raises ModelError when it is something else."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.origin}: {self.prefix}{key} is {_shown(value)}; a mapping is needed.")
        return Fields(value, f"{self.origin} ({key})")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.origin}: the key {self.prefix}{key} is missing.")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

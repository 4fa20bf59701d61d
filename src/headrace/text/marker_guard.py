"""Keeps control markers that stand in a user's words from becoming control tokens.

Owns: breaking markers up before a template joins texts. Runs in: gateway. Must not know: templates, token ids.
"""

import re
from collections.abc import Iterable
from typing import Any

# Code points that Unicode reserves for a program's own use and that no text holds: U+FDD0 .. U+FDEF.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class MarkerGuard:
    """For one tokenizer's special tokens. Without state: safe for all threads."""

    def __init__(self, markers: Iterable[str]) -> None:
        markers = sorted((marker for marker in markers if len(marker) > 1), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._endings = {marker[-length:] for marker in markers for length in range(1, len(marker))}
        self._max_length = max(map(len, markers), default=1) - 1

    def is_risky(self, value: Any) -> bool:
        """Whether a text in this value (of a JSON kind) holds a marker, or could complete one with the text beside it."""
        if isinstance(value, str):
            holds_marker = self._whole is not None and self._whole.search(value) is not None
            return holds_marker or bool(self._open_end(value) or self._open_start(value))
        if isinstance(value, dict):
            return any(self.is_risky(item) for pair in value.items() for item in pair)
        return isinstance(value, list | tuple) and any(self.is_risky(item) for item in value)

    def break_up(self, value: Any, sentinel: str) -> Any:
        """The value with `sentinel` inside each marker, and where a marker could come about at a text's edge."""
        if isinstance(value, str):
            return self._break_up_text(value, sentinel)
        if isinstance(value, dict):
            return {self.break_up(key, sentinel): self.break_up(item, sentinel) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_up(item, sentinel) for item in value]
        return value

    def _break_up_text(self, text: str, sentinel: str) -> str:
        start, end = self._open_start(text), self._open_end(text)
        if end:
            stripped = text.rstrip()
            text = stripped + sentinel + text[len(stripped) :]
        if start:
            stripped = text.lstrip()
            text = text[: len(text) - len(stripped)] + sentinel + stripped
        while self._whole is not None and self._whole.search(text):  # again: markers may overlap
            text = self._whole.sub(lambda match: match.group()[0] + sentinel + match.group()[1:], text)
        return text

    def _open_end(self, text: str) -> bool:
        text = text.rstrip()
        return any(text[-length:] in self._beginnings for length in range(1, min(self._max_length, len(text)) + 1))

    def _open_start(self, text: str) -> bool:
        text = text.lstrip()
        return any(text[:length] in self._endings for length in range(1, min(self._max_length, len(text)) + 1))


def unused_character(*values: Any) -> str | None:
    """A character that stands in none of the texts of these values (of a JSON kind); None when all that may serve are taken."""
    free = dict.fromkeys(_NONCHARACTERS)
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            for character in [c for c in free if c in value] if not value.isascii() else ():
                del free[character]
        elif isinstance(value, dict):
            stack.extend([*value.keys(), *value.values()])
        elif isinstance(value, list | tuple):
            stack.extend(value)
    return next(iter(free), None)

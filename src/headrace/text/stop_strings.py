"""Finds stop strings in a text that comes in pieces.

Owns: where a text ends, to the character. Runs in: gateway. Must not know: tokens, requests.

All stop strings are looked for at once (A. Aho, M. Corasick, Efficient string matching, CACM 18(6), 1975). The automaton's
state is the longest end of the text that could still become a stop string, so it also says what must be held back.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopUpdate(NamedTuple):
    """Text that may be shown now, and the stop string that ended the text, once one has."""

    text: str
    stop: str | None


class _Node:
    """A state: the text so far ends in `depth` characters that begin a stop string."""

    __slots__ = ("depth", "fallback", "next", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback: _Node | None = None  # the state of the longest shorter end; None at the root
        self.stop: str | None = None  # the longest stop string that ends here


class StopStringMatcher:
    """Cuts one text at the stop string that is complete first; of those complete at the same character, the longest.

    Strings are compared code point by code point, without any normalization. The outcome does not depend on how the text was
    split into pieces. With no stop strings a text passes through unchanged.
    """

    __slots__ = ("_firsts", "_held", "_includes_stop", "_node", "_root", "_stop")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: whether the stop string is part of the text. Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._root = _build(stops)
        self._firsts = frozenset(self._root.next)
        self._includes_stop = include_stop
        self._node = self._root
        self._held = ""  # the end of the text that self._node stands for
        self._stop: str | None = None

    def push(self, text: str) -> StopUpdate:
        """Take the next piece. After a stop string nothing more is shown."""
        if self._stop is not None:
            return StopUpdate("", self._stop)
        if self._node is self._root and self._firsts.isdisjoint(text):
            return StopUpdate(text, None)
        node = self._node
        for index, character in enumerate(text):
            node = _step(node, character)
            if node.stop is not None:
                return self._end(self._held + text[: index + 1], node.stop)
        self._node = node
        seen = self._held + text
        shown = len(seen) - node.depth
        self._held = seen[shown:]
        return StopUpdate(seen[:shown], None)

    def finish(self) -> str:
        """The text is over: what was held back and became no stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held

    def _end(self, seen: str, stop: str) -> StopUpdate:
        self._stop = stop
        self._held = ""
        return StopUpdate(seen if self._includes_stop else seen[: -len(stop)], stop)


def _step(node: _Node, character: str) -> _Node:
    """The state after one more character."""
    while True:
        following = node.next.get(character)
        if following is not None:
            return following
        if node.fallback is None:
            return node
        node = node.fallback


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    level = list(root.next.values())
    for node in level:
        node.fallback = root
    while level:  # breadth first: a fallback is always nearer to the root
        following = []
        for node in level:
            for character, child in node.next.items():
                child.fallback = _step(node.fallback or root, character)
                child.stop = child.stop or child.fallback.stop
                following.append(child)
        level = following
    return root

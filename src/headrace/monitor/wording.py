"""Numbers as short words, bars and sparklines; text that a server sent, made harmless for a terminal.

Owns: these spellings. Runs in: CLI, pure. Must not know: what a number means.
"""

import unicodedata
from collections.abc import Iterable

UNKNOWN = "-"
SPARKS = "▁▂▃▄▅▆▇█"
MAX_TEXT = 300


def plain(text: str) -> str:
    """Control characters, direction overrides, line separators and lone surrogates as visible escapes."""
    return "".join(char.encode("unicode_escape").decode() if _is_unsafe(char) else char for char in text[:MAX_TEXT])


def _is_unsafe(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def seconds(value: float | None) -> str:
    """`850 us`, `12.3 ms`, `1.24 s`, `2m05s`, `3h07m`."""
    if value is None:
        return UNKNOWN
    if value >= 3600:
        return f"{value // 3600:.0f}h{value % 3600 // 60:02.0f}m"
    if round(value) >= 60:
        return f"{round(value) // 60}m{round(value) % 60:02}s"
    if value >= 0.9995:
        return f"{_three_digits(value)} s"
    if value >= 0.9995e-3:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{value * 1e6:.0f} us" if value else "0 ms"


def number(value: float | None) -> str:
    """`0`, `0.25`, `4.2`, `1,204`."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 99.5 or value == round(value):
        return f"{value:,.0f}"
    return _three_digits(value)


def per_second(value: float | None) -> str:
    """`4.2/s`."""
    return UNKNOWN if value is None else f"{number(value)}/s"


def percent(value: float | None) -> str:
    """`43 %`; below one in a hundred `0.4 %`."""
    if value is None:
        return UNKNOWN
    return f"{value * 100:.1f} %" if 0 < value < 0.01 else f"{value * 100:.0f} %"


def bar(share: float | None, num_cells: int) -> str:
    """`████░░░░`."""
    filled = round(num_cells * min(1.0, max(0.0, share or 0.0)))
    return "█" * filled + "░" * (num_cells - filled)


def spark(values: Iterable[float | None]) -> str:
    """One cell for each value, the highest as the full cell; unknown is blank."""
    known = list(values)
    top = max((value for value in known if value is not None), default=0.0)
    return "".join(" " if value is None else SPARKS[_level(value, top)] for value in known)


def _level(value: float, top: float) -> int:
    return 0 if top <= 0 else round((len(SPARKS) - 1) * max(0.0, value) / top)


def _three_digits(value: float) -> str:
    if abs(value) >= 99.5:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"

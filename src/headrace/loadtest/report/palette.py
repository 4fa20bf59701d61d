"""Colours of charts and pages, light and dark, as CSS variables.

Owns: the names and values of colours, and the stand-ins that charts are drawn with. Runs in: load tool.
Must not know: matplotlib, HTML.

Charts are drawn once, in stand-in colours that nothing else uses; each stand-in is then replaced by `var(--name, light)`, so
that one SVG follows the page's theme and still has colours alone. Series colours after Okabe and Ito, which stay apart for
readers with colour blindness; the dark ones are lighter.
"""

import re
from typing import NamedTuple


class Colour(NamedTuple):
    """`stand_in` is what is drawn; the others are what is seen."""

    stand_in: str
    light: str
    dark: str


COLOURS: dict[str, Colour] = {
    "ink": Colour("#010101", "#1f2328", "#e6e9ee"),
    "muted": Colour("#010102", "#5d6670", "#9aa4b0"),
    "grid": Colour("#010103", "#e1e5ea", "#333a44"),
    "surface": Colour("#010104", "#ffffff", "#1b2027"),
    "page": Colour("#010105", "#f4f6f8", "#12161b"),
    "bad": Colour("#010106", "#c62828", "#ff7b72"),
    "warn": Colour("#010107", "#9a6700", "#e3b341"),
    "good": Colour("#010108", "#1a7f37", "#56d364"),
    "shade": Colour("#010109", "#9aa4b0", "#5d6670"),
    "accent": Colour("#01010a", "#0b6e99", "#6cc4ee"),
    "s0": Colour("#010110", "#0072b2", "#56b4e9"),
    "s1": Colour("#010111", "#d55e00", "#ff9a57"),
    "s2": Colour("#010112", "#007f5c", "#3ecfa4"),
    "s3": Colour("#010113", "#b0508a", "#e79cc8"),
    "s4": Colour("#010114", "#8a6d00", "#f0d860"),
    "s5": Colour("#010115", "#5b4bb5", "#a89bf0"),
}
NUM_SERIES = sum(name.startswith("s") and name[1:].isdigit() for name in COLOURS)
_NAME_OF = {colour.stand_in: name for name, colour in COLOURS.items()}


def stand_in(name: str) -> str:
    """The colour to draw with."""
    return COLOURS[name].stand_in


def series_colour(place: int) -> str:
    """Stand-in of the line at this place; they come round again."""
    return COLOURS[f"s{place % NUM_SERIES}"].stand_in


def with_variables(svg: str) -> str:
    """Replace stand-ins by CSS variables with the light colour as the fallback."""

    def variable(match: re.Match[str]) -> str:
        name = _NAME_OF.get(match.group(0).lower())
        return f"var(--{name}, {COLOURS[name].light})" if name else match.group(0)

    return re.sub(r"#[0-9a-fA-F]{6}\b", variable, svg)


def css_variables(theme: str) -> str:
    """Declarations for `light` or `dark`."""
    return "".join(f"--{name}:{getattr(colour, theme)};" for name, colour in COLOURS.items())

"""SVG that follows the page's light or dark theme, drawn by matplotlib.

Owns: the look and the embedding of charts; the only module that imports matplotlib. Runs in: load tool.
Must not know: what a chart shows.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from headrace.loadtest.report.palette import COLOURS, stand_in, with_variables
from headrace.protocol.extras import how_to_install

WIDTH_INCHES = 6.6
WIDE_INCHES = 12.0
PICTURE_KINDS = ("svg", "png")


class ChartsUnavailableError(Exception):
    """matplotlib is not installed; the text says what to do."""


def require_charts() -> None:
    """Raises: ChartsUnavailableError. Call it before a long run that is to end in a chart."""
    try:
        import matplotlib  # noqa: F401 - whether it is there is the question
    except ImportError:
        raise ChartsUnavailableError(f"charts need matplotlib: {how_to_install('bench')}") from None


_STYLE: Any = {  # rcParams
    "svg.fonttype": "none",
    "svg.hashsalt": "headrace",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": stand_in("grid"),
    "axes.labelcolor": stand_in("muted"),
    "axes.titlecolor": stand_in("ink"),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": stand_in("grid"),
    "grid.linewidth": 0.7,
    "xtick.color": stand_in("grid"),
    "ytick.color": stand_in("grid"),
    "xtick.labelcolor": stand_in("muted"),
    "ytick.labelcolor": stand_in("muted"),
    "text.color": stand_in("ink"),
    "text.parse_math": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "lines.linewidth": 1.7,
}


def draw_svg(
    title: str, description: str, draw: Callable[[Any], None], height_inches: float, width_inches: float = WIDTH_INCHES
) -> str:
    """Draw on a fresh figure of the SVG backend (no global state), and make the result fit for embedding."""
    require_charts()
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # text stays text: the reader's fonts have it
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _embeddable(buffer.getvalue(), title, description)


def save_figure(path: Path, draw: Callable[[Any], None], *, width_inches: float, height_inches: float) -> None:
    """Draw on a fresh figure and save it by itself, in light colours, as .svg or .png; the same drawing gives the same bytes.

    Raises ChartsUnavailableError, ValueError for another ending, OSError.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURE_KINDS:
        raise ValueError(f"{path}: a picture's name ends in .{' or .'.join(PICTURE_KINDS)}")
    require_charts()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lights = {colour.stand_in: colour.light for colour in COLOURS.values()}
    style = {name: lights.get(value, value) if isinstance(value, str) else value for name, value in _STYLE.items()}
    with mpl.rc_context({**style, "figure.facecolor": COLOURS["surface"].light}):
        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})


def _embeddable(svg: str, title: str, description: str) -> str:
    """Strip what only a file needs, make ids unique on a page, set theme colours and fonts, add title and description."""
    name = "c" + hashlib.sha256(f"{title}{svg}".encode()).hexdigest()[:10]
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda match: _themed_tag(match.group(0), name), svg)
    open_tag, _, rest = svg.partition(">")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', open_tag)
    view = size.group(0) if size else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view} class="chart" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{rest.strip()}'
    )


def _themed_tag(tag: str, name: str) -> str:
    """One tag; text between tags, which may be anyone's, is never touched. `>` in attributes is escaped by matplotlib."""
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", tag)
    tag = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', tag)
    tag = re.sub(r"font-family:[^;\"]+|(font: [\d.]+px) [^;\"]+", lambda match: _font(match.group(1)), tag)
    return with_variables(tag)


def _font(size: str | None) -> str:
    family = "system-ui, -apple-system, 'Segoe UI', sans-serif"
    return f"{size} {family}" if size else f"font-family: {family}"

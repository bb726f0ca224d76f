"""Draws with matplotlib into ``<svg>`` elements that take the colours of the page they stand in."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from wellfed.extras import install, is_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, ACCENT, BAD = "#010203", "#040506", "#070809"
SERIES = ("#0a0b0c", "#0d0e0f", "#101112", "#131415")
"""Four curves or areas beside each other."""
_OF_THE_PAGE = {
    INK: "currentColor",
    ACCENT: "var(--accent)",
    BAD: "var(--bad)",
    **{stand_in: f"var(--{name})" for stand_in, name in zip(SERIES, ("one", "two", "three", "four"), strict=True)},
}
"""Stand-ins that no default of matplotlib uses: colours of ``base.html.j2`` take their place, in the dark too."""
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: sharp, found by search, in the page's colour
    "svg.hashsalt": "wellfed",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.formatter.useoffset": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def colour_of_page(stand_in: str) -> str:
    """Returns the page's colour for `INK` and the like, for legends in HTML, which wrap."""
    return _OF_THE_PAGE[stand_in]


@dataclass
class Picture:
    """A matplotlib figure to draw on, and its SVG."""

    figure: Figure
    told: str = ""
    """Description of the picture in words, for readers who can't see it."""
    svg: Markup = field(default=Markup(""))
    """SVG element, set when the ``with`` block ends."""


def no_pictures() -> str:
    """Returns the line that a page shows in place of its pictures; empty where matplotlib is installed."""
    return (
        "" if is_installed("matplotlib") else f"Pictures need the package matplotlib. Install it: {install('plots')}."
    )


@contextmanager
def picture(width: float, height: float) -> Iterator[Picture]:
    """Yields a figure of this size in inches of 72 pixels; the page scales it to its width. Needs matplotlib.

    Matplotlib's text is to hold nothing of the user's but what `show_text` has gone over; HTML in it is escaped.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        drawn = Picture(Figure(figsize=(width, height), layout="constrained"))
        yield drawn
        stream = io.StringIO()
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawn.figure.savefig(stream, format="svg", transparent=True, metadata=none)
    svg = stream.getvalue()
    svg = re.sub(r' d="[^"]*"', _short, svg[svg.index("<svg") :])
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # each picture of a page would have the same
    for stand_in, colour in _OF_THE_PAGE.items():
        svg = svg.replace(stand_in, colour)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r' height="[^"]*pt"', "", svg, count=1), count=1)
    drawn.svg = Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(drawn.told)}"', 1))


def _short(path: re.Match[str]) -> str:
    """Returns a path with points rounded to a tenth of a pixel: half the bytes."""
    return re.sub(r"\s+", " ", re.sub(r"(\.\d)\d+", r"\1", path[0]))

"""Fills in the templates of HTML pages. Every value is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from wellfed.explain.pages.chart import Colour
from wellfed.masking import hidden
from wellfed.units import counted, show_gib, show_percent, show_text

_LIVE = ("uplot/uPlot.js", "charts.js", "charts.css")
"""Library, script and style of live charts."""
_FOLDER = Path(__file__).parent
_SCRIPT_HERE = "<!--script-->"
"""Comment of ``base.html.j2`` that the script takes the place of."""


def fill_in(template: Path, values: Mapping[str, Any]) -> str:
    """Returns the page; a template may extend ``base.html.j2``."""
    pages = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(shell=shlex.join, counted=counted, percent=show_percent, gib=show_gib)
    pages.globals["colour_names"] = get_args(Colour)
    html = pages.get_template(template.name).render(**values)
    # Texts of users are escaped, and hold no such comment.
    return hidden(html).replace(_SCRIPT_HERE, script() if ' alive"' in html else "", 1)


@cache
def script() -> str:
    """Returns the HTML of script and style of live charts."""
    library, own, style = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in _LIVE)
    terms = (_FOLDER / "uplot" / "LICENSE").read_text(encoding="utf-8").strip()
    about = f"<!-- The charts are drawn by uPlot, https://github.com/leeoniya/uPlot\n{terms} -->"
    return f"{about}\n<style>{style}</style>\n<script>{library}\n{own}</script>"


def _shown(value: Any) -> Any:
    """Returns plain text without control characters; HTML stays unchanged."""
    return show_text(value) if type(value) is str else value

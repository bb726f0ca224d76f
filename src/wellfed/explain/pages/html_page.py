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
from wellfed.units import counted, show_text

_FOLDER = Path(__file__).parent


def fill_in(template: Path, values: Mapping[str, Any]) -> str:
    """Returns the page; a template may extend ``base.html.j2``."""
    html = templates(template.parent).get_template(template.name).render(**values)
    # Texts of users are escaped, and hold no such comment.
    return hidden(html).replace("<!--script-->", script() if ' alive"' in html else "", 1)


@cache
def templates(folder: Path) -> Environment:
    """Returns the templates of a folder and of this one; each is compiled once a process."""
    pages = Environment(
        loader=FileSystemLoader([folder, _FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: show_text(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(shell=shlex.join, counted=counted)
    pages.globals["colour_names"] = get_args(Colour)
    return pages


@cache
def script() -> str:
    """Returns the HTML of library, script and style of live charts."""
    names = ("uplot/LICENSE", "charts.css", "uplot/uPlot.js", "charts.js")
    terms, style, library, own = (_FOLDER.joinpath(name).read_text(encoding="utf-8") for name in names)
    about = f"<!-- The charts are drawn by uPlot, https://github.com/leeoniya/uPlot\n{terms.strip()} -->"
    return f"{about}\n<style>{style}</style>\n<script>{library}\n{own}</script>"

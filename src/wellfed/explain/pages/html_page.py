"""Fills in the templates of pages, in which every value is shown as text whatever it holds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from wellfed.units import counted, show_gib, show_percent, show_text


def fill_in(
    template: Path,
    values: Mapping[str, Any],
    *,
    autoescape: bool = True,
    filters: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
) -> str:
    """Returns the page; a template may extend ``base.html.j2``.

    Args:
        autoescape: for HTML; Markdown brings filters of its own.
        filters: beside shell, counted, percent, gib.
    """
    pages = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(shell=shlex.join, counted=counted, percent=show_percent, gib=show_gib, **filters)
    return pages.get_template(template.name).render(**values)


def _shown(value: Any) -> Any:
    """Returns plain text without control characters; HTML stays unchanged."""
    return show_text(value) if type(value) is str else value

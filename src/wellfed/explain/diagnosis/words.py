"""Renders the words of findings, which are templates in ``findings.toml``.

``{wait_frac}`` shows a figure in the unit that ends its name, ``{cores:g}`` in a format, ``{steps|step}`` with a noun.
A clause in square brackets is left out if one of its figures is missing or False. A figure that is True shows nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from wellfed.units import MIB, counted, show_bytes, show_duration, show_factor, show_gib, show_ms, show_percent

Figures = dict[str, float | int | str | None]
"""Figures behind a finding, by name, with units in the names."""
_CLAUSE = re.compile(r"\[([^\[\]]*)\]")
_FIGURE = re.compile(r"\{(\w+)(?:([:|])([^}]*))?\}")
_UNITS: Mapping[str, Callable[[Any], str]] = {
    "frac": show_percent,
    "ms": show_ms,
    "s": show_duration,
    "gib": show_gib,
    "mib": lambda mib: show_bytes(mib * MIB),
    "pct": lambda pct: f"{pct:.0f} %",
    "mhz": lambda mhz: f"{mhz:.0f} MHz",
    "factor": show_factor,
}
"""End of a figure's name -> how it is shown."""


@cache
def _words() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def template(finding: str, key: str, case: str = "", *, for_script: bool = False) -> str:
    """Returns words of a finding: those of the case, else its usual ones; empty if it has none.

    Args:
        key: ``message``, ``advice``, ``otherwise`` (advice if there are no overrides) or ``word`` (of the verdict).
        case: name of a table below that of the finding.
        for_script: whether words for a watched script, which has no overrides, come first.
    """
    tables = [_words().get(finding, {}).get(case, {})] if case else []
    for table in (*tables, _words().get(finding, {})):
        for found in ([table.get("script", {})] if for_script else []) + [table]:
            if key in found:
                return str(found[key])
    return ""


def code_for(knob: str, value: str) -> str:
    """Returns code that has the effect of an override in a script; empty if there is none."""
    known = _words()["_code"].get(knob, {})
    return str(known.get(value, known.get("any", ""))).format(value)


def rendered(text: str, figures: Figures) -> str:
    """Returns a template with figures; raises KeyError for an unknown one outside of a clause."""

    def clause(match: re.Match[str]) -> str:
        used = [figures.get(one.group(1)) for one in _FIGURE.finditer(match.group(1))]
        return "" if any(one is None or one is False for one in used) else match.group(1)

    return _FIGURE.sub(lambda match: _shown(match, figures), _CLAUSE.sub(clause, text))


def _shown(match: re.Match[str], figures: Figures) -> str:
    name, kind, form = match.groups()
    value: Any = figures[name]
    if kind == "|":
        return counted(value, form)
    if kind == ":":
        return format(value, form)
    if isinstance(value, bool):
        return ""
    show = _UNITS.get(name.rpartition("_")[2]) if "_" in name and not isinstance(value, str) else None
    return str(value) if show is None else show(value)

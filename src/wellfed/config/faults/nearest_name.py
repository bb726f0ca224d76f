"""Finds the name that a typo meant ("did you mean")."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields

from wellfed.config.knobs import all_knobs


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate closest to ``name``; None if none is close."""
    options = list(candidates)
    same_case = {option.lower(): option for option in options}
    found = difflib.get_close_matches(name.lower(), same_case, n=1, cutoff=0.6)
    if found:
        return same_case[found[0]]
    parts = [option for option in options if name and (option.startswith(name) or name.startswith(option))]
    return parts[0] if len(parts) == 1 else None


def nearest_knob(schema_type: type, dotted: str) -> str | None:
    """Returns the knob or group closest to a wrong name: similar as a whole, or with the same last part."""
    knobs = all_knobs(schema_type)
    group, _, name = dotted.rpartition(".")
    if not group and (near_group := nearest(name, [entry.name for entry in fields(schema_type)])):
        return near_group
    sibling = nearest(name, [knob.rpartition(".")[2] for knob in knobs if knob.rpartition(".")[0] == group])
    if sibling and group:
        return f"{group}.{sibling}"
    namesakes = [knob for knob in knobs if knob.rpartition(".")[2] == name]
    if len(namesakes) == 1:
        return namesakes[0]
    found = difflib.get_close_matches(dotted, knobs, n=1, cutoff=0.8)
    return found[0] if found and nearest(name, [found[0].rpartition(".")[2]]) else None

"""Why the schema refuses a name or a value, in words, and what to type instead."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

from wellfed.config.docs import help_of
from wellfed.config.faults.knobs import (
    FREE_NODES,
    in_words,
    is_enum,
    is_optional,
    knob_type,
    nearest,
    nearest_knob,
    type_of,
)


def explain(schema_type: type, dotted: str, error: Exception | None = None) -> tuple[str, str]:
    """(problem, way out) for a knob that could not be set; ``dotted`` without ``+`` or ``~``."""
    dotted = dotted.split("[", maxsplit=1)[0]
    reason = str((error and error.__cause__) or error).splitlines()[0].rstrip(".")
    if any(dotted == node or dotted.startswith(f"{node}.") for node in FREE_NODES) and error is not None:
        return f"does not fit: {reason}.", ""
    annotation = knob_type(schema_type, dotted)
    if annotation is None:
        return "no such knob.", _where_instead(schema_type, dotted)
    if is_enum(annotation):
        near = nearest(_value_in(reason), in_words(annotation).removeprefix("one of ").split(", "))
        return f"must be {in_words(annotation)}.", f"Did you mean {dotted}={near}?" if near else ""
    meaning = help_of(dotted, schema_type)
    if error is not None and "{..}" in in_words(annotation):  # which part of an entry is wrong
        return f"must be {in_words(annotation)}: {reason}.", f"{dotted}: {meaning}"
    return f"must be {in_words(annotation)}.", f"{dotted}: {meaning}" if meaning else ""


def suggestion(schema_type: type, dotted: str) -> str | None:
    """The existing knob or group that a wrong name most likely meant."""
    if "." not in dotted:
        near_group = nearest(dotted, [entry.name for entry in fields(schema_type)])
        if near_group:
            return near_group
    return nearest_knob(schema_type, dotted)


def explain_delete(schema_type: type, dotted: str) -> tuple[str, str]:
    """(problem, way out) for ``~knob``."""
    annotation = knob_type(schema_type, dotted)
    if annotation is None:
        return "there is no such entry to take away.", _where_instead(schema_type, dotted)
    way_out = f"Write {dotted}=null." if is_optional(annotation) else f"Set it: it is {in_words(annotation)}."
    return "a knob can't be taken away.", way_out


def _value_in(reason: str) -> str:
    """The value that OmegaConf's message quotes."""
    quoted = re.search(r"value '(.*?)'", reason, re.IGNORECASE)
    return quoted.group(1) if quoted else ""


def _where_instead(schema_type: type, dotted: str) -> str:
    near = suggestion(schema_type, dotted)
    if near:
        return f"Did you mean {near}?"
    group = dotted.rpartition(".")[0]
    owner: object = schema_type
    for name in group.split(".") if group else ():
        owner = type_of(owner, name) if isinstance(owner, type) else None
    if isinstance(owner, type) and is_dataclass(owner):
        names = ", ".join(entry.name for entry in fields(owner))
        return f"{group} has {names}." if group else f"There are {names}."
    return "All knobs: python src/train.py --cfg job"

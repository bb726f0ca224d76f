"""Explains why the schema refuses a name or a value, and what to type instead."""

from __future__ import annotations

import re
from dataclasses import fields

from omegaconf.errors import GrammarParseError

from wellfed.command_line import command
from wellfed.config.faults.foreign_names import our_value, ours_for
from wellfed.config.faults.foreign_names import nearest, nearest_knob
from wellfed.config.knobs import FREE_NODES, entries, is_free


def explain(schema_type: type, dotted: str, error: Exception | None = None) -> tuple[str, str]:
    """Returns problem and way out for a knob that could not be set; ``dotted`` without ``+`` or ``~``."""
    dotted = dotted.split("[", maxsplit=1)[0]
    cause = (error and error.__cause__) or error
    reason = str(cause).splitlines()[0].rstrip(".")
    if isinstance(cause, GrammarParseError):
        return f"holds a '${{' that can't be read: {reason}.", "Write ${group.knob}, or \\${ where the signs are meant."
    knob = entries(schema_type).get(dotted)
    if is_free(f"{dotted}.") and error is not None and (knob is None or dotted in FREE_NODES):
        return f"does not fit: {reason}.", ""
    if knob is None:
        meant, note = ours_for(dotted, "", entries(schema_type))
        way_out = f"Did you mean {meant}? {note}".rstrip() if meant else note
        return "no such knob.", way_out or _where_instead(schema_type, dotted)
    if knob.is_enum:
        quoted = re.search(r"value '(.*?)'", reason, re.IGNORECASE)  # by OmegaConf's message
        typed = quoted.group(1) if quoted else ""
        near = our_value(dotted, typed) or nearest(typed, (one.name for one in knob.type))
        return f"must be {knob.takes}.", f"Did you mean {dotted}={near}?" if near else ""
    if error is not None and "{..}" in knob.takes:  # names the wrong part of an entry
        return f"must be {knob.takes}: {reason}.", f"{dotted}: {knob.text}"
    return f"must be {knob.must_be}.", f"{dotted}: {knob.text}"


def explain_delete(schema_type: type, dotted: str) -> tuple[str, str]:
    """Returns problem and way out for ``~knob``."""
    knob = entries(schema_type).get(dotted)
    if knob is None:
        return "there is no such entry to take away.", _where_instead(schema_type, dotted)
    way_out = f"Write {dotted}=null." if knob.is_optional else f"Set it: it is {knob.must_be}."
    return "a knob can't be taken away.", way_out


def _where_instead(schema_type: type, dotted: str) -> str:
    near = nearest_knob(schema_type, dotted)
    if near:
        return f"Did you mean {near}?"
    group = dotted.rpartition(".")[0]
    if not group:
        return f"There are {', '.join(entry.name for entry in fields(schema_type))}."
    owner = entries(schema_type).get(group)
    if owner is not None and owner.is_group:
        return f"{group} has {', '.join(entry.name for entry in fields(owner.type))}."
    return f"All knobs: {command('train')} --cfg job"

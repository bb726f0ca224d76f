"""What the schema says about a dotted name: whether there is such a knob, its type in words, what is near it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

FREE_NODES = ("workload.model", "workload.data", "workload.optimizer")
"""Where any argument may be written; ``check.py`` holds these against the signature of their `_target_`."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def type_of(owner: type, name: str) -> Any:
    """The type of a field without its Optional; None where the class has no such field."""
    annotation = _hints(owner).get(name) if is_dataclass(owner) else None
    return _bare(annotation)


def _bare(annotation: Any) -> Any:
    if get_origin(annotation) is Union:
        inner = [arg for arg in get_args(annotation) if arg is not NoneType]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


def knob_type(schema_type: type, dotted: str) -> Any:
    """The full annotation of a knob (Optional kept); None where there is no such knob."""
    annotation: Any = schema_type
    for name in dotted.split("."):
        owner = _bare(annotation)
        if not (isinstance(owner, type) and is_dataclass(owner)) or name not in _hints(owner):
            return None
        annotation = _hints(owner)[name]
    return annotation


def is_optional(annotation: Any) -> bool:
    """Whether null is a value of the knob."""
    return get_origin(annotation) is Union and NoneType in get_args(annotation)


def is_enum(annotation: Any) -> bool:
    """Whether the knob takes one of a few names."""
    bare = _bare(annotation)
    return isinstance(bare, type) and issubclass(bare, Enum)


def in_words(annotation: Any) -> str:
    """A type as a reader says it: ``a whole number or null``, ``one of auto, ddp, fsdp``."""
    bare = _bare(annotation)
    if is_enum(annotation):
        text = "one of " + ", ".join(bare.__members__)
    elif get_origin(bare) is list:
        (inner,) = get_args(bare)
        names = ", ".join(inner.__members__) if is_enum(inner) else "{..} entries"
        text = "a list [..] of " + {int: "whole numbers", str: "texts"}.get(inner, names)
    elif isinstance(bare, type) and is_dataclass(bare):
        text = "a group of knobs (" + ", ".join(entry.name for entry in fields(bare)) + ")"
    else:
        text = _WORDS.get(bare, "any value")
    return f"{text} or null" if is_optional(annotation) else text


def all_knobs(schema_type: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaf knobs of a schema."""
    for entry in fields(schema_type):
        inner = type_of(schema_type, entry.name)
        if isinstance(inner, type) and is_dataclass(inner):
            yield from all_knobs(inner, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def stand_in(schema_type: type, dotted: str) -> Any:
    """A value of the right type for a knob whose own can't be known: its default, or the smallest that is legal."""
    *groups, name = dotted.split(".")
    owner: Any = schema_type
    for group in groups:
        owner = type_of(owner, group)
    for entry in fields(owner) if is_dataclass(owner) else ():
        if entry.name == name:
            if entry.default_factory is not NO_DEFAULT:
                return entry.default_factory()
            if entry.default != MISSING:
                return entry.default
            return {int: 1, float: 1.0, str: "unknown"}.get(type_of(owner, name))
    return None


def in_order(names: Iterable[str]) -> list[str]:
    """Names as a reader counts them: 8gb before 16gb, numbers before words."""
    return sorted(
        names,
        key=lambda name: [
            (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)
        ],
    )


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a typo of ``name`` most likely meant; None where nothing is near."""
    options = list(candidates)
    same_case = {option.lower(): option for option in options}
    found = difflib.get_close_matches(name.lower(), same_case, n=1, cutoff=0.6)
    if found:
        return same_case[found[0]]
    parts = [option for option in options if name and (option.startswith(name) or name.startswith(option))]
    return parts[0] if len(parts) == 1 else None


def nearest_knob(schema_type: type, dotted: str) -> str | None:
    """The knob that a wrong dotted name most likely meant: near as a whole, or the same last word elsewhere."""
    knobs = list(all_knobs(schema_type))
    group, _, name = dotted.rpartition(".")
    sibling = nearest(name, [knob.rpartition(".")[2] for knob in knobs if knob.rpartition(".")[0] == group])
    if sibling and group:
        return f"{group}.{sibling}"
    namesakes = [knob for knob in knobs if knob.rpartition(".")[2] == name]
    if len(namesakes) == 1:
        return namesakes[0]
    found = difflib.get_close_matches(dotted, knobs, n=1, cutoff=0.8)
    return found[0] if found and nearest(name, [found[0].rpartition(".")[2]]) else None

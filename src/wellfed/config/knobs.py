"""Reads the schema: its knobs, their types and meanings."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

FREE_NODES = (
    "workload.model",
    "workload.data",
    "workload.optimizer",
    "workload.metrics",
    "callbacks",
    "trainer.lightning",
)
"""Nodes with any arguments; ``faults.target_faults`` checks them against the signature of their `_target_`."""
OPEN_NODES = ("workload.schedule", "paths")
"""Groups of knobs that may also hold other keys: a `_target_` with any arguments, folders of the user's own."""

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def is_free(name: str) -> bool:
    """Returns whether a name lies within `FREE_NODES` or `OPEN_NODES`, which accept any name."""
    return name.startswith(tuple(f"{node}." for node in (*FREE_NODES, *OPEN_NODES)))


@dataclass(frozen=True)
class Range:
    """Limits of a number; null passes if the schema allows it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Returns whether ``value`` is a number within; NaN and infinity never are."""
        lowest, highest = -math.inf if self.at_least is None else self.at_least, self.at_most or math.inf
        return (
            isinstance(value, (int, float))
            and lowest <= value <= highest
            and (-math.inf if self.above is None else self.above) < value < (self.below or math.inf)
        )

    def legal_value(self, like: float) -> str:
        """Returns a value within the range, as typed: a whole number if ``like`` is one."""
        if self.at_least is not None:
            return _limit(self.at_least)
        return _limit(1 if isinstance(like, int) or self.at_most is None else self.at_most)

    def __str__(self) -> str:
        limits = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {_limit(limit)}" for sign, limit in limits if limit is not None)


def _limit(number: float) -> str:
    return "2**63" if number == 2**63 else f"{number:g}"


@dataclass(frozen=True)
class Knob:
    """One entry of the schema: a knob, or a group of them."""

    name: str
    """Dotted, as typed."""
    annotation: Any
    field: Field[Any]

    @property
    def type(self) -> Any:
        """Annotation without its Optional."""
        return without_none(self.annotation)

    @property
    def is_group(self) -> bool:
        """Whether the entry holds other knobs."""
        return is_dataclass(self.type)

    @property
    def is_enum(self) -> bool:
        """Whether the knob takes one of a few names."""
        return isinstance(self.type, type) and issubclass(self.type, Enum)

    @property
    def is_optional(self) -> bool:
        """Whether the knob may be null."""
        return self.type is not self.annotation

    @property
    def default(self) -> Any:
        """A fresh default; ``???`` if a value must be given."""
        return self.field.default if self.field.default_factory is NO_DEFAULT else self.field.default_factory()

    @property
    def text(self) -> str:
        """Description on one line."""
        return str(inspect.getdoc(self.type) if self.is_group else self.field.metadata["text"])

    @property
    def range(self) -> Range | None:
        """Limits of the number, or of each number in a list."""
        return self.field.metadata.get("range")

    @property
    def must_be(self) -> str:
        """Type and range in words: ``a whole number >= 1 or null``."""
        words = f"{self._in_words()} {self.range}" if self.range else self._in_words()
        return f"{words} or null" if self.is_optional else words

    def _in_words(self) -> str:
        if self.is_enum:
            return "one of " + ", ".join(one.name for one in self.type)
        if get_origin(self.type) is list:
            (inner,) = get_args(self.type)
            names = {int: "whole numbers", str: "texts"}
            return f"a list [..] of {names.get(inner) or ', '.join(one.name for one in inner)}"
        if self.is_group:
            return "a group of knobs (" + ", ".join(entry.name for entry in fields(self.type)) + ")"
        return _WORDS.get(self.type, "any value")


def without_none(annotation: Any) -> Any:
    """Returns ``X`` of ``Optional[X]``."""
    if get_origin(annotation) is Union:
        inner = [arg for arg in get_args(annotation) if arg is not NoneType]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


@cache
def entries(schema_type: type) -> Mapping[str, Knob]:
    """Returns entries by dotted name in the schema's order, each group before its members."""

    def walk(owner: type, prefix: str) -> Iterator[Knob]:
        annotations = get_type_hints(owner)
        for entry in fields(owner):
            knob = Knob(f"{prefix}{entry.name}", annotations[entry.name], entry)
            yield knob
            if knob.is_group:
                yield from walk(knob.type, f"{knob.name}.")

    return {knob.name: knob for knob in walk(schema_type, "")} if is_dataclass(schema_type) else {}


def all_knobs(schema_type: type) -> list[str]:
    """Returns dotted names of all knobs of a schema, without the groups."""
    return [name for name, entry in entries(schema_type).items() if not entry.is_group]


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of each entry of nested mappings; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names in natural order: 8gb before 16gb, numbers before words."""
    return sorted(
        names,
        key=lambda name: [
            (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)
        ],
    )

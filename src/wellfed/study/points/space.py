"""Makes the space of a search: an axis has values to choose from, or numbers between two bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wellfed.config.multirun import Varied
from wellfed.errors import ConfigError, Fault

LOG_FROM = 100
"""Ratio of end to start from which an interval above 0 is logarithmic, unless it is tagged linear."""
_TAGS = {"log", "linear"}


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[str, ...]
    """Values as typed."""

    @property
    def size(self) -> int | None:
        """Number of values."""
        return len(self.values)

    @property
    def middle(self) -> str:
        """The value in the middle."""
        return self.values[len(self.values) // 2]

    def __str__(self) -> str:
        return ", ".join(self.values)


@dataclass(frozen=True)
class Numbers:
    """All numbers between two bounds, bounds included."""

    low: float
    high: float
    is_log: bool = False
    """Logarithmic: as many trials between 0.001 and 0.01 as between 0.01 and 0.1."""
    step: int | None = None
    """Distance of whole numbers; None = any number."""

    @property
    def size(self) -> int | None:
        """Number of values; None = infinite."""
        return None if self.step is None else len(self.numbers)

    @property
    def numbers(self) -> range:
        """All numbers, if they are whole."""
        assert self.step is not None
        return range(int(self.low), int(self.high) + 1, self.step)

    def text(self, number: float) -> str:
        """Returns a number as it is typed."""
        return str(int(number)) if self.step is not None else repr(float(number))

    @property
    def middle(self) -> str:
        """The number in the middle, of a logarithmic axis the geometric mean."""
        if self.step is not None:
            return str(self.numbers[len(self.numbers) // 2])
        return self.text(math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2)

    def __str__(self) -> str:
        bounds = f"{self.text(self.low)} to {self.text(self.high)}" if self.step else f"{self.low:g} to {self.high:g}"
        steps = f" in steps of {self.step}" if self.step not in (None, 1) else ", whole" if self.step else ""
        return bounds + steps + (", log" if self.is_log else "")


Axis = Choices | Numbers
Space = Mapping[str, Axis]
"""Knob or group -> axis."""


def space_of(varied: Mapping[str, Varied]) -> dict[str, Axis]:
    """Returns the axes.

    Raises:
        ConfigError: lists all that are not axes.
    """
    space: dict[str, Axis] = {}
    faults: list[Fault] = []
    for name, each in varied.items():
        found = _fault(name, each) or _axis(each)
        if isinstance(found, Fault):
            faults.append(found)
        else:
            space[name] = found
    if faults:
        raise ConfigError(faults)
    return space


def _axis(varied: Varied) -> Axis:
    if varied.interval is not None:
        low, high = varied.interval
        is_wide = low > 0 and high / low >= LOG_FROM
        is_log = "log" in varied.tags or (is_wide and "linear" not in varied.tags)
        return Numbers(low, high, is_log, step=1 if varied.is_whole else None)
    step = _whole_step(varied)
    if step is None:
        return Choices(varied.values)
    low, high = sorted((int(varied.values[0]), int(varied.values[-1])))
    return Numbers(low, high, "log" in varied.tags, step)


def _whole_step(varied: Varied) -> int | None:
    """Returns the step of a range of whole numbers; None for other values, or fewer than three."""
    if not varied.is_range or len(varied.values) < 3:
        return None
    try:
        return abs(int(varied.values[1]) - int(varied.values[0]))
    except ValueError:
        return None


def _fault(name: str, varied: Varied) -> Fault | None:
    known = ", ".join(sorted(_TAGS))
    if strange := sorted(varied.tags - _TAGS):
        return Fault(varied.typed, f"has the tag {strange[0]}, and a search knows {known}.", "Leave it out.")
    if varied.tags == _TAGS:
        return Fault(varied.typed, "is tagged both log and linear.", "Leave one of them out.")
    if varied.interval is None:
        if varied.tags and _whole_step(varied) != 1:
            problem = "has a tag that is about numbers without gaps."
            return Fault(varied.typed, problem, f"Write {name}=tag(log,interval(1,100)), or leave out the tag.")
        if "log" in varied.tags and int(varied.values[0]) <= 0:
            return Fault(varied.typed, "has no logarithm at its start.", f"Write {name}=tag(log,range(1,100)).")
        return None
    low, high = varied.interval
    if not (math.isfinite(low) and math.isfinite(high)):
        return Fault(varied.typed, "has no bound on one side.", f"Name both: {name}=interval(0.1,10)")
    if low >= high:
        what = "is empty: its end is its start." if low == high else "ends before it starts."
        return Fault(varied.typed, what, f"Write {name}=interval({high:g},{low if low > high else 2 * high + 1:g}).")
    if "log" in varied.tags and low <= 0:
        problem = f"is searched by powers, and {low:g} has no logarithm."
        return Fault(varied.typed, problem, f"Start above 0, or leave out the tag: {name}=interval({low:g},{high:g})")
    return None


def size(space: Space) -> int | None:
    """Returns the number of points; None = infinite."""
    sizes = [axis.size for axis in space.values()]
    return None if None in sizes else math.prod(each for each in sizes if each is not None)


def grid_values(space: Space) -> dict[str, tuple[str, ...]]:
    """Returns axis -> all values of a finite space."""
    return {
        name: axis.values if isinstance(axis, Choices) else tuple(map(str, axis.numbers))
        for name, axis in space.items()
    }


def describe(space: Space) -> str:
    """Returns the axes in a line."""
    return "; ".join(f"{name}: {axis}" for name, axis in space.items())


def from_dict(found: Mapping[str, Any]) -> dict[str, Axis]:
    """Returns the space of plain data, as JSON has it."""
    return {
        name: Choices(tuple(axis["values"])) if "values" in axis else Numbers(**axis) for name, axis in found.items()
    }


def show_value(text: str) -> str:
    """Returns a number with four digits, anything else as typed."""
    if "." not in text and "e" not in text:
        return text
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text

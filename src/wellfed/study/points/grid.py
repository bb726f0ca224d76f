"""Makes the points of a grid: every combination of the axes' values, each with an id made of its overrides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

OF_THE_SWEEP = ("sweep", "search", "hydra", "logger", "telemetry")
"""Groups that set how a study is run or watched."""
NO_AXES = (*OF_THE_SWEEP, "paths")
"""Groups in which points never differ: they are no axes, and no part of a point's id."""


BASELINE = "baseline"
"""The option of the group ``loader`` that others are compared with: torch's DataLoader with its defaults."""


@dataclass(frozen=True)
class GridPoint:
    """One combination."""

    id: str
    values: Mapping[str, str]
    """Axis -> value, as typed."""
    overrides: tuple[str, ...]
    """All overrides of its configuration, as typed: what all points share first, then the values."""


@dataclass(frozen=True)
class Grid:
    """Axes that vary, and what all points share."""

    axes: Mapping[str, tuple[str, ...]]
    """Knob or group -> values, as typed and in order; no value twice."""
    fixed: tuple[str, ...] = ()
    """Overrides that all points share."""

    @property
    def size(self) -> int:
        """Number of points, without making any."""
        return prod(len(values) for values in self.axes.values())

    def points(self) -> list[GridPoint]:
        """Returns all combinations; the last axis varies fastest."""
        return [
            point_of(dict(zip(self.axes, chosen, strict=True)), self.fixed) for chosen in product(*self.axes.values())
        ]


def point_of(values: Mapping[str, str], fixed: Sequence[str]) -> GridPoint:
    """Returns the point of these values behind the overrides that all share."""
    overrides = (*fixed, *(f"{axis}={value}" for axis, value in values.items()))
    return GridPoint(point_id(overrides), values, overrides)


def baselines_of(points: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Returns the ids of points, each with the id of the one that has ``loader=baseline`` and equals it in all else.

    Args:
        points: id -> values. A point without an axis ``loader``, or without such another, is left out.
    """
    ids = {frozenset(values.items()): point for point, values in points.items()}
    found = {
        point: ids.get(frozenset({**values, "loader": BASELINE}.items()))
        for point, values in points.items()
        if "loader" in values
    }
    return {point: baseline for point, baseline in found.items() if baseline is not None}


def point_id(overrides: Sequence[str]) -> str:
    """Returns 10 hex digits; the order of overrides and those of `NO_AXES` don't count."""
    counted = sorted(text for text in overrides if group_of(text) not in NO_AXES)
    return hashlib.sha256("\n".join(counted).encode(errors="surrogatepass")).hexdigest()[:10]


def of_one_run(overrides: Iterable[str]) -> list[str]:
    """Returns the overrides without those of the study, which a single run refuses."""
    return [text for text in overrides if group_of(text) not in ("sweep", "search", "hydra")]


def group_of(override: str) -> str:
    """Returns the group of an override or a dotted knob: ``loader`` for ``loader.backend=x``, ``hydra`` for
    ``hydra/launcher=x``."""
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return key.replace("/", ".").partition(".")[0]

"""Makes the points of a sweep: every combination of the axes' values, each with an id that its overrides decide."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from wellfed.record import write_atomically
from wellfed.study.sweep.folder_file import check_plain, parsed
from wellfed.study.sweep.objective import OBJECTIVES, SAMPLES_PER_S

FILE_NAME = "sweep.json"
SCHEMA = 1
OF_THE_SWEEP = ("sweep", "search", "hydra", "logger", "telemetry")
"""Groups that say how a sweep or a search is run or watched."""
NO_AXES = (*OF_THE_SWEEP, "paths")
"""Groups in which no two points differ: no axis, no part of what a point is."""


@dataclass(frozen=True)
class GridPoint:
    """One combination."""

    id: str
    values: Mapping[str, str]
    """Axis -> value, as typed."""
    overrides: tuple[str, ...]
    """All that its configuration is composed of, as typed: what all points share first, then the values."""


@dataclass(frozen=True)
class Grid:
    """What is varied, and what all points share."""

    axes: Mapping[str, tuple[str, ...]]
    """Knob or group -> values, as typed and in order; no value twice."""
    fixed: tuple[str, ...] = ()
    """Overrides that all points share."""

    @property
    def size(self) -> int:
        """Number of points, without making any."""
        return prod(len(values) for values in self.axes.values())

    def points(self) -> list[GridPoint]:
        """All combinations; the last axis turns fastest."""
        points = []
        for chosen in product(*self.axes.values()):
            values = dict(zip(self.axes, chosen, strict=True))
            overrides = (*self.fixed, *(f"{axis}={value}" for axis, value in values.items()))
            points.append(GridPoint(point_id(overrides), values, overrides))
        return points


def point_id(overrides: Sequence[str]) -> str:
    """10 hex digits; the order of overrides and those of `NO_AXES` don't count."""
    counted = sorted(text for text in overrides if group_of(text) not in NO_AXES)
    return hashlib.sha256("\n".join(counted).encode(errors="surrogatepass")).hexdigest()[:10]


def group_of(override: str) -> str:
    """The group that an override or a dotted knob is about: ``loader`` of ``loader=auto`` and of ``loader.backend=x``;
    ``hydra`` of ``hydra/launcher=x``."""
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return key.replace("/", ".").partition(".")[0]


@dataclass(frozen=True)
class SweepFile:
    """``sweep.json``: which sweep a folder holds, for its readers and for the same command again."""

    name: str
    workload: str
    sample_unit: str
    axes: Mapping[str, tuple[str, ...]]
    """With secrets as ``***``, as in ``fixed``."""
    fixed: tuple[str, ...]
    ids: tuple[str, ...]
    """Of the points, in the grid's order."""
    code: str
    """What identifies the version of the code: see `wellfed.study.trials.sweep`."""
    machine: str
    """Processor and GPUs, in words."""
    trial_steps: int = 0
    """Measured at most; 0 = not told."""
    flags: tuple[str, ...] = ()
    """Of the command line, where configurations are searched."""
    objective: str = SAMPLES_PER_S.name
    """What ranks the points: a name in `OBJECTIVES`."""

    @property
    def points(self) -> list[GridPoint]:
        """Of the grid that was asked for last; their overrides without secrets, so ids can't be made from them."""
        made = Grid(self.axes, self.fixed).points()
        return [replace(point, id=id_) for point, id_ in zip(made, self.ids, strict=True)]

    def write(self, folder: Path) -> None:
        """Replace the file as a whole."""
        write_atomically(folder / FILE_NAME, json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """What is written."""
        return {"schema": SCHEMA, **vars(self)}

    @classmethod
    def read(cls, folder: Path) -> SweepFile:
        """What a sweep folder says of itself.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a sweep's, or of a schema this version does not know.
        """
        with parsed(folder / FILE_NAME, "sweep", SCHEMA) as found:
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            check_plain(cls, known)
            known["axes"] = {str(axis): tuple(map(str, values)) for axis, values in found["axes"].items()}
            file = cls(**known | {name: tuple(map(str, found.get(name, ()))) for name in ("fixed", "ids", "flags")})
            if file.objective not in OBJECTIVES:
                raise ValueError(f"has objective {file.objective}; this version knows {', '.join(OBJECTIVES)}")
            if len(file.ids) != Grid(file.axes).size:
                raise ValueError(f"has {len(file.ids)} ids for a grid of {Grid(file.axes).size}")
            return file

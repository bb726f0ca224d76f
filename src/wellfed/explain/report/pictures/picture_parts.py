"""Holds what the pictures of a run share: their time axis with its phases, thinned curves, and readings by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Key, Kind, Stretch
from wellfed.observe.telemetry.series import HOST

MOST = 300
"""Maximum points of a curve in a picture; more are indistinguishable."""


def of_gpus(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Returns times and readings of a figure in every phase of the run, by GPU; empty for a run on the CPU."""
    gpus = [] if evidence.record.is_on_cpu else [gpu for gpu in sorted(evidence.watched) if gpu != HOST]
    return readings(evidence.watched, name, gpus)


def readings(
    curves: Mapping[int, Mapping[str, Series]], name: str, gpus: Iterable[int]
) -> dict[int, tuple[Series, Series]]:
    """Returns times and readings of a figure by GPU, or of the host; those without any are left out."""
    found = {}
    for gpu in gpus:
        at_s, values = (curves.get(gpu, {}).get(column, np.empty(0)) for column in ("time_s", name))
        there = np.isfinite(at_s) & np.isfinite(values) if len(at_s) == len(values) else np.zeros(0, bool)
        if there.any():
            found[gpu] = (at_s[there], values[there])
    return found


def binned(x: Series, values: Series, name: str = "", colour: Colour = "ink", *, kind: Kind = "line") -> ChartCurve:
    """Thins the curve of ``values`` at ``x``, both ``[readings]``, in order, to at most `MOST` points. Values that are
    not finite are left out. A line has a range if its points stand for several readings each.
    """
    there = np.isfinite(x) & np.isfinite(values)
    x, values = x[there], values[there]
    if len(x) <= MOST:
        return ChartCurve(name, colour, x, values, kind=kind)
    first = np.linspace(0, len(x), MOST, endpoint=False).astype(int)
    count = np.diff(np.append(first, len(x)))
    at, mean = np.add.reduceat(x, first) / count, np.add.reduceat(values, first) / count
    if kind != "line":
        return ChartCurve(name, colour, at, mean, kind=kind)
    return ChartCurve(name, colour, at, mean, np.minimum.reduceat(values, first), np.maximum.reduceat(values, first))


Pause = Literal["validate", "checkpoint", "test", "ceiling"]
PAUSES: tuple[Pause, ...] = ("validate", "checkpoint", "test", "ceiling")
"""Phases that a strip below the curves shows, each in the colour of its name; training has none."""
_LEAST_FRAC = 1 / 500
"""Distance of two stretches of a phase, as a share of the axis, below which they are drawn as one."""


@dataclass(frozen=True)
class TimeAxis:
    """Time axis from the first reading or step of a run to the last."""

    begin_s: float
    end_s: float
    strip: Sequence[Stretch] = field(default=())
    """Stretches of each phase but training."""

    @classmethod
    def of(cls, evidence: Evidence) -> TimeAxis:
        """Returns the axis of all pictures of a run."""
        tables = [evidence.all_steps, *evidence.watched.values()]
        at_s = np.concatenate([np.empty(0), *(table["time_s"] for table in tables if "time_s" in table)])
        at_s = at_s[np.isfinite(at_s)]
        if not len(at_s):
            return cls(0.0, 1.0)
        begin_s, end_s = float(at_s.min()), max(float(at_s.max()), float(at_s.min()) + 1e-3)
        return cls(begin_s, end_s, _strip(evidence, _LEAST_FRAC * (end_s - begin_s)))

    @property
    def axis(self) -> Axis:
        """The axis of a chart."""
        margin_s = 0.01 * (self.end_s - self.begin_s)
        return Axis(self.begin_s - margin_s, self.end_s + margin_s, "since the run started", is_time=True)

    def chart(self, unit: str, curves: Sequence[ChartCurve], top: float, told: str, **more: Any) -> Chart:
        """Returns a chart over this axis, linked to the others."""
        return Chart(unit, self.axis, curves, top, told=told, **{"spans": self.strip, "is_linked": True, **more})

    @property
    def keys(self) -> list[Key]:
        """A legend of the phases."""
        return [Key(colour, colour, "shade") for colour in dict.fromkeys(colour for *_, colour in self.strip)]


def _strip(evidence: Evidence, least_s: float) -> list[Stretch]:
    """Returns the stretches of each phase; those that lie close together are joined."""
    found: list[Stretch] = []
    for phase in PAUSES:
        for begin_s, end_s in sorted(_known(evidence, phase)):
            if found and found[-1][2] == phase and begin_s - found[-1][1] < least_s:
                found[-1] = (found[-1][0], max(end_s, found[-1][1]), phase)
            else:
                found.append((begin_s, end_s, phase))
    return found


def _known(evidence: Evidence, phase: str) -> list[tuple[float, float]]:
    """Returns stretches that end when the phase was recorded, each of the mean length; empty without records."""
    ended_s = evidence.ended.get({"validate": "val", "test": "test"}.get(phase, ""), np.empty(0)).tolist()
    if phase == "checkpoint":
        ended_s = [float(event["time_s"]) for event in evidence.record.events if event["kind"] == "checkpoint"]
    spent = evidence.record.phases.get(phase)
    usual_s = spent["total_s"] / spent["times"] if spent and spent["times"] else 0.0
    return [(at_s - usual_s, at_s) for at_s in ended_s]

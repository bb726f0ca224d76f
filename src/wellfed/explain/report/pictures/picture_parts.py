"""Holds what the pictures of a run share: their time axis with its phases, thinned curves, and readings by GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Key, Kind, Stretch
from wellfed.observe.telemetry.series import HOST
from wellfed.units import counted

MOST = 300
"""Maximum points of a curve in a picture; more are indistinguishable."""
_GAP = 6
"""Times the usual distance of readings: further apart there is a gap between them."""


def of_many(number: int, noun: str) -> str:
    """Returns the caption of a curve of ``number`` readings."""
    if number <= MOST:
        return f"{counted(number, noun)[0].upper()}{counted(number, noun)[1:]}."
    return f"{counted(number, noun)}: mean and range of those that lie together."


def of_gpus(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Returns times and readings of a figure in every phase of the run, by GPU; empty for a run on the CPU."""
    if evidence.record.is_on_cpu:
        return {}
    return readings(evidence.watched, name, [gpu for gpu in sorted(evidence.watched) if gpu != HOST])


def of_host(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Returns the same for the host."""
    return readings(evidence.watched, name, [HOST])


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


def binned(
    x: Series,
    values: Series,
    name: str = "",
    colour: Colour = "ink",
    *,
    lasts: Series | None = None,
    kind: Kind = "line",
) -> ChartCurve:
    """Thins the curve of ``values`` at ``x``, both ``[readings]``, in order, to at most `MOST` points; where one is not
    finite, there is a gap. A line has a range if its points stand for several readings each.

    Args:
        lasts: the length of ``x`` that each value is about, where that differs.
    """
    there = np.isfinite(x) & np.isfinite(values)
    x, values = x[there], values[there]
    number = len(x)
    if number == 0:
        return ChartCurve(name, colour, x, values, kind=kind)
    late = _gaps(x, np.zeros(number) if lasts is None else lasts[there])
    gaps = np.union1d(late, 1 + np.flatnonzero(np.diff(np.flatnonzero(there)) > 1))
    gaps = gaps if len(gaps) <= MOST else late
    first = np.unique(np.append(np.linspace(0, number, min(MOST, number), endpoint=False).astype(int), gaps))
    count = np.diff(np.append(first, number))
    found = [np.add.reduceat(values, first) / count]
    if number > MOST and kind == "line":
        found += [np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)]
    breaks, at = np.searchsorted(first, gaps), np.add.reduceat(x, first) / count
    x = np.insert(at, breaks, (at[breaks - 1] + at[breaks]) / 2)
    mean, *edges = (np.insert(curve, breaks, np.nan) for curve in found)
    low, high = (edges[0], edges[1]) if edges else (None, None)
    return ChartCurve(name, colour, x, mean, low, high, kind)


def _gaps(x: Series, lasts: Series) -> npt.NDArray[np.intp]:
    """Returns the places of the readings that follow a gap."""
    steps = np.diff(x)
    if len(steps) < 2 or not np.median(steps) > 0:
        return np.empty(0, dtype=np.intp)
    found = 1 + np.flatnonzero(steps > _GAP * np.maximum(np.median(steps), lasts[1:]))
    return found if len(found) <= MOST else found[:0]  # this irregular, it has none


Pause = Literal["validate", "checkpoint", "test", "ceiling"]
PAUSES: tuple[Pause, ...] = ("validate", "checkpoint", "test", "ceiling")
"""Phases that a strip below the curves shows, each in the colour of its name; training has none."""
_LEAST_FRAC = 1 / 250
"""Least width of a phase, as a share of the axis."""


@dataclass(frozen=True)
class TimeAxis:
    """Time axis from the first reading or step of a run to the last."""

    begin_s: float
    end_s: float
    spans: dict[Pause, list[tuple[float, float]]] = field(default_factory=dict)
    """Stretches of each phase but training, seconds."""

    @classmethod
    def of(cls, evidence: Evidence) -> TimeAxis:
        """Returns the axis of all pictures of a run."""
        tables = [evidence.all_steps, *evidence.watched.values()]
        times = [table["time_s"][np.isfinite(table["time_s"])] for table in tables if len(table.get("time_s", ()))]
        times = [at_s for at_s in times if len(at_s)]
        if not times:
            return cls(0.0, 1.0)
        begin_s, end_s = min(float(at_s.min()) for at_s in times), max(float(at_s.max()) for at_s in times)
        end_s = max(end_s, begin_s + 1e-3)
        return cls(begin_s, end_s, _spans(evidence, _LEAST_FRAC * (end_s - begin_s)))

    @property
    def span_s(self) -> float:
        """Length of the axis."""
        return self.end_s - self.begin_s

    @property
    def axis(self) -> Axis:
        """The axis of a chart."""
        margin_s = 0.01 * self.span_s
        return Axis(self.begin_s - margin_s, self.end_s + margin_s, "since the run started", "time")

    @property
    def strip(self) -> list[Stretch]:
        """The phases as stretches of a chart."""
        return [Stretch(*stretch, phase) for phase, stretches in self.spans.items() for stretch in stretches]

    def chart(self, unit: str, curves: Sequence[ChartCurve], top: float, told: str, **more: Any) -> Chart:
        """Returns a chart over this axis, linked to the others."""
        options = {"spans": self.strip, "is_linked": True, **more}
        return Chart(unit, self.axis, curves, top, told=told, **options)

    @property
    def keys(self) -> list[Key]:
        """A legend of the phases."""
        return [Key(phase, phase, "shade") for phase in self.spans]


def _spans(evidence: Evidence, least_s: float) -> dict[Pause, list[tuple[float, float]]]:
    """Returns the stretches of each phase; short ones are widened to be visible, and close ones joined."""
    found: dict[Pause, list[tuple[float, float]]] = {}
    for phase in PAUSES:
        for span in sorted(_known(evidence, phase)):
            short_s = max(0.0, least_s - (span[1] - span[0])) / 2
            begin_s, end_s = span[0] - short_s, span[1] + short_s
            stretches = found.setdefault(phase, [])
            if stretches and begin_s - stretches[-1][1] < least_s / 2:
                stretches[-1] = (stretches[-1][0], max(end_s, stretches[-1][1]))
            else:
                stretches.append((begin_s, end_s))
    return found


def _known(evidence: Evidence, phase: str) -> list[tuple[float, float]]:
    """Returns stretches that end when the phase was recorded, each of the mean length; empty without records."""
    ended_s = evidence.ended.get({"validate": "val", "test": "test"}.get(phase, ""), np.empty(0)).tolist()
    if phase == "checkpoint":
        ended_s = [float(event["time_s"]) for event in evidence.record.events if event["kind"] == "checkpoint"]
    spent = evidence.record.phases.get(phase)
    usual_s = spent["total_s"] / spent["times"] if spent and spent["times"] else 0.0
    return [(at_s - usual_s, at_s) for at_s in ended_s]

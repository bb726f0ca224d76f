"""Gives pictures of a run their common time axis, with the phases of the run shaded behind the curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.run_tables import HOST, PHASES, Series
from wellfed.pages.picture import ACCENT, SERIES
from wellfed.report.picture_parts import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES = {"validate": SERIES[1], "checkpoint": SERIES[0], "test": ACCENT, "ceiling": SERIES[3]}
"""Of phases; training has none."""
_LEAST_FRAC = 1 / 250
"""Of the axis: what lasted less is still to be seen."""
_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class TimeAxis:
    """From the first reading or step of a run to the last."""

    begin_s: float
    end_s: float
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Stretches of each phase but training, seconds."""

    @classmethod
    def of(cls, evidence: Evidence) -> TimeAxis:
        """That of all pictures of a run."""
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
        """Its length."""
        return self.end_s - self.begin_s

    @property
    def _unit(self) -> tuple[float, str]:
        return next((size_s, name) for least_s, size_s, name in _UNITS if self.end_s >= least_s)

    def scaled(self, at_s: Series) -> Series:
        """In the unit of the axis."""
        return at_s / self._unit[0]

    def put_under(self, axes: Axes, *, is_labelled: bool = True) -> None:
        """Set it on a picture."""
        size_s, name = self._unit
        margin_s = 0.01 * self.span_s
        axes.set_xlim((self.begin_s - margin_s) / size_s, (self.end_s + margin_s) / size_s)
        axes.tick_params(labelbottom=is_labelled)
        if is_labelled:
            axes.set_xlabel(f"{name} since the run started")

    def shade(self, axes: Axes) -> None:
        """Draw the phases."""
        size_s, _ = self._unit
        for phase, stretches in self.spans.items():
            for begin_s, end_s in stretches:
                axes.axvspan(begin_s / size_s, end_s / size_s, color=SHADES[phase], alpha=0.22, linewidth=0)

    @property
    def keys(self) -> list[Key]:
        """A legend of the phases."""
        return [Key(SHADES[phase], phase, "shade") for phase in self.spans]


def _spans(evidence: Evidence, least_s: float) -> dict[str, list[tuple[float, float]]]:
    """A reading tells of the time since the one before; those of checkpoints that fell between two are added."""
    found: dict[str, list[tuple[float, float]]] = {}
    for phase, *span in sorted([*_watched(evidence), *_saved(evidence)], key=lambda one: one[1]):
        short_s = max(0.0, least_s - (span[1] - span[0])) / 2
        begin_s, end_s = span[0] - short_s, span[1] + short_s
        stretches = found.setdefault(phase, [])
        if stretches and begin_s - stretches[-1][1] < least_s / 2:
            stretches[-1] = (stretches[-1][0], max(end_s, stretches[-1][1]))
        else:
            stretches.append((begin_s, end_s))
    return {phase: found[phase] for phase in SHADES if phase in found}


def _watched(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    curve = evidence.watched.get(HOST) or next(iter(evidence.watched.values()), {})
    at_s, phases = curve.get("time_s", np.empty(0)), curve.get("phase", np.empty(0))
    if len(at_s) != len(phases):
        return
    there = np.isfinite(at_s) & np.isfinite(phases)
    at_s, phases = at_s[there], phases[there].astype(int)
    edges = [0, *(1 + np.flatnonzero(np.diff(phases))), len(phases)]
    for first, end in pairwise(edges):
        if first < end and PHASES[phases[first]] in SHADES:
            yield PHASES[phases[first]], float(at_s[max(0, first - 1)]), float(at_s[end - 1])


def _saved(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    for event in evidence.record.events:
        if event.get("kind") == "checkpoint" and isinstance(event.get("time_s"), (int, float)):
            yield "checkpoint", float(event["time_s"]), float(event["time_s"])

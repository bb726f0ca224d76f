"""Rates a curve of GPU utilisation by its mean (well used, room left, starved), detects swings, and words both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from wellfed.command_line import command
from wellfed.explain.diagnosis.curves.swing import LEAST_DEPTH, Swing, swing_in_time
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import AT_WORK_PCT, FEWEST_OF_CARD
from wellfed.units import counted, show_duration

Verdict = Literal["well used", "room left", "starved", "swings"]
WELL_USED_PCT, STARVED_PCT = 80, 50
"""Mean utilisation from which a GPU is well used, and below which it is starved."""
_CAUSE = (
    f"To know {{what}}: {command('diagnose')}, if it is a run of wellfed; else time its steps with "
    "wellfed.GPUCurves (Lightning) or wellfed.GPUWatch (any loop)."
)
_ADVICE: dict[Verdict, str] = {
    "well used": "Busy is not yet fast. " + _CAUSE.format(what="whether data still costs it time"),
    "room left": _CAUSE.format(what="what takes the rest"),
    "starved": _CAUSE.format(what="what it waits for"),
    "swings": _CAUSE.format(what="what comes as often"),
}


def utilisation_colour(util_pct: float) -> str:
    """Returns the colour of a terminal for a mean utilisation."""
    return "green" if util_pct >= WELL_USED_PCT else "yellow" if util_pct >= STARVED_PCT else "red"


@dataclass(frozen=True)
class CurveUtilisation:
    """Utilisation of a GPU over an interval, in percent of that time."""

    mean_pct: float
    p5_pct: float
    p95_pct: float
    peak_pct: float
    num: int
    swing: Swing | None
    """Swing of at least `LEAST_DEPTH`."""
    verdict: Verdict

    @property
    def message(self) -> str:
        """Verdict with its figures, in one sentence without a full stop."""
        mean = f"utilisation {int(self.mean_pct)} % on average"  # truncated, not rounded: 49.9 is below 50
        if self.swing is None:
            return f"{mean}: {self.verdict}"
        levels = f"between {self.swing.low:.0f} % and {self.swing.high:.0f} %"
        return f"{mean}: {self.verdict} {levels}, with a period of {show_duration(self.swing.period_s)}"

    @property
    def is_idle(self) -> bool:
        """Whether no kernel ran."""
        return self.peak_pct < AT_WORK_PCT


def utilisation_of(time_s: Series, util_pct: Series) -> CurveUtilisation | None:
    """Returns the level of a curve read at ``time_s`` seconds; None without readings. ``nan`` is no reading."""
    there = np.isfinite(time_s) & np.isfinite(util_pct)
    time_s, util_pct = time_s[there], util_pct[there]
    if not len(util_pct):
        return None
    # Rounding may put a mean just outside the range of the values.
    mean_pct = float(np.clip(util_pct.mean(), util_pct.min(), util_pct.max()))
    p5_pct, p95_pct, peak_pct = (float(level) for level in np.percentile(util_pct, (5, 95, 100)))
    swing = swing_in_time(time_s, util_pct)
    swing = swing if swing is not None and swing.depth >= LEAST_DEPTH else None
    verdict: Verdict = (
        "starved" if mean_pct < STARVED_PCT else "well used" if mean_pct >= WELL_USED_PCT else "room left"
    )
    verdict = verdict if swing is None else "swings"
    return CurveUtilisation(mean_pct, p5_pct, p95_pct, peak_pct, len(util_pct), swing, verdict)


def verdict_of(time_s: Series, util_pct: Series) -> tuple[list[str], str | None]:
    """Returns the verdict on a curve while the GPU was in use, and the next command to type. Idle time before and after
    a training is left out."""
    read = int(np.sum(np.isfinite(time_s) & np.isfinite(util_pct)))
    busy = np.flatnonzero(util_pct >= AT_WORK_PCT)
    if read < FEWEST_OF_CARD:
        return [f"{counted(read, 'reading')}, too few for a verdict" if read else "no utilisation was read"], None
    if not len(busy):
        return ["nothing ran on it"], None
    used = slice(busy[0], busy[-1] + 1)
    in_use = utilisation_of(time_s[used], util_pct[used])
    if in_use is None or in_use.num < FEWEST_OF_CARD:
        return ["it was in use too shortly for a verdict"], None
    return [in_use.message], _ADVICE[in_use.verdict]

"""Names the figure that ranks a study's points, whether more of it is better, and how people read it.

All ranks, comparisons and boards use it. A further objective is an entry of `OBJECTIVES`, with its name in
`wellfed.config.schema.SweepObjective`. Whole trainings are ranked by their metric: `of_metric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wellfed.units import show_count, show_gib


@dataclass(frozen=True)
class Objective:
    """Figure that ranks the points of a study."""

    name: str
    figure: Callable[[Any], float | None]
    """Reads the figure of a row."""
    higher_is_better: bool
    title: str
    """Its name in a heading: Throughput."""
    noun: str
    """Its noun in a sentence: rate."""
    best: str
    """Adjective of the first rank: fastest."""
    unit: str
    """With ``{}`` for the unit of samples; of memory, which `show_gib` writes itself, empty."""
    meaning: str
    """With ``{}`` likewise."""
    missing: str
    """Why a trial that ended well may have none."""
    is_interval_known: bool = False
    """``ci95`` of a row is an interval of this figure."""
    is_ratio: bool = True
    """Figures are above 0 and their ratios mean something; not so for a metric of validation."""

    def __call__(self, row: Any) -> float | None:
        """Returns the figure of a row; None if it is not finite, or not above 0 where it must be."""
        figure = self.figure(row)
        is_sound = figure is not None and math.isfinite(figure) and (figure > 0 or not self.is_ratio)
        return figure if is_sound else None

    def goodness(self, figure: float) -> float:
        """Returns the figure turned so that more is better; ratios and overlaps of intervals are kept."""
        if self.higher_is_better:
            return figure
        if not self.is_ratio:
            return -figure
        return 1 / figure if figure > 0 else math.inf

    @property
    def a_noun(self) -> str:
        """Noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def head(self, sample_unit: str) -> str:
        """Returns the head of its column."""
        return self.unit.format(sample_unit) or self.noun

    def number(self, figure: float) -> str:
        """Returns the figure as a column shows it."""
        return show_count(figure) if self.unit else show_gib(figure)

    def show(self, figure: float, sample_unit: str) -> str:
        """Returns the figure with its unit."""
        return f"{self.number(figure)} {self.unit.format(sample_unit)}".rstrip()


SAMPLES_PER_S = Objective(
    name="samples_per_s",
    figure=lambda row: row.samples_per_s,
    higher_is_better=True,
    title="Throughput",
    noun="rate",
    best="fastest",
    unit="{}/s",
    meaning="{} trained on in a second, after the warm-up",
    missing="too few steps were measured",
    is_interval_known=True,
)
SAMPLES_PER_JOULE = Objective(
    name="samples_per_joule",
    figure=lambda row: 1 / row.energy_per_sample_j if row.energy_per_sample_j else None,
    higher_is_better=True,
    title="Samples per joule",
    noun="efficiency",
    best="most efficient",
    unit="{}/J",
    meaning="{} trained on for each joule that the GPUs took while training",
    missing="the energy of its GPUs was not read for nearly all of training",
)
PEAK_MEMORY = Objective(
    name="peak_memory",
    figure=lambda row: row.peak_memory_gib,
    higher_is_better=False,
    title="Peak memory",
    noun="peak",
    best="smallest",
    unit="",
    meaning="memory: reserved on the GPU; on a CPU growth of the process",
    missing="no peak of memory was measured",
)
OBJECTIVES = {each.name: each for each in (SAMPLES_PER_S, SAMPLES_PER_JOULE, PEAK_MEMORY)}


def of_metric(name: str, *, higher_is_better: bool) -> Objective:
    """Returns the objective of whole trainings: their best value of a metric of validation."""
    return Objective(
        name=name,
        figure=lambda row: row.value if row.outcome == "complete" else None,
        higher_is_better=higher_is_better,
        title=f"val/{name}",
        noun="metric",
        best="best",
        unit="",
        meaning="the best at any validation: that of checkpoints/best.ckpt",
        missing="validation gave no finite figure of the metric",
        is_ratio=False,
    )

"""Names the figure that ranks a sweep's points, whether more of it is better, and how people read it.

All that ranks, compares or shows ranks asks here. A further objective is an entry of `OBJECTIVES`, and its name in
`wellfed.config.schema.SweepObjective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wellfed.units import show_count, show_gib


class Measured(Protocol):
    """A row of the ledger, or an entry of the leaderboard."""

    @property
    def samples_per_s(self) -> float | None:
        """Its rate."""

    @property
    def energy_per_sample_j(self) -> float | None:
        """Of its GPUs."""

    @property
    def peak_memory_gib(self) -> float | None:
        """The highest."""


@dataclass(frozen=True)
class Objective:
    """What ranks the points of a sweep."""

    name: str
    figure: Callable[[Measured], float | None]
    higher_is_better: bool
    title: str
    """For it in a heading: Throughput."""
    noun: str
    """One word for it in a sentence: rate."""
    best: str
    """What the first of the ranks is: fastest."""
    unit: str
    """With ``{}`` for the unit of samples; of memory, which `show_gib` writes itself, empty."""
    meaning: str
    """With ``{}`` likewise."""
    missing: str
    """Why a trial that ended well may have none."""
    is_interval_known: bool = False
    """``ci95`` of a row is an interval of this figure: one run tells how sure it is."""

    def __call__(self, row: Measured) -> float | None:
        """The figure of a row, finite and above 0, or None."""
        figure = self.figure(row)
        return figure if figure is not None and math.isfinite(figure) and figure > 0 else None

    def goodness(self, figure: float) -> float:
        """The figure turned so that more is better; ratios and overlaps of intervals stay what they are."""
        if self.higher_is_better:
            return figure
        return 1 / figure if figure > 0 else math.inf

    @property
    def a_noun(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    @property
    def beside_memory(self) -> Objective:
        """What is drawn against memory: itself, or the rate where it is the memory."""
        return SAMPLES_PER_S if self is PEAK_MEMORY else self

    def head(self, sample_unit: str) -> str:
        """Of its column."""
        return self.unit.format(sample_unit) or self.noun

    def number(self, figure: float) -> str:
        """The figure as a column shows it."""
        return show_count(figure) if self.unit else show_gib(figure)

    def show(self, figure: float, sample_unit: str) -> str:
        """The figure with its unit."""
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

"""Computes by what factor one configuration is better than another, and how sure that is, from runs in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from wellfed.observe.timing.interval import student_t_975
from wellfed.study.objective import Objective

LEAST_GAIN = 1.02
"""What is better by less is not worth a knob that was set."""


@dataclass(frozen=True)
class TuneGain:
    """Of the second configuration over the first; above 1 = better, whichever way the objective counts."""

    factor: float
    """Geometric mean of the rounds' ratios."""
    ci95: tuple[float, float] | None
    """None: of one round nothing is known of noise."""
    rounds: int
    """In which both have a figure."""

    @property
    def is_beyond_noise(self) -> bool:
        """Better, and the interval leaves no doubt."""
        return self.ci95 is not None and self.ci95[0] > 1

    @property
    def is_loss(self) -> bool:
        """Worse beyond noise."""
        return self.ci95 is not None and self.ci95[1] < 1


def gain_in_turns(
    before: Sequence[float | None], after: Sequence[float | None], objective: Objective
) -> TuneGain | None:
    """The gain over rounds, in each of which both were run once; a round in which one has no figure is left out.

    The two runs of a round share what the machine did meanwhile, so their ratio is what counts: Student's t of the
    logarithms of the ratios. None where no round has both figures.

    Raises:
        ValueError: not as many figures of the one as of the other.
    """
    ratios = [
        math.log(objective.goodness(new) / objective.goodness(old))
        for old, new in zip(before, after, strict=True)
        if old is not None and new is not None and old > 0 and new > 0
    ]
    if not ratios:
        return None
    mean, number = fmean(ratios), len(ratios)
    if number < 2:
        return TuneGain(math.exp(mean), None, number)
    half = student_t_975(number - 1) * stdev(ratios) / math.sqrt(number)
    return TuneGain(math.exp(mean), (math.exp(mean - half), math.exp(mean + half)), number)

"""Computes by what factor one configuration is better than another, with its interval, from runs in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wellfed.observe.timing.interval import mean_ratio

LEAST_GAIN = 1.02
"""Least factor that is worth setting a knob."""


@dataclass(frozen=True)
class TuneGain:
    """Gain of the second configuration over the first; above 1 = better."""

    factor: float
    """Geometric mean of the rounds' ratios."""
    ci95: tuple[float, float] | None
    """None after a single round, which shows no noise."""
    rounds: int
    """Rounds in which both have a figure."""

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the whole interval is better."""
        return self.ci95 is not None and self.ci95[0] > 1

    @property
    def is_told(self) -> bool:
        """Whether more rounds would hardly change the verdict: the whole interval is worth a knob, or a loss."""
        return self.is_loss or (self.ci95 is not None and self.ci95[0] > LEAST_GAIN)

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval is worse."""
        return self.ci95 is not None and self.ci95[1] < 1


@dataclass(frozen=True)
class TurnsMeasured:
    """Start and result, measured in turns."""

    before: Sequence[float | None]
    """Figures of the start, one a round; None where it did not end well."""
    after: Sequence[float | None]
    gain: TuneGain | None
    seconds: float
    """Duration of all these trials."""
    problem: str | None = None
    """The first failure, in one line."""

    @property
    def result_holds(self) -> bool:
        """Whether the result ran in every round and is not worse beyond noise; else the start stays."""
        return None not in self.after and self.gain is not None and not self.gain.is_loss


def gain_in_turns(before: Sequence[float | None], after: Sequence[float | None]) -> TuneGain | None:
    """Returns the gain over rounds that ran both once; None where no round has both figures.

    Drift of the machine cancels in the ratio of a round, so the interval is Student's t of the ratios' logarithms. A
    round in which one has no figure is left out.

    Raises:
        ValueError: the two have different numbers of figures.
    """
    ratios = [
        new / old
        for old, new in zip(before, after, strict=True)
        if old is not None and new is not None and old > 0 and new > 0
    ]
    if not ratios:
        return None
    return TuneGain(*mean_ratio(ratios), len(ratios))

"""Defines a trial of a study: what is run, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.record.entries import Status
from wellfed.study.points.grid import GridPoint

TrialKind = Literal["trial", "confirm", "repeat", "before", "after"]
"""``confirm``: one of the best, measured again in turns. ``repeat``: measured again by tune to learn the noise.
``before``, ``after``: start and result of a tune, in turns; both lie beside the result's trial."""


@dataclass(frozen=True)
class TrialMetric:
    """Metric of validation that ranks whole trainings."""

    name: str
    """Without ``val/``."""
    mode: Literal["max", "min"]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return self.mode == "max"


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    point: GridPoint
    composed: Composed[RunConfig]
    """Configuration. The executor sets its ``run_dir``."""
    kind: TrialKind = "trial"
    attempt: int = 1
    """Counts the trials of this point and kind, from 1."""
    number: int | None = None
    """Number of a whole training, from 0. None = a timed trial, planned first."""
    may_be_pruned: bool = False
    """The executor calls ``prune`` after each validation of this trial."""
    beside: str = ""
    """Id of the point beside whose trial its folder lies; empty = its own point's."""

    @property
    def folder(self) -> str:
        """Name of its folder within the study's, which no other trial has."""
        own = self.beside or self.point.id
        return own if self.kind == "trial" else f"{own}.{self.kind}{self.attempt}"


@dataclass(frozen=True)
class TrialEnd:
    """How a trial has ended, or why it was not started."""

    code: int = 0
    """Exit code of its process; negative: the signal that ended it."""
    seconds: float = 0.0
    """Duration of the whole trial, from the start of its process."""
    is_timeout: bool = False
    """The executor ended it at the time limit."""
    not_started: Status | None = None
    """Status of a trial that was not started; ``interrupted``: another process uses its folder."""
    message: str = ""
    """Why it was not started."""
    predicted_peak_gib: float | None = None

"""Composes points before any of them is run. A point that can't be composed becomes a row."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.study.sweep.grid import GridPoint
from wellfed.study.trials.trial_ledger import TrialLedger, TrialScreen
from wellfed.units import counted

_MANY = 20
"""Points from which on composing takes seconds, which is announced."""


@dataclass(frozen=True)
class ReadyPoint:
    """A point with its configuration."""

    point: GridPoint
    composed: Composed[RunConfig]


@dataclass
class TrialSetup:
    """Composes points and keeps those that can be run."""

    compose_point: Callable[[Sequence[str], Path], Composed[RunConfig]]
    """Returns the configuration of a point, by its overrides and its folder."""
    ledger: TrialLedger
    screen: TrialScreen
    ready: dict[str, ReadyPoint] = field(default_factory=dict, init=False)
    """Points that compose, by id."""

    def compose(self, points: Sequence[GridPoint]) -> None:
        """Composes each point, or writes its row.

        Raises:
            ConfigError: all points have the same fault, so no axis can cure it.
        """
        if len(points) > _MANY:
            self.screen.say(f"Composing {counted(len(points), 'point')}")
        refused: list[tuple[GridPoint, ConfigError]] = []
        for point in points:
            try:
                composed = self.compose_point(point.overrides, self.ledger.folder / point.id)
            except ConfigError as error:
                refused.append((point, error))
            else:
                self.ready[point.id] = ReadyPoint(point, composed)
        if not self.ready and self.ledger.is_empty and len({refusal.faults for _, refusal in refused}) == 1:
            raise refused[0][1]
        for point, refusal in refused:
            self.ledger.refuse(point, "invalid", " ".join(map(str, refusal.faults)))

    def says_refused(self, size: int) -> bool:
        """Returns whether some of the grid's points can't be run, and says so."""
        refused = size - len(self.ready)
        if refused:
            self.screen.say(f"sweep.fail_fast=true, and {counted(refused, 'point')} can't be run: none is started.")
        return refused > 0


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder and removes it at the end. One that a killed study has left is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

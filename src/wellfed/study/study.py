"""Runs a study: the one loop of sweep, search and tune, and the one way in which they end.

    propose a point ── run a trial ── write its end ── rank
    sweep.py             executors/     trial_end.py     ranking/, board/
    search/searching.py                 rows.py
    tune/tuning.py

Every trial leaves a folder with its record, however it ends. The same command again runs what is missing.
"""

from __future__ import annotations

import errno
import math
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, ConfigError, WellfedError
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.run.folder.lock import holds_nothing, only_one
from wellfed.study.executors.executor import Executor, ExecutorLost, More, Prune, StudySettings
from wellfed.study.points.grid import GridPoint
from wellfed.study.request import SAME_COMMAND
from wellfed.study.rows import Kept, Row
from wellfed.study.study_screen import StudyScreen
from wellfed.study.trial import Trial, TrialEnd, TrialKind


@dataclass
class Study(ABC):
    """One command of a study, in its folder."""

    goes_on: ClassVar[str] = "again goes on."
    """End of the sentence that `way_on` begins, after a signal."""

    folder: Path
    screen: StudyScreen
    stop: StopRequest = field(default_factory=StopRequest, kw_only=True)
    way_on: str = field(default=SAME_COMMAND, init=False)
    """Command that goes on where this one has stopped."""
    trials: Trials | None = field(default=None, init=False)
    """Trials and their rows; there once the study runs."""
    _is_finished: bool = field(default=False, init=False)

    @abstractmethod
    def run(self) -> None:
        """Runs trials until nothing is left to try."""

    @abstractmethod
    def finish(self) -> int:
        """Writes and shows what is made of the rows so far; returns the exit code."""

    def interrupted(self) -> int:
        """Does what `finish` does for a study that did not come to its end."""
        return self.finish()

    def publish(self) -> None:  # noqa: B027  not every study has it
        """Copies what a finished study has found into wandb."""

    def settings(
        self, scratch: Path, limit_s: float | None, group: str = "sweep", prepare_s: float | None = None
    ) -> StudySettings:
        """Returns the settings of an executor; ``limit_s`` is the time of a trial, None = none."""
        limit_s = math.inf if limit_s is None else limit_s
        return StudySettings(self.folder, scratch, limit_s, prepare_s or limit_s, group, self.screen.say, self.stop)

    def go(self) -> int:
        """Runs the study in its folder, which is locked meanwhile; returns the exit code.

        Raises:
            WellfedError: no study can be made of the command; a new folder in which no trial has run is removed.
        """
        with only_one(self.folder, make=True), self.stop.listening():
            is_new = holds_nothing(self.folder)
            try:
                self.run()
                exit_code = self.finish()
                self._is_finished = True
                self.publish()
                return exit_code
            except (Stopped, KeyboardInterrupt):
                self.stop.is_finishing = True  # an impatient second signal must not become a traceback
                if self._is_finished:
                    self.screen.say("Stopped while putting the leaderboard into wandb; the files have every figure.")
                else:
                    self.interrupted()
                    self.screen.say(f"Stopped. {self.way_on} {self.goes_on}")
                return exit_code_of(self.stop.signum or signal.SIGINT)
            except WellfedError:
                rows = () if self.trials is None else self.trials.kept.found.rows
                if is_new and all(row.status == "invalid" for row in rows):
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise
            except OSError as error:  # a full disk, above all
                exit_code = EXIT_FAILED if self._is_finished else self.interrupted()
                where = f" ({error.filename})" if error.filename else ""
                way_on = self.way_on[0].lower() + self.way_on[1:]
                remedy = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Put that right"
                self.screen.say(f"Stopped: {error.strerror or error}{where}. {remedy}, then {way_on} goes on.")
                return exit_code


@dataclass
class Trials:
    """Trials of a study and their rows: the one loop of sweep, search and tune."""

    kept: Kept
    screen: StudyScreen
    compose_point: Callable[[Sequence[str], Path], Composed[RunConfig]]
    """Returns the configuration of a point, by its overrides and its folder."""
    way_on: str = SAME_COMMAND
    ready: dict[str, tuple[GridPoint, Composed[RunConfig]]] = field(default_factory=dict, init=False)
    """Points that compose and were not found infeasible, by id."""
    is_lost: bool = field(default=False, init=False)
    """Whether the rest can't be run."""

    def compose(self, point: GridPoint) -> ConfigError | None:
        """Composes a point's configuration; returns its faults if that is impossible."""
        try:
            self.ready[point.id] = point, self.compose_point(point.overrides, self.kept.folder / point.id)
        except ConfigError as error:
            return error
        return None

    def refuse(self, point: GridPoint, error: ConfigError, number: int | None = None) -> Row:
        """Writes and shows the row of a point that does not compose, and returns it."""
        end = TrialEnd(not_started="invalid", message=" ".join(map(str, error.faults)))
        return self.add(self.kept.begin(point, None, number=number), end)

    def trial(self, point: str, kind: TrialKind = "trial", **how: Any) -> Trial:
        """Returns a trial of a composed point; ``how`` as `Trial` has it."""
        return self.kept.begin(*self.ready[point], kind, **how)

    def run(
        self, executor: Executor, trials: Sequence[Trial] = (), more: More | None = None, prune: Prune | None = None
    ) -> Iterator[tuple[Trial, Row]]:
        """Yields each trial with its row, which is in its folder by then. Ends early if the rest can't be run.

        Args:
            executor: runs the trials.
            trials: trials to run; those that measure a point again run one at a time.
            more: as `Executor.run` has it.
            prune: as `Executor.run` has it.
        """
        alone = any(trial.kind != "trial" for trial in trials)
        try:
            for trial, end in executor.run(trials, more, alone=alone, prune=prune):
                row = self.add(trial, end)
                if row.status == "infeasible":
                    self.ready.pop(row.point, None)
                yield trial, row
        except ExecutorLost as lost:
            self.is_lost = True
            self.screen.say(f"{lost} {self.way_on} again runs what is missing.")

    def add(self, trial: Trial, end: TrialEnd) -> Row:
        """Writes and shows the row of a trial that has ended, or was refused before it started; returns it."""
        row = self.kept.end(trial, end)
        if row.status in ("invalid", "infeasible") and not row.folder:
            self.screen.refused(row)
        else:
            self.screen.ended(row, self.kept.best())
        return row


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder that is removed at the end, with what a killed command has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from wellfed.config.compose import Composed
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError, WellfedError
from wellfed.explain.report.text_table import console_width, print_text
from wellfed.masking import masked_override
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.run.folder.lock import holds_nothing, only_one
from wellfed.run.screen import Terminal
from wellfed.study.board import files, terminal
from wellfed.study.executors.executor import Executor, ExecutorLost, Launch, More, Prune, StudySettings
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint
from wellfed.study.points.space import show_value
from wellfed.study.ranking.board_entry import Leaderboard
from wellfed.study.request import SAME_COMMAND, StudyRequest
from wellfed.study.rows import Kept, Row
from wellfed.study.study_files import SEARCH, SWEEP, SearchFile, SweepFile, study_code
from wellfed.study.trial_end import Trial, TrialEnd, TrialKind, message_of
from wellfed.units import counted, show_duration


class StudyScreen:
    """Lines on the terminal, one a trial.

    Args:
        axes: knobs and groups that vary.
        sample_unit: unit of a timed study's samples.
    """

    def __init__(self, objective: Objective, axes: Collection[str] = (), sample_unit: str = "") -> None:
        self.objective, self._axes, self.sample_unit = objective, axes, sample_unit
        self.console = Terminal(soft_wrap=True, width=console_width())
        self._number = self._done = 0

    def say(self, text: str) -> None:
        """Prints a text of one line."""
        print_text(self.console, text)

    def begin(self, number: int, title: str) -> None:
        """Announces a number of trials, which are counted on their lines."""
        self._number, self._done = number, 0
        if number:
            self.say(title)

    def began(self, trial: Trial) -> None:
        """Shows on a terminal that a whole training runs now."""
        if self.console.is_terminal:
            self.say(f"trial {trial.number} begins: {self._short(trial.point.overrides, show_value)}")

    def refused(self, row: Row) -> None:
        """Shows a point that will not be run."""
        if row.trial is not None:
            self.ended(row, None)
            return
        short, message = self.short(row), (row.error or {}).get("message", "")
        self.say(f"{row.status}: {message}" if short in message else f"{row.status}: {short}: {message}")

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows the end of a trial."""
        took = f" in {show_duration(row.seconds)}" if row.seconds else ""
        why = "" if row.error is None else f": {message_of(row.error)}"
        first = " (best so far)" if best is row else ""
        if row.trial is None:
            self._done += 1
            of_all = f", {self._done} of {self._number}" if self._done <= self._number else ""
            figure = self.objective(row)
            score = "" if figure is None else f" {self.objective.show(figure, self.sample_unit)}"
            self.say(f"{row.status}{score}{first}{took}{of_all}: {self.short(row)}{why}")
            return
        value = "" if row.value is None else f" {self.objective.name} {row.value:.5g}"
        status = row.outcome if row.outcome != "failed" else row.status
        after = f" after {counted(row.validations, 'validation')}" if row.outcome == "pruned" else ""
        self.say(f"trial {row.trial} {status}{value}{first}{after}{took}: {self.short(row)}{why}")

    def short(self, row: Row) -> str:
        """Returns the values of a row's axes."""
        return self._short(row.overrides, show_value if row.trial is not None else str)

    def _short(self, overrides: Sequence[str], shown: Callable[[str], str]) -> str:
        pairs = [text.partition("=") for text in overrides]
        return " ".join(f"{axis}={shown(value)}" for axis, _, value in pairs if axis in self._axes)


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


File = TypeVar("File", SweepFile, SearchFile)


@dataclass
class MultirunStudy(Study):
    """One command of a sweep or a search."""

    multirun: Multirun
    config: RunConfig
    """Configuration that all points share."""
    asked: StudyRequest
    launch: Launch | None
    """Runs jobs by another launcher of Hydra; None = in processes forked here, one a GPU at a time."""

    def __post_init__(self) -> None:
        self.way_on = self.asked.way_on

    @property
    @abstractmethod
    def file(self) -> SweepFile | SearchFile:
        """Facts that the trials share."""

    @abstractmethod
    def board(self) -> Leaderboard:
        """Returns the leaderboard of the rows so far."""

    @cached_property
    def code(self) -> str:
        """Version of the code."""
        return study_code()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the files of both kinds of study have."""
        return {
            "name": self.asked.name,
            "workload": self.config.workload.name,
            "fixed": tuple(map(masked_override, self.asked.fixed)),
            "code": self.code,
            "flags": tuple(map(masked_override, self.multirun.flags)),
        }

    def read_earlier(self, kind: type[File]) -> File | None:
        """Returns what the folder holds; None if that is nothing.

        Raises:
            ConfigError: it holds another kind of study, or one of another version.
        """
        (other,) = {SWEEP, SEARCH} - {kind.folder_kind}
        problem = f"holds a {other.noun}; this is a {kind.folder_kind.noun}, and each needs a folder of its own."
        if not (self.folder / other.marker).exists():
            try:
                return kind.read(self.folder)
            except FileNotFoundError:
                return None
            except (OSError, ValueError) as error:
                problem = f"can't be read: {error}"
        raise ConfigError.of(str(self.folder), problem, f"Set another: hydra.sweep.dir={self.folder}_2")

    def report_earlier(self, trials: Trials, progress: str) -> None:
        """Reports that the rows of an earlier command are kept, and which of them can be measured again."""
        say, noun, kept = self.screen.say, self.file.folder_kind.noun, trials.kept
        say(f"Going on in {self.folder}: {progress}")
        codes = {row.code for row in kept.latest.values() if row.status == "ok"} - {self.code}
        if codes:
            say(
                f"The code has changed since ({', '.join(sorted(codes))} -> {self.code}): what was measured before is "
                f"kept. To measure it again: {noun}.retry=[ok], or another {noun}.name."
            )
        ended = {row.status for row in kept.latest.values()} & {"oom", "failed", "killed", "timeout"}
        if left := sorted(ended - set(kept.retry)):
            say(f"Trials that failed are kept; {noun}.retry=[{','.join(left)}] runs them again.")

    def write_board(self, *notes: str) -> Leaderboard:
        """Writes the leaderboard of the rows so far, and returns it; reports files that can't be written.

        Args:
            notes: notes before its own.
        """
        board = self.board()
        board = replace(board, notes=(*notes, *board.notes))
        try:
            board.file.write(self.folder)
            files.write(self.folder, board)
        except OSError as error:
            self.screen.say(f"The leaderboard can't be written: {error}. The trials are in {self.folder}.")
        return board

    def finish(self) -> int:
        """Writes and shows the leaderboard of what is there; returns the exit code."""
        if self.trials is None:
            return EXIT_FAILED
        board = self.write_board()
        terminal.show(self.screen.console, board, [self.folder / name for name in files.NAMES])
        return EXIT_FAILED if board.best is None else EXIT_OK

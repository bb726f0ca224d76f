"""Runs a study: the one loop of sweep, search and tune, and the one way in which they end.

    propose a point ── run a trial ── record a row ── rank
    sweep.py             executors/     ledger.py       ranking/, board/
    search/search_study.py
    tune/tuning.py

Every trial leaves a row, however it ends. The same command again runs what is missing.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wellfed.config.compose import Composed
from wellfed.config.multirun import Multirun
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED, ConfigError
from wellfed.masking import SECRET_SHOWN, masked_override
from wellfed.process import Stopped, StopRequest, exit_code_of
from wellfed.run.folder.lock import made, only_one
from wellfed.study.executors.executor import Executor, ExecutorLost, StudySettings, Trial
from wellfed.study.executors.tasks import MachineSeen
from wellfed.study.ledger import Ledger
from wellfed.study.points.grid import GridPoint
from wellfed.study.row import Row, RowKind
from wellfed.study.study_screen import StudyScreen
from wellfed.study.trial_end import RowMaker
from wellfed.units import counted

_MANY = 20
"""Points that take seconds to compose."""
_NAME = re.compile(r"\w[\w.-]*")


@dataclass
class Study(ABC):
    """One command of a study, in its folder."""

    folder: Path
    screen: StudyScreen
    stop: StopRequest
    way_on: str = field(default="The same command", init=False)
    """Command that goes on where this one has stopped."""
    _is_finished: bool = field(default=False, init=False)

    @abstractmethod
    def run(self) -> None:
        """Runs trials until nothing is left to try."""

    @abstractmethod
    def finish(self) -> int:
        """Writes and shows what is made of the rows so far; returns the exit code."""

    @abstractmethod
    def says_stopped(self) -> str:
        """Returns the message after a signal."""

    def interrupted(self) -> int:
        """Does what `finish` does for a study that did not come to its end."""
        return self.finish()

    def publish(self) -> None:  # noqa: B027  not every study has it
        """Copies a finished study into wandb."""

    def settings(
        self, scratch: Path, limit_s: float | None, code: str, row_of: RowMaker, prepare_s: float | None = None
    ) -> StudySettings:
        """Returns the settings of an executor; ``limit_s`` is the time of a trial, None = none."""
        timeout_s = math.inf if limit_s is None else limit_s
        return StudySettings(
            folder=self.folder,
            scratch=scratch,
            timeout_s=timeout_s,
            prepare_s=prepare_s or timeout_s,
            group=row_of.group,
            code=code,
            row_of=row_of,
            say=self.screen.say,
            tick=self.tick,
            stop=self.stop,
            see_machine=self.see_machine,
        )

    def tick(self) -> None:
        """Does what has to be done a few times a second."""
        self.screen.tick()

    def see_machine(self, seen: MachineSeen) -> None:  # noqa: B027  only a sweep compares machines
        """Takes the machine that runs the trials, before the first of them."""

    @property
    def has_nothing(self) -> bool:
        """Whether the folder may go with a configuration that was refused."""
        return True

    def go(self) -> int:
        """Runs the study in its folder, which is locked meanwhile; returns the exit code.

        Raises:
            ConfigError: no study can be made of the command; a folder made for it is removed.
        """
        is_new = not self.folder.exists()
        with only_one(made(self.folder)), self.stop.listening():
            try:
                self.run()
                exit_code = self.finish()
                self._is_finished = True
                self.publish()
                return exit_code
            except (Stopped, KeyboardInterrupt):
                self.stop.is_finishing = True  # an impatient second signal must not become a traceback
                if self._is_finished:
                    self.screen.say(f"Stopped while putting the trials into wandb. {self.way_on} again does the rest.")
                else:
                    self.interrupted()
                    self.screen.say(self.says_stopped())
                return exit_code_of(self.stop.signum or signal.SIGINT)
            except ConfigError:
                if is_new and self.has_nothing:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise
            except OSError as error:  # a full disk, above all
                exit_code = EXIT_FAILED if self._is_finished else self.interrupted()
                where = f" ({error.filename})" if error.filename else ""
                way_on = self.way_on[0].lower() + self.way_on[1:]
                self.screen.say(f"Stopped: {error.strerror or error}{where}. Make room, then {way_on} goes on.")
                return exit_code


@dataclass
class TimedTrials:
    """Timed trials of a sweep or a tune, and their rows."""

    ledger: Ledger
    screen: StudyScreen
    compose_point: Callable[[Sequence[str], Path], Composed[RunConfig]]
    """Returns the configuration of a point, by its overrides and its folder."""
    ready: dict[str, tuple[GridPoint, Composed[RunConfig]]] = field(default_factory=dict, init=False)
    """Points that compose and were not found infeasible, by id."""

    def compose(self, points: Sequence[GridPoint]) -> None:
        """Composes each point's configuration, or writes a row with the reason why it can't be.

        Raises:
            ConfigError: all points share one fault, which no axis can cure.
        """
        if len(points) > _MANY:
            self.screen.say(f"Composing {counted(len(points), 'point')}")
        refused: list[tuple[GridPoint, ConfigError]] = []
        for point in points:
            try:
                self.ready[point.id] = point, self.compose_point(point.overrides, self.ledger.folder / point.id)
            except ConfigError as error:
                refused.append((point, error))
        if not self.ready and self.ledger.is_empty and len({refusal.faults for _, refusal in refused}) == 1:
            raise refused[0][1]
        for point, refusal in refused:
            self.ledger.refuse(point, "invalid", " ".join(map(str, refusal.faults)))

    def run(self, executor: Executor, points: Sequence[str], kind: RowKind = "trial") -> Iterator[Row]:
        """Runs a trial of each point and yields its row, which is in the ledger by then."""
        trials, again = [], kind != "trial"
        for id_ in points:
            point, composed = self.ready[id_]
            row = self.ledger.begin(point, kind)
            trials.append(Trial(composed, point.overrides, row, host=self.ledger.host_of(id_) if again else ""))
        try:
            for trial, row in executor.run(trials, alone=again):
                self.ledger.add(row)
                if row.status == "infeasible":
                    self.ready.pop(trial.row.point, None)
                yield row
        except ExecutorLost as lost:
            self.screen.say(f"{lost} The same command again runs what is missing.")
            raise


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Makes a folder that is removed at the end, with what a killed command has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def named_folder(multirun: Multirun, config: RunConfig, noun: Literal["sweep", "search"], name: str) -> Path:
    """Returns the folder of the study of this name, unless another one was typed.

    Raises:
        ConfigError: it can't be the name of a folder.
    """
    if not _NAME.fullmatch(name):
        problem = "becomes the name of a folder: letters, digits, '_', '-' and '.'."
        raise ConfigError.of(f"{noun}.name={name}", problem, f"Write {noun}.name=my_{noun}.")
    plural = {"sweep": "sweeps", "search": "searches"}[noun]
    return multirun.typed_dir or Path(config.paths.log_dir) / config.workload.name / plural / name


def check_one_machine(config: RunConfig) -> None:
    """Raises ConfigError: a trial would be on several machines."""
    if config.trainer.num_nodes > 1:
        where = f"trainer.num_nodes={config.trainer.num_nodes}"
        raise ConfigError.of(where, "a trial is on one machine.", "Set trainer.num_nodes=1.")


def masked_values(axis: str, values: Sequence[str]) -> tuple[str, ...]:
    """Returns the values of an axis; secrets as ``***`` with their number."""
    return tuple(
        value if masked_override(f"{axis}={value}") == f"{axis}={value}" else f"{SECRET_SHOWN}{number}"
        for number, value in enumerate(values, start=1)
    )

"""Runs trials by another launcher of Hydra, such as those of Ray and Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from wellfed import project
from wellfed.config.quoting import assigned
from wellfed.errors import ConfigError, first_line
from wellfed.process import STOPS, Stopped, exit_code_of
from wellfed.study.executors.executor import Ended, Executor, ExecutorLost, Launch, More, Prune, StudySettings
from wellfed.study.executors.local import LocalExecutor
from wellfed.study.trial_end import Trial, TrialEnd, complete_record, open_trial_folder, record_of


def executor_of(launch: Launch | None, settings: StudySettings) -> Executor:
    """Returns the executor of a study; ``launch`` runs jobs by another launcher of Hydra, None = trials run here."""
    return LocalExecutor(settings) if launch is None else LaunchingExecutor(settings, launch)


class LaunchingExecutor(Executor):
    """An executor that hands all waiting trials to a launcher at once.

    They are yielded when the launcher returns. It has no time limit for a trial.
    """

    def __init__(self, settings: StudySettings, launch: Launch) -> None:
        super().__init__(settings)
        self._launch = launch

    def run(
        self, trials: Iterable[Trial] = (), more: More | None = None, *, alone: bool = False, prune: Prune | None = None
    ) -> Ended:
        """Yields the trials when all have ended, as `Executor.run` does; those that have ended, if a signal came."""
        asked = [*trials, *(iter(more, None) if more is not None else ())] if self._is_open else []
        opened = []
        for trial in asked:
            try:
                open_trial_folder(self.settings.folder / trial.folder)
            except ConfigError as error:  # another process still writes to it
                yield trial, TrialEnd(not_started="interrupted", message=str(error.faults[0]))
            else:
                opened.append(trial)
        end = self._launched(opened)
        for trial in opened:
            folder = self.settings.folder / trial.folder
            if end is None or complete_record(folder) is not None:
                found = record_of(folder)
                if found is None:
                    yield trial, TrialEnd(code=1, message="left no record: see what its launcher has printed")
                else:
                    code = -signal.SIGKILL if found.exit_code is None else found.exit_code
                    yield trial, TrialEnd(code=code, seconds=found.duration_s)
        if end is not None:
            raise end

    def _launched(self, trials: list[Trial]) -> Stopped | ExecutorLost | None:
        """Runs all trials; returns what has ended that before its time."""
        if not trials:
            return None
        os.environ.setdefault(project.VARIABLE, str(project.root()))  # a worker of Ray has another main program
        folder = str(self.settings.folder.absolute())
        own = assigned("hydra.sweep.dir", folder)
        jobs = [[*each.point.overrides, own, f"hydra.sweep.subdir={each.folder}"] for each in trials]
        try:
            self._launch(folder, jobs)
        except Stopped as error:  # between two trials
            return error
        except SystemExit as error:  # a trial in this process got the signal: see `wellfed.config.entry`
            signum = next((each for each in STOPS if exit_code_of(each) == error.code), None)
            if signum is None:
                raise
            self.settings.stop.signum = signum
            return Stopped(signum)
        except Exception as error:  # noqa: BLE001  of the launcher: no cluster, wrong arguments, a lost worker
            lost = ExecutorLost(f"Hydra's launcher failed: {type(error).__name__}: {first_line(error)}.")
            lost.__cause__ = error
            return lost
        return None

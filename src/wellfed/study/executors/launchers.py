"""Runs trials by another launcher of Hydra, such as those of Ray and Slurm."""

from __future__ import annotations

import os
import signal

from wellfed import project
from wellfed.config.quoting import assigned
from wellfed.errors import ConfigError, first_line
from wellfed.process import STOPS, Stopped, exit_code_of
from wellfed.study.executors.executor import Ended, Executor, ExecutorLost, Launch, StudySettings, Trial, TrialEnd
from wellfed.study.executors.local import LocalExecutor, open_trial_folder
from wellfed.study.trial_end import complete_record, record_of


def executor_of(launch: Launch | None, settings: StudySettings) -> Executor:
    """Returns the executor of a study; ``launch`` runs jobs by another launcher of Hydra, None = trials run here."""
    return LocalExecutor(settings) if launch is None else LaunchingExecutor(settings, launch)


class LaunchingExecutor(Executor):
    """An executor that hands all waiting trials to a launcher at once.

    Their rows are written when the launcher returns. It has no time limit for a trial.
    """

    def __init__(self, settings: StudySettings, launch: Launch) -> None:
        super().__init__(settings)
        self._launch = launch

    def _start(self, trial: Trial) -> Ended:
        try:
            open_trial_folder(self.settings.folder / trial.key)
        except ConfigError as error:  # another process still writes to it
            yield trial, self._row(trial, TrialEnd(not_started="interrupted", message=str(error.faults[0])))
        else:
            self._running[trial.key] = trial

    def _wait(self) -> Ended:
        os.environ.setdefault(project.VARIABLE, str(project.root()))  # a worker of Ray has another main program
        folder = str(self.settings.folder.absolute())
        sweep_dir = assigned("hydra.sweep.dir", folder)
        trials: list[Trial] = list(self._running.values())
        self._running.clear()
        end: Stopped | ExecutorLost | None = None
        try:
            jobs = [[*each.overrides, sweep_dir, f"hydra.sweep.subdir={each.row.folder}"] for each in trials]
            self._launch(folder, jobs)
        except Stopped as error:  # between two trials
            end = error
        except SystemExit as error:  # a trial in this process got the signal: see `wellfed.config.entry`
            signum = next((each for each in STOPS if exit_code_of(each) == error.code), None)
            if signum is None:
                raise
            end, self.settings.stop.signum = Stopped(signum), signum
        except Exception as error:  # noqa: BLE001  of the launcher: no cluster, wrong arguments, a lost worker
            end = ExecutorLost(f"Hydra's launcher failed: {type(error).__name__}: {first_line(error)}.")
            end.__cause__ = error
        for trial in trials:
            if end is None or complete_record(self.settings.folder / trial.row.folder) is not None:
                yield trial, self._row(trial, self._end(trial))
        if end is not None:
            raise end

    def _end(self, trial: Trial) -> TrialEnd:
        """Returns how a trial has ended, by its record."""
        folder = self.settings.folder / trial.row.folder
        if (found := record_of(folder)) is None:
            return TrialEnd(not_started="failed", message="left no record: see what its launcher has printed")
        code = -signal.SIGKILL if complete_record(folder) is None else found.exit_code or 0
        return TrialEnd(code=code, seconds=found.duration_s, host=found.host_name or "")

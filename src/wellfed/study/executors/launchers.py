"""Picks the executor that a launcher of Hydra's stands for, and runs trials by those of which it knows nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from wellfed.config.quoting import assigned
from wellfed.errors import ConfigError
from wellfed.process import STOPS, Stopped, exit_code_of
from wellfed.run.folder.lock import held_by
from wellfed.study.executors.executor import TICK_S, Ended, Executor, Launch, StudySettings, Trial, TrialEnd
from wellfed.study.executors.local import FREE_WITHIN_S, LocalExecutor, open_trial_folder
from wellfed.study.executors.ray import RayExecutor
from wellfed.study.executors.submitit import SubmititExecutor
from wellfed.study.trial_end import complete_record

_RAY = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."


def executor_of(launcher: Mapping[str, Any] | None, launch: Launch | None, settings: StudySettings) -> Executor:
    """Returns the executor that a launcher of Hydra's stands for.

    Args:
        launcher: ``hydra.launcher``; None = the project's own, which runs trials here.
        launch: what that launcher does, used where it is neither Ray nor submitit.
        settings: settings of the study.
    """
    if launcher is None:
        return LocalExecutor(settings)
    target = str(launcher.get("_target_", ""))
    if target == _RAY:
        return RayExecutor(settings, launcher["ray"]["init"], launcher["ray"]["remote"])
    if target.startswith(_SUBMITIT):
        return SubmititExecutor(settings, "slurm" if target.endswith("SlurmLauncher") else "local", launcher)
    assert launch is not None
    return OtherLauncher(settings, launch)


def is_remote(launcher: Mapping[str, Any] | None) -> bool:
    """Returns whether a launcher of Hydra's sends trials to machines that an executor here watches."""
    target = "" if launcher is None else str(launcher.get("_target_", ""))
    return target == _RAY or target.startswith(_SUBMITIT)


class OtherLauncher(Executor):
    """An executor that hands all trials over at once, e.g. to ``hydra/launcher=basic``.

    Rows come when all trials have ended, without time limits.
    """

    def __init__(self, settings: StudySettings, launch: Launch) -> None:
        super().__init__(settings)
        self._launch = launch

    def _start(self, trial: Trial) -> Ended:
        folder, end_s = self.settings.folder / trial.key, time.monotonic() + FREE_WITHIN_S
        while held_by(folder) is not None and time.monotonic() < end_s:  # nothing runs yet
            self.settings.tick()
            time.sleep(TICK_S)
        try:
            open_trial_folder(folder)
        except ConfigError as error:  # another process still writes to it
            message = str(error.faults[0])
            yield trial, self._row(trial, TrialEnd(not_started="failed", message=message))
        else:
            self._running[trial.key] = trial

    def _wait(self) -> Ended:
        sweep_dir = assigned("hydra.sweep.dir", str(self.settings.folder.absolute()))
        trials: list[Trial] = list(self._running.values())
        self._running.clear()
        stopped: Stopped | None = None
        try:
            self._launch([[*each.overrides, sweep_dir, f"hydra.sweep.subdir={each.row.folder}"] for each in trials])
        except Stopped as error:  # between two trials
            stopped = error
        except SystemExit as error:  # a trial in this process got the signal: see `wellfed.config.entry`
            signum = next((each for each in STOPS if exit_code_of(each) == error.code), None)
            if signum is None:
                raise
            stopped, self.settings.stop.signum = Stopped(signum), signum
        for trial in trials:
            if stopped is None or complete_record(self.settings.folder / trial.row.folder) is not None:
                yield trial, self._row(trial, self._end(trial))
        if stopped is not None:
            raise stopped

    def _end(self, trial: Trial) -> TrialEnd:
        """Returns how a trial has ended, by its record."""
        found = complete_record(self.settings.folder / trial.row.folder)
        if found is None:
            return TrialEnd(not_started="failed", message="left no complete record")
        return TrialEnd(code=found.exit_code or 0, seconds=found.duration_s, host=found.host_name or "")

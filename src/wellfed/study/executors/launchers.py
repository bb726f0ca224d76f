"""Picks the executor that a launcher of Hydra's stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wellfed.study.executors.executor import Executor, Launch, StudySettings
from wellfed.study.executors.local import LocalExecutor
from wellfed.study.executors.other_launcher import OtherLauncher
from wellfed.study.executors.ray import RayExecutor
from wellfed.study.executors.submitit import SubmititExecutor

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

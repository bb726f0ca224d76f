"""Trials and settings for executors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import StopRequest
from wellfed.study.executors.executor import StudySettings
from wellfed.study.points.grid import GridPoint
from wellfed.study.trial_end import Trial


def made_settings(folder: Path, said: list[str] | None = None, **more: Any) -> StudySettings:
    """Settings of a study in ``folder``; ``said`` takes what the user is shown."""
    scratch = folder / ".scratch"
    scratch.mkdir(exist_ok=True)
    told: list[str] = [] if said is None else said
    settings = StudySettings(
        folder=folder,
        scratch=scratch,
        timeout_s=math.inf,
        prepare_s=60,
        group="sweep",
        say=told.append,
        stop=StopRequest(),
    )
    return replace(settings, **more)


def made_trial(key: str, *, devices: int = 1, gpu: str = "auto", **trainer: str) -> Trial:
    """``trainer`` may hold an ``accelerator``."""
    config = RunConfig()
    config.trainer.devices = devices
    config.trainer.accelerator = Accelerator(trainer.get("accelerator", "auto"))
    composed = Composed(config, {}, {"gpu": gpu}, (), frozenset(), None, DictConfig({}), DictConfig({}))
    return Trial(GridPoint(key, {}, ("seed=1",)), composed)

"""Trials of little work, for executors: each evaluates a Python expression in place of a training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from wellfed.config.compose import Composed
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.process import StopRequest
from wellfed.study.executors.executor import StudySettings, Trial
from wellfed.study.executors.remote import process_start
from wellfed.study.executors.trial_process import ProcessStart
from wellfed.study.row import Row
from wellfed.study.trial_end import RowMaker

_PROGRAM = """
import dataclasses, os, pickle, sys, time
sys.stdin.buffer.readline()
settings, trial = pickle.load(sys.stdin.buffer)
value = str(eval(trial.overrides[0]))
row = dataclasses.replace(trial.row, status="ok", device=value, host=str(os.getpid()))
sys.stdout.buffer.write(pickle.dumps(row))
"""


def evaluating() -> ProcessStart:
    """Starts a process in place of `remote.main`: the value of the trial's override is the ``device`` of its row."""
    return replace(process_start(), program=_PROGRAM)


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
        row_of=RowMaker(),
        say=told.append,
        tick=lambda: None,
        stop=StopRequest(),
    )
    return replace(settings, **more)


def made_trial(key: str, expression: str = "1", *, devices: int = 1, gpu: str = "auto", **trainer: str) -> Trial:
    """A trial that ``evaluating`` runs; ``trainer`` may hold an ``accelerator``."""
    config = RunConfig()
    config.trainer.devices = devices
    config.trainer.accelerator = Accelerator(trainer.get("accelerator", "auto"))
    composed = Composed(config, {}, {"gpu": gpu}, (), frozenset(), None, DictConfig({}), DictConfig({}))
    return Trial(composed, (expression,), Row(key, "trial", (), "failed", 1, folder=key))

"""Checkpoints in the folder of a run: the one that a resumed run starts from, and those that a later run can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellfed.errors import EXIT_NOTHING_RUN, ConfigError
from wellfed.run.folder.checkpoint_file import WAY_OUT, is_readable, load_to_resume
from wellfed.run.folder.resume import CHECKPOINTS, Target, checkpoints_of
from wellfed.run.outcome import Outcome
from wellfed.train.lightning.checkpoints.checkpoint_trailer import BEST, LAST


class SavedTraining:
    """Checkpoints that a run began with and those that it has written.

    Args:
        is_found: whether ``resume=auto`` looks for runs where this folder is.
    """

    def __init__(self, folder: Path, target: Target | None, *, is_found: bool) -> None:
        self.target = target
        self.began_at = 0
        """Step of the checkpoint that the run has resumed from."""
        self._folder, self._is_found = folder, is_found
        self._written: list[Mapping[str, int]] = []

    def add(self, written: Mapping[str, int]) -> None:
        """Adds the steps of a training's checkpoints by file name; the mapping may still grow."""
        self._written.append(written)

    def load(self, target: Target) -> tuple[Path, dict[str, Any], Sequence[Path]]:
        """Returns the checkpoint to resume from, its content, and those of the folder that can't be used."""
        checkpoint, damaged, folder = target.checkpoint, list(target.damaged), target.checkpoint.parent.parent
        while (state := _loaded(checkpoint, target, damaged)) is None:
            damaged.append(checkpoint)
            checkpoint = next(other for other in checkpoints_of(folder) if other not in damaged)
        self.target = replace(target, checkpoint=checkpoint)
        return checkpoint, state, damaged

    def advised(self, outcome: Outcome, steps: int, *, has_trained: bool) -> Outcome:
        """Returns the outcome, with advice on how much of the training is saved and how to resume."""
        target = self.target
        is_as_before = target is not None and target.in_place and steps <= self.began_at
        if outcome.status == "failed" and is_as_before and not self._newest_written():
            why = f"{self._folder} can't be gone on with, and is as it was. rerun={self._folder} starts it again."
            return replace(outcome, exit_code=EXIT_NOTHING_RUN, advice=f"{outcome.advice} {why}".lstrip())
        if not has_trained:
            return outcome
        name, step = self._newest()
        advice = [outcome.advice] if outcome.advice else []
        if step < steps:
            advice.append(f"last saved step {step} of {steps}.")
        if name is None and target is not None:
            advice.append(f"There is no checkpoint here; resume={target.checkpoint} goes on from where this run did.")
        elif name is None:
            advice.append(f"There is no checkpoint to go on from; rerun={self._folder} starts it again.")
        else:
            advice.append(f"resume={'auto' if self._is_found else self._folder} goes on from step {step} ({name}).")
        return replace(outcome, advice=" ".join(advice))

    def _newest_written(self) -> dict[str, int]:
        """Returns the step of each checkpoint that this process has written and that still exists, by file name."""
        steps = {name: step for written in self._written for name, step in written.items()}
        return {name: step for name, step in steps.items() if (self._folder / CHECKPOINTS / name).is_file()}

    def _newest(self) -> tuple[str | None, int]:
        """Returns file and step of the checkpoint from which ``resume=`` would continue in this folder."""
        saved, target = self._newest_written(), self.target
        if LAST in saved:
            return LAST, saved[LAST]
        if target is None or not target.in_place:
            return (BEST, saved[BEST]) if BEST in saved else (None, 0)
        # A newer best.ckpt is taken only if the latest last.ckpt is damaged.
        if BEST in saved and (target.damaged or target.checkpoint.name == BEST):
            return BEST, saved[BEST]
        return target.checkpoint.name, self.began_at


def _loaded(checkpoint: Path, target: Target, damaged: Sequence[Path]) -> dict[str, Any] | None:
    """Returns the content of a checkpoint; None if it can't be resumed from and the folder has another one.

    Files of earlier versions have no digest, and a digest shows nothing about the keys.
    """
    try:
        if not is_readable(checkpoint):
            raise ConfigError.of(str(checkpoint), "is not a checkpoint that can be read.", WAY_OUT)
        return load_to_resume(checkpoint)
    except ConfigError:
        if not target.in_place or set(checkpoints_of(checkpoint.parent.parent)) <= {*damaged, checkpoint}:
            raise
        return None

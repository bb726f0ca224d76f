"""Checkpoints in the folder of a run: the one that a resumed run starts from, and those that a later run can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from wellfed.run.folder.resume import CHECKPOINTS, Target
from wellfed.run.outcome import Outcome
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST, LAST


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

    def advised(self, outcome: Outcome, steps: int) -> Outcome:
        """Returns the outcome of a training, with advice on how much of it is saved and how to resume."""
        name, step = self._newest()
        advice = [outcome.advice] if outcome.advice else []
        if step < steps:
            advice.append(f"last saved step {step} of {steps}.")
        if name is not None:
            advice.append(f"resume={'auto' if self._is_found else self._folder} goes on from step {step} ({name}).")
        elif self.target is not None:
            advice.append(f"There is no checkpoint here; resume={self.target.checkpoint} goes on from its start.")
        else:
            advice.append(f"There is no checkpoint to go on from; rerun={self._folder} starts it again.")
        return replace(outcome, advice=" ".join(advice))

    def _newest(self) -> tuple[str | None, int]:
        """Returns file and step of the checkpoint from which ``resume=`` would continue in this folder."""
        steps = {name: step for written in self._written for name, step in written.items()}
        saved = {name: step for name, step in steps.items() if (self._folder / CHECKPOINTS / name).is_file()}
        if LAST not in saved and self.target is not None and self.target.in_place:
            return self.target.checkpoint.name, self.began_at
        name = next((name for name in (LAST, BEST) if name in saved), None)
        return name, saved.get(name or "", 0)

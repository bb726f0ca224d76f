"""Writes and reads Lightning's checkpoint files, and checks before training what the user's hooks will write."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy

from wellfed import generators
from wellfed.train.checkpoint_values import SAFE, readable, save

_LOG = logging.getLogger(__name__)


class PlainCheckpointIO(TorchCheckpointIO):
    """Checkpoint files that are read without running code, unless they are ``trusted``."""

    def __init__(self, *, trusted: bool = False) -> None:
        self.trusted, self._has_warned = trusted, False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if not self.trusted:
            checkpoint, left_out = readable(checkpoint)
            if left_out and not self._has_warned:
                self._has_warned = True
                names = ", ".join(left_out)
                _LOG.warning("Left out of checkpoints, since a resume does not need these objects: %s.", names)
        name = Path(path).name
        if name.startswith(".") and name.endswith(".tmp"):  # ours: `Checkpoints` renames it
            save(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        named["weights_only"] = not self.trusted
        with torch.serialization.safe_globals(SAFE):
            content: dict[str, Any] = super().load_checkpoint(path, *arguments, **named)
        return content


class CheckedHooks(pl.Callback):
    """Call of what writes the user's part of a checkpoint, before training and without a file.

    Raises a WellfedError if a value is an object. A hook that raises is left to the first checkpoint: it may need what
    the training makes. Generators stay as they are. Must come before callbacks that report the start of the training.
    """

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, FSDPStrategy):  # all ranks would gather the weights
            return
        with generators.kept():
            try:
                content = trainer._checkpoint_connector.dump_checkpoint()
            except Exception:  # noqa: BLE001  the first checkpoint calls it again, and reports its error
                return
        readable(content)

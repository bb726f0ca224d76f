"""Restores generators, the loader's position and Lightning's counters of a checkpoint.

Lightning's counters depend on the hook in which a checkpoint was written, and on the limits of the run. From the end of
an epoch, Lightning would not restore the loader, or would count one epoch too many. The loader's position is exact: the
number of finished epochs, and the number of steps of the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed import generators
from wellfed.train.lightning.callbacks.users import averages_weights
from wellfed.train.lightning.module import StepModule

_LOG = logging.getLogger(__name__)


class ExactResume(pl.Callback):
    """Each rank's generators and the loader's position in checkpoints.

    Generators are restored before the next step. Loaders have drawn their seeds by then. Must come before
    the user's callbacks, which may draw.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = own = generators.state(trainer.strategy.root_device)
        if trainer.world_size > 1:  # all ranks save, and one writes
            of_ranks: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(of_ranks, own)
            checkpoint["rng_of_ranks"] = of_ranks
        loader = trainer.train_dataloader
        if hasattr(loader, "state_dict"):
            checkpoint["position"] = loader.state_dict()

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        of_ranks = checkpoint.get("rng_of_ranks", ())
        if len(of_ranks) == trainer.world_size:
            self._state = of_ranks[trainer.global_rank]
        elif trainer.is_global_zero or not (isinstance(module, StepModule) and module.seeds_ranks):
            self._state = checkpoint.get("rng")
        if self._state is not None:
            with generators.kept():  # a damaged state ends the run here, before training
                generators.restore(self._state, torch.device("cpu"))
        if "current_model_state" in checkpoint and not averages_weights(trainer):
            # The saved weights are the average, which training does not continue from.
            module.load_state_dict(checkpoint["current_model_state"])
            _LOG.warning("The weights were averaged in the run that goes on; from here on they are not.")

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._restore(trainer)  # before draws at the start of an epoch

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._state is not None:  # for a resume within an epoch
            self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        if self._state is not None:
            generators.restore(self._state, trainer.strategy.root_device)
            self._state = None


class GoOn(pl.Callback):
    """Restoration of the loader and Lightning's counters from a checkpoint."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        counters = checkpoint["loops"]["fit_loop"]
        positions = counters.get("state_dict", {}).get("combined_loader", [])
        if len(positions) != 1 or set(positions[0]) < {"epoch", "batch"}:
            return  # written without our loader
        self._loader.load_state_dict(positions[0])
        parts = int(module.trainer.accumulate_grad_batches)  # batches of Lightning in one of ours
        position, length = self._loader.state_dict(), len(self._loader) // parts
        stream = position.get("stream")
        if stream and stream["is_over"]:
            length = position["batch"]
        # Other loader.skip_ids change the batches of an epoch, so steps are counted. With manual optimization a batch
        # may have several steps, so batches are counted.
        step = int(checkpoint["global_step"])
        if module.automatic_optimization:
            trained = step
        else:
            trained = stream["total"] if stream else position["epoch"] * length + position["batch"]
        counters.update(counters_at(position, length, trained, counters, parts))


def counters_at(
    position: Mapping[str, int],
    steps_per_epoch: int,
    step: int,
    counters: Mapping[str, Any],
    parts: int = 1,
) -> dict[str, Any]:
    """Returns Lightning's counters at a position between two steps, or between two epochs.

    Args:
        step: number of trained batches; each has ``parts`` from now on.
        counters: the counters of the checkpoint.
    """
    epochs, batches = position["epoch"], position["batch"]
    if batches >= steps_per_epoch:
        epochs, batches = epochs + 1, 0
    begun = epochs + (batches > 0)
    epoch = {"ready": begun, "started": begun, "processed": epochs, "completed": epochs}
    total, current = dict.fromkeys(epoch, step * parts), dict.fromkeys(epoch, batches * parts)
    validated = dict.fromkeys(epoch, 0)
    return {
        "epoch_progress": {"total": dict(epoch), "current": dict(epoch)},
        "epoch_loop.state_dict": {**counters["epoch_loop.state_dict"], "_batches_that_stepped": step},
        "epoch_loop.batch_progress": {"total": total, "current": current, "is_last_batch": False},
        "epoch_loop.val_loop.batch_progress": {"total": validated, "current": dict(validated), "is_last_batch": False},
    }

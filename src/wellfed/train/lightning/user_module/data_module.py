"""Takes the data sets out of a LightningDataModule, or of a LightningModule with its own loaders.

Prepares and sets up both as Lightning does, but without a Trainer, since the plan needs the data first.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from wellfed.contract import Datasets
from wellfed.errors import ConfigError
from wellfed.ranks import own_local_rank, own_rank
from wellfed.train.lightning.hooks import overrides

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
_STAGES = {"train": "fit", "val": "fit", "test": "test"}


class NoTrainerYet:
    """Placeholder for the Trainer while data are set up, with one rank that has all samples of a step.

    The number of ranks is planned later, and does not change learning.
    """

    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = node_rank = current_epoch = global_step = 0
    is_global_zero = True
    training = validating = testing = sanity_checking = predicting = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name} is not known while data are set up, before there is a Trainer. Known are world_size "
            "(1: a step's samples are shared out to the ranks later), global_rank, local_rank and current_epoch."
        )


def datasets_of(owner: Any) -> Datasets:
    """Returns the data of a LightningDataModule, or of a LightningModule with its own loaders.

    Raises:
        ConfigError: there are no training data.
    """
    name = type(owner).__name__
    if not overrides(owner, "train_dataloader"):
        problem = f"{name} has no train_dataloader."
        raise ConfigError.of("workload.data", problem, "Give it train_dataloader(self) that returns a DataLoader.")
    attribute = "_trainer" if isinstance(owner, pl.LightningModule) else "trainer"
    vars(owner)[attribute] = NoTrainerYet()
    try:
        own = own_local_rank() if getattr(owner, "prepare_data_per_node", True) else own_rank()
        if own == 0:  # other ranks follow this one
            owner.prepare_data()
        found: dict[str, Any] = {}
        done: set[str] = set()
        for split, loaders in _LOADERS.items():
            if not overrides(owner, loaders):
                continue
            if (stage := _STAGES[split]) not in done:
                owner.setup(stage)
                done.add(stage)
            try:
                found[split] = getattr(owner, loaders)()
            except AttributeError as error:
                if overrides(owner, "setup"):
                    raise
                problem = f"{name}.{loaders}() failed ({error}), and it has no setup(stage)."
                way_out = "Make the data sets in setup(self, stage), or in __init__."
                raise ConfigError.of("workload.data", problem, way_out) from error
    finally:
        vars(owner)[attribute] = None
    _disable(owner, done)
    return Datasets(**found)


def _disable(owner: Any, done: set[str]) -> None:
    """Disables methods that were called, so that Lightning does not repeat them, and the teardown (`tear_down`)."""
    own, is_module = owner.setup, isinstance(owner, pl.LightningModule)
    done = {*done, "validate"}
    vars(owner)["prepare_data"] = lambda: None
    if overrides(owner, "setup"):
        vars(owner)["setup"] = lambda stage=None: None if stage in done else own(stage)
    if not is_module:
        vars(owner)["teardown"] = lambda stage=None: None


def transfer_hooks(data_module: Any) -> list[str]:
    """Returns the hooks of a LightningDataModule that change how a batch is moved to the device."""
    return [name for name in TRANSFER_HOOKS if overrides(data_module, name)]


def use_hooks(module: pl.LightningModule, data_module: Any) -> None:
    """Sets the data module's transfer hooks on the module; they take precedence in Lightning too."""
    for name in transfer_hooks(data_module):
        vars(module)[name] = getattr(data_module, name)


class DataModuleCallback(pl.Callback):
    """Link between a Trainer and a LightningDataModule, as if Lightning had received the latter.

    Its state is then saved in checkpoints, and its hook for exceptions is called.
    """

    def __init__(self, data_module: Any) -> None:
        self._data_module = data_module

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        trainer.datamodule, self._data_module.trainer = self._data_module, trainer


def tear_down(data_module: Any) -> None:
    """Tears down a LightningDataModule that is no longer needed."""
    for stage in ("fit", "test"):
        type(data_module).teardown(data_module, stage)

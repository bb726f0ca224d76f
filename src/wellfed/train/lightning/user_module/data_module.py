"""Takes the data sets of a split from a LightningDataModule, or from a LightningModule that brings its own loaders.

Both are prepared and set up here, as Lightning does and before there is a Trainer: the plan looks at the data first.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from wellfed.contract import Datasets
from wellfed.errors import ConfigError
from wellfed.ranks import own_local_rank, own_rank

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
_STAGES = {"train": "fit", "val": "fit", "test": "test"}


class NoTrainerYet:
    """Stands where a Trainer will be while data are set up: one rank, which all samples of a step are for.

    How many ranks share a step is planned later, and nothing that is learned depends on it.
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
    """What a LightningDataModule, or a LightningModule with loaders of its own, gives for training, validation, test.

    Raises:
        ConfigError: there are no training data.
    """
    name = type(owner).__name__
    if not _overrides(owner, "train_dataloader"):
        problem = f"{name} has no train_dataloader."
        raise ConfigError.of("workload.data", problem, "Give it train_dataloader(self) that returns a DataLoader.")
    attribute = "_trainer" if isinstance(owner, pl.LightningModule) else "trainer"
    vars(owner)[attribute] = NoTrainerYet()
    try:
        own = own_local_rank() if getattr(owner, "prepare_data_per_node", True) else own_rank()
        if own == 0:  # the turn of others comes when this one has done it
            owner.prepare_data()
        found: dict[str, Any] = {}
        done: set[str] = set()
        for split, loaders in _LOADERS.items():
            if not _overrides(owner, loaders):
                continue
            if (stage := _STAGES[split]) not in done:
                owner.setup(stage)
                done.add(stage)
            found[split] = _asked(owner, loaders)
    finally:
        vars(owner)[attribute] = None
    _leave_out(owner, done)
    return Datasets(**found)


def _asked(owner: Any, loaders: str) -> Any:
    try:
        return getattr(owner, loaders)()
    except AttributeError as error:
        if _overrides(owner, "setup"):
            raise
        problem = f"{type(owner).__name__}.{loaders}() failed ({error}), and it has no setup(stage)."
        way_out = "Make the data sets in setup(self, stage), or in __init__."
        raise ConfigError.of("workload.data", problem, way_out) from error


def _leave_out(owner: Any, done: set[str]) -> None:
    """What is done already, where Lightning would do it again; data are torn down when the run has ended."""
    own, is_module = owner.setup, isinstance(owner, pl.LightningModule)
    done = {*done, "validate"}
    vars(owner)["prepare_data"] = lambda: None
    if _overrides(owner, "setup"):
        vars(owner)["setup"] = lambda stage=None: None if stage in done else own(stage)
    if not is_module:
        vars(owner)["teardown"] = lambda stage=None: None


def _overrides(owner: Any, name: str) -> bool:
    """Whether it has a method of its own, in its class or as ``LightningDataModule.from_datasets`` gives it."""
    if name in vars(owner):
        return True
    bases = ("LightningDataModule", "LightningModule")
    base = next((cls for cls in type(owner).__mro__ if cls.__name__ in bases), None)
    return base is not None and getattr(type(owner), name) is not getattr(base, name)


def transfer_hooks(data_module: Any) -> list[str]:
    """Those of a LightningDataModule that change how a batch comes to the device."""
    return [name for name in TRANSFER_HOOKS if _overrides(data_module, name)]


def use_hooks(module: pl.LightningModule, data_module: Any) -> None:
    """Let the module's batches be moved as the data module says, whose hooks win in Lightning, too."""
    for name in transfer_hooks(data_module):
        vars(module)[name] = getattr(data_module, name)


class DataModuleCallback(pl.Callback):
    """Makes a Trainer and a LightningDataModule known to each other, as where Lightning was given the latter.

    Lightning then keeps its state in checkpoints and tells it of an exception.
    """

    def __init__(self, data_module: Any) -> None:
        self._data_module = data_module

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        trainer.datamodule, self._data_module.trainer = self._data_module, trainer


def tear_down(data_module: Any) -> None:
    """When nothing is asked of it any more."""
    for stage in ("fit", "test"):
        type(data_module).teardown(data_module, stage)

"""Looks at a user's loaders before the plan, and hands them to Lightning as they came."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from wellfed import generators
from wellfed.config.schema import RunConfig
from wellfed.data.own_loader import is_stream
from wellfed.data.remade_loader import remade, typed_changes, why_fixed
from wellfed.errors import ConfigError, type_and_line
from wellfed.ranks import own_local_rank, own_rank
from wellfed.train.guest.marks import is_overridden

LOADERS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class NoTrainerYet:
    """Placeholder for the Trainer while loaders are looked at. Notes which other attribute was ``asked`` for."""

    asked = ""
    current_epoch = global_step = 0
    training = validating = testing = sanity_checking = predicting = False

    def __init__(self, num_devices: int, num_nodes: int) -> None:
        self.num_devices, self.num_nodes, self.world_size = num_devices, num_nodes, num_devices * num_nodes
        self.global_rank, self.local_rank = own_rank(), own_local_rank()
        self.node_rank, self.is_global_zero = self.global_rank // num_devices, self.global_rank == 0

    def __getattr__(self, name: str) -> Any:
        self.asked = f"trainer.{name}"
        raise AttributeError(f"{self.asked} is not known yet")


@dataclass(frozen=True)
class GuestLoaders:
    """Loaders of the user, from a LightningDataModule, from the LightningModule itself, or from ``workload.data``."""

    owner: Any = None
    """The LightningDataModule or LightningModule that gives them; None = they were handed over."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Split -> a loader, several, or anything that Lightning reads. Of an owner: those of the first look, if any."""
    step_samples: int | None = None
    """Samples of a step of all ranks that were typed; None = as the loaders have it."""
    unknown: str = ""
    """Why the loaders of the owner are unknown before training; empty if they are known."""

    @property
    def data_module(self) -> pl.LightningDataModule | None:
        """The LightningDataModule that gives them, if any."""
        return self.owner if isinstance(self.owner, pl.LightningDataModule) else None

    @property
    def of_training(self) -> list[Any]:
        """The loaders of training, as far as they are known."""
        return [] if self.given.get("train") is None else list(combined(self.given["train"]).flattened)

    @property
    def first(self) -> DataLoader[Any] | None:
        """The DataLoader of training; None if there are several, or another iterable."""
        found = self.of_training
        return found[0] if len(found) == 1 and isinstance(found[0], DataLoader) else None

    def has(self, split: str) -> bool:
        """Returns whether there is a loader for a split."""
        return split in self.given or (self.owner is not None and is_overridden(self.owner, LOADERS[split]))

    @property
    def name(self) -> str:
        """Classes of the loaders of training, and of what gives them."""
        kinds = " and ".join(sorted({type(one).__name__ for one in self.of_training}))
        return " of ".join(filter(None, [kinds, "" if self.owner is None else type(self.owner).__name__]))

    def changed(self, config: RunConfig, split: str, loaders: Any, parts: int = 1) -> Any:
        """Returns loaders of a split with what was typed changed in each DataLoader, for one rank.

        Args:
            parts: batches of a step of training, as ``memory.accumulate`` has it.

        Raises:
            ConfigError: a loader can't be made again so.
        """
        changes = self.changes(config, split)
        if loaders is None or not (changes or parts > 1):
            return [] if loaders is None and split != "train" else loaders  # Lightning refuses None
        made = copy.copy(combined(loaders))
        made.flattened = [part_of(remade(one, changes, split), parts) for one in made.flattened]
        return made if isinstance(loaders, CombinedLoader) else made.iterables

    def changes(self, config: RunConfig, split: str) -> dict[str, Any]:
        """Returns the arguments of a split's DataLoaders that were typed, for one rank."""
        found = typed_changes(config, split)
        if split == "train":
            found.pop("batch_size", None)  # the configuration has that of the first look by now
            if self.step_samples is not None:
                found["batch_size"] = self.step_samples // config.trainer.world_size
        return found

    @contextmanager
    def handed_over(self, change: Callable[[str, Callable[[], Any]], Any], **loaders: Any) -> Iterator[dict[str, Any]]:
        """Yields the arguments of ``Trainer.fit`` or ``test`` that name the loaders. Those of an owner go through
        ``change`` within the block.

        Args:
            change: called with the split and the owner's hook; returns the loaders that Lightning gets.
            loaders: those that an owner does not give.
        """
        if self.owner is None:
            yield loaders
            return
        hooks = {hook: (split, getattr(self.owner, hook)) for split, hook in LOADERS.items() if self.has(split)}
        with replaced(self.owner, {hook: partial(change, *own) for hook, own in hooks.items()}):
            yield {} if self.data_module is None else {"datamodule": self.data_module}


def part_of(loader: Any, parts: int) -> Any:
    """Returns the same DataLoader of training with batches of its ``batch_size`` over ``parts``.

    Raises:
        ConfigError: it can't be made again so.
    """
    if parts == 1:
        return loader
    why = why_fixed(loader)
    if not why and (loader.batch_size is None or loader.batch_size % parts):
        why = f"its batch_size is {loader.batch_size}"
    elif not why and is_stream(loader.dataset) and loader.num_workers > 1:
        why = f"each of its {loader.num_workers} workers makes whole batches of a stream"
    if why:
        problem = f"needs a train DataLoader that can be made again with 1/{parts} of its batch_size, and {why}."
        way_out = "Set memory.accumulate=1, or hand over a DataLoader whose batch_size is a multiple."
        raise ConfigError.of(f"memory.accumulate={parts}", problem, way_out)
    return remade(loader, {"batch_size": loader.batch_size // parts})


def combined(loaders: Any) -> CombinedLoader:
    """Returns loaders as Lightning combines those of training."""
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


def looked_at(owner: Any, num_devices: int, num_nodes: int) -> GuestLoaders:
    """Returns the loaders of a LightningDataModule or LightningModule, looked at once before the plan.

    ``prepare_data`` and ``setup("fit")`` are called for it, and not again by Lightning. If they need more of the
    Trainer than its ranks, or fail, all is left to Lightning; attributes and generators are as before.

    Raises:
        ConfigError: there is no loader for training.
    """
    name = type(owner).__name__
    if not is_overridden(owner, LOADERS["train"]):
        problem = f"{name} has no train_dataloader."
        raise ConfigError.of("workload.data", problem, "Give it train_dataloader(self) that returns a DataLoader.")
    attribute = "_trainer" if isinstance(owner, pl.LightningModule) else "trainer"
    given, why, before, undo_draws = {}, "", dict(vars(owner)), generators.way_back(owner)
    stand_in = vars(owner)[attribute] = NoTrainerYet(num_devices, num_nodes)
    try:
        own = own_local_rank() if getattr(owner, "prepare_data_per_node", True) else own_rank()
        if own == 0:  # other ranks follow this one
            owner.prepare_data()
        owner.setup(TrainerFn.FITTING)
        with generators.kept(owner):  # Lightning calls them again
            for split in ("train", "val"):
                if is_overridden(owner, LOADERS[split]):
                    given[split] = getattr(owner, LOADERS[split])()
    except Exception as error:  # noqa: BLE001  if it is not for want of the Trainer, Lightning's call raises it again
        why = type_and_line(error)
    if why := stand_in.asked or why:
        undo_draws()
        owner.__dict__ = before
        return GuestLoaders(owner, unknown=f"{name} does not make them without a Trainer ({why})")
    vars(owner)[attribute] = None
    for hook in ("prepare_data", "setup"):
        if is_overridden(owner, hook):
            vars(owner)[hook] = partial(_skip_once, owner, hook, getattr(owner, hook))
    return GuestLoaders(owner, given)


def _skip_once(owner: Any, hook: str, own: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Does nothing in Lightning's first call of a hook for the training, since it is made; else calls it."""
    if hook == "prepare_data" or "fit" in (*arguments, *named.values()):
        vars(owner).pop(hook, None)
    else:
        own(*arguments, **named)


@contextmanager
def replaced(owner: Any, instead: Mapping[str, Any]) -> Iterator[None]:
    """Replaces methods of an object within the context."""
    now = vars(owner)
    before = {name: now[name] for name in instead if name in now}
    now.update(instead)
    try:
        yield
    finally:
        for name in instead:
            now.pop(name, None)  # it may have been removed already
        now.update(before)


class Bare:
    """The engine's loader for Lightning: batches without their positions. It goes on where its position is."""

    def __init__(self, loader: Any, *, drop_last: bool = False) -> None:
        self._loader, self.drop_last = loader, drop_last
        self.dataset = getattr(loader, "dataset", None)
        """The dataset, for hooks that change it between epochs."""
        self.latest: Any = None
        """Latest delivery without its batch."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for delivery in self._loader:
            handed = [delivery.batch]
            delivery.num_samples, delivery.batch = delivery.size, None
            self.latest = delivery
            del delivery  # a reference here would keep it on the device
            yield handed.pop()

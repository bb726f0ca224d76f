"""Reads the user's loaders from a place within an epoch, or in parts of each batch. Keeps that place in checkpoints.

Nothing here takes part in an ordinary run but the counting of batches.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader

from wellfed import generators
from wellfed.contract import Batch
from wellfed.ranks import share_of
from wellfed.train.guest.marks import is_within_step, samples_of

_LOG = logging.getLogger(__name__)
Split = Callable[[Batch, list[int]], list[Batch]]


@dataclass
class Parts:
    """Parts of each batch, whose summed gradients equal that of the whole batch."""

    number: int
    split: Split
    """Returns successive parts of a batch by their sizes, which may be 0."""
    weights: deque[float] = field(default_factory=deque)
    """Factors on the losses of the parts that are handed out and not yet computed. Lightning divides each loss by the
    number of parts, so the samples of a smaller part would count too much."""

    def of(self, batch: Batch) -> list[Batch]:
        """Returns the parts of a batch, the largest first, so that memory runs out at once."""
        if batch is None:  # has no step
            return [None] * self.number
        total = samples_of(batch)
        shares = (share_of(total, part, self.number) for part in range(self.number))
        sizes = sorted(map(len, shares), reverse=True)
        self.weights.extend(size * self.number / total for size in sizes)
        return self.split(batch, sizes)


def weighing(step: Callable[..., Any], weight: Callable[[], float]) -> Callable[..., Any]:
    """Returns the strategy's ``training_step`` with its loss weighed; logged values are unchanged.

    The module itself stays as it is, so that a deep copy of it, such as an average of the weights, runs its own step.

    Args:
        weight: called once a step with the factor of its loss.
    """

    def training_step(*arguments: Any, **named: Any) -> Any:
        output, factor = step(*arguments, **named), weight()
        if output is None or factor == 1:
            return output
        return {**output, "loss": output["loss"] * factor} if isinstance(output, Mapping) else output * factor

    return training_step


class SchedulersOfParts(pl.Callback):
    """Scaling of the frequency of schedulers that count batches, since Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches


class PlacedLoader(CombinedLoader):
    """The user's loaders as Lightning combines them, from a place on or in parts. ``iterables`` are their own."""

    _place: Place | None
    """Place to begin at, once."""
    _parts: Parts | None
    _waiting: deque[Any]

    @classmethod
    def of(cls, loaders: Any, place: Place | None, parts: Parts | None) -> Any:
        """Returns the loaders unchanged where they are read from the begin of an epoch, in whole batches.

        Loaders with ``load_state_dict`` are placed by Lightning.
        """
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        if any(hasattr(one, "load_state_dict") for one in combined.flattened):
            place = None
        if place is None and parts is None:
            return loaders
        placed = copy.copy(combined)
        placed.__class__ = cls
        assert isinstance(placed, cls)
        placed._place, placed._parts, placed._waiting = place, parts, deque()
        return placed

    def __len__(self) -> int:
        return int(super().__len__()) * (1 if self._parts is None else self._parts.number)

    def _has_length(self) -> bool:
        """Returns whether the epoch has a length. Without one Lightning reads a batch ahead."""
        try:
            return len(self) >= 0
        except (TypeError, OverflowError):
            return False

    def __iter__(self) -> Self:
        self._waiting.clear()
        if self._parts is not None:
            self._parts.weights.clear()
        if self._place is None:
            super().__iter__()
        else:
            with generators.kept(self.iterables):  # for the length; the reading begins with the first batch
                super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._place is not None:
            place, self._place = self._place, None
            place.begin(self.iterables, super().__iter__, super().__next__, is_ahead=not self._has_length())
        if self._parts is None:
            return super().__next__()
        if not self._waiting:
            batch, *about = super().__next__()
            self._waiting.extend((part, *about) for part in self._parts.of(batch))
        return self._waiting.popleft()


class Place(pl.Callback):
    """Place in the training data, in checkpoints: finished epochs, batches of the next, and its generators' states.

    Generators are restored before the next step. Loaders have drawn their seeds by then. Must come before the user's
    callbacks, which may draw.
    """

    def __init__(self, saved: Mapping[str, Any] | None, is_waiting: Callable[[], bool], loader: Any = None) -> None:
        """
        Args:
            saved: the entry ``position`` of the checkpoint to go on from; None = the training is new.
            is_waiting: returns whether a batch was asked for and has not come.
            loader: the engine's loader, which has its own position; None = the user's loaders are read.
        """
        self.epoch = self.batch = self.batches = 0
        """Finished epochs, batches of the next one, and batches in all."""
        self._saved, self._is_waiting, self._loader = saved, is_waiting, loader
        if saved is not None:
            self.epoch, self.batch, self.batches = (int(saved[name]) for name in ("epoch", "batch", "batches"))
        self._began, self._first = (None, None) if saved is None else (saved.get("began"), saved.get("first"))
        """States of the generators before the loaders of the present epoch were opened, and before its first batch."""
        self._rng: dict[str, Any] | None = None
        self._device = torch.device("cpu")

    # -- counting -------------------------------------------------------------------------------------------------

    def before_reading(self, trainer: pl.Trainer) -> None:
        """Notes the states of all generators before the loaders are opened: order and draws follow from them."""
        if self.batch == 0:
            self._began = self._states(trainer)

    def before_fetch(self, trainer: pl.Trainer) -> None:
        """Notes them before the first batch: a sampler may draw only then."""
        if self.batch == 0:
            self._first = self._states(trainer)

    def _states(self, trainer: pl.Trainer) -> dict[str, Any]:
        found: dict[str, Any] = {"rng": generators.state(trainer.strategy.root_device)}
        if trainer.train_dataloader is not None:
            found["held"] = _held(trainer.train_dataloader)
        return found

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._restore_rng()  # before draws at the start of an epoch

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._restore_rng()  # for a resume within an epoch

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not is_within_step(trainer, batch_idx):
            self.batch, self.batches = self.batch + 1, self.batches + 1
            if trainer.is_last_batch:
                self._end_epoch()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        # There was no further batch, and no length that showed it before; or a hook has ended the epoch.
        if self._is_waiting() or trainer.is_last_batch:
            self._end_epoch()
        if self._saved is not None:
            # Else ReduceLROnPlateau skips the epoch of a resume, and with max_steps the setter would make it true.
            trainer.fit_loop._restarting = False

    def _end_epoch(self) -> None:
        if self.batch:
            self.epoch, self.batch = self.epoch + 1, 0

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = own = generators.state(trainer.strategy.root_device)
        if trainer.world_size > 1:  # all ranks save, and one writes
            of_ranks: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(of_ranks, own)
            checkpoint["rng_of_ranks"] = of_ranks
        position: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "batches": self.batches}
        if self._loader is not None:
            position["loader"] = self._loader.state_dict()
        elif self.batch:
            position |= {"began": self._began, "first": self._first}
        elif trainer.train_dataloader is not None:
            position["held"] = _held(trainer.train_dataloader)
        checkpoint["position"] = position

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" or self._saved is None:
            return
        of_ranks, self._device = checkpoint.get("rng_of_ranks", ()), trainer.strategy.root_device
        self._rng = of_ranks[trainer.global_rank] if len(of_ranks) == trainer.world_size else checkpoint.get("rng")
        if self._rng is not None:
            with generators.kept():  # a damaged state ends the run here, before training
                generators.restore(self._rng, torch.device("cpu"))
        if self._loader is not None and "loader" in self._saved:
            self._loader.load_state_dict(self._saved["loader"])
            if self.batch and self._loader.state_dict()["batch"] == 0:  # it begins the epoch anew
                self.batch = 0
        counters = checkpoint["loops"]["fit_loop"]
        counters.update(self.counters(counters, int(trainer.accumulate_grad_batches)))

    def counters(self, before: Mapping[str, Any], parts: int) -> dict[str, Any]:
        """Returns Lightning's counters at this place.

        Those of the checkpoint depend on the hook in which it was written, and on the limits of its run.

        Args:
            before: the counters of the checkpoint.
            parts: parts of each batch from now on.
        """
        begun = self.epoch + (self.batch > 0)
        epoch = {"ready": begun, "started": begun, "processed": self.epoch, "completed": self.epoch}
        total, current = dict.fromkeys(epoch, self.batches * parts), dict.fromkeys(epoch, self.batch * parts)
        none = dict.fromkeys(epoch, 0)
        return {
            "epoch_progress": {"total": dict(epoch), "current": dict(epoch)},
            "epoch_loop.state_dict": {**before["epoch_loop.state_dict"], "_batches_that_stepped": self.batches},
            "epoch_loop.batch_progress": {"total": total, "current": current, "is_last_batch": False},
            "epoch_loop.val_loop.batch_progress": {"total": none, "current": dict(none), "is_last_batch": False},
        }

    def _restore_rng(self) -> None:
        if self._rng is not None:
            generators.restore(self._rng, self._device)
            self._rng = None

    def begin(self, loaders: Any, begin: Callable[[], Any], read: Callable[[], Any], *, is_ahead: bool) -> None:
        """Opens the loaders as the run did that wrote the checkpoint, and reads up to the place.

        Args:
            is_ahead: batches are read a step ahead, so the next one was read before the checkpoint was written.
        """
        assert self._saved is not None
        if self.batch == 0:
            self._restore_states(loaders, {"held": self._saved.get("held")})
            if is_ahead:
                self._restore_rng()
            begin()
            return
        self._restore_states(loaders, self._began or {})
        begin()
        self._restore_states(loaders, self._first or {})
        for _ in range(self.batch):
            read()
        if not is_ahead:
            self._restore_rng()
        _LOG.info("%d batches of epoch %d were read again, up to the place of the checkpoint.", self.batch, self.epoch)

    def _restore_states(self, loaders: Any, states: Mapping[str, Any]) -> None:
        """Restores the generators that loaders hold, then those of the process."""
        for generator, state in zip(generators.held_by(loaders), states.get("held") or (), strict=False):
            generators.set_state(generator, state)
        if "rng" in states:
            generators.restore(states["rng"], self._device)


def _held(loaders: Any) -> list[Any]:
    """Returns the states of the generators that loaders hold: in samplers, data sets and attributes of these."""
    return [generators.state_of(one) for one in generators.held_by(loaders)]

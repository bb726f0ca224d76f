"""Reads the user's loaders from a place within an epoch, or in parts of each batch. Keeps that place in checkpoints."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES

from wellfed import generators
from wellfed.contract import Batch
from wellfed.data.reading_state import restore_states, states_of
from wellfed.errors import ConfigError
from wellfed.ranks import own_rank, share_of
from wellfed.train.guest.marks import samples_of

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


def asks_again(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Returns whether one computes the gradient of a step repeatedly. Lightning gives it the last part alone."""
    return any(isinstance(one, torch.optim.LBFGS) for one in optimizers)


class SchedulersOfParts(pl.Callback):
    """Scaling of the frequency of schedulers that count batches, since Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if asks_again(trainer.optimizers):
            problem = "LBFGS computes the gradient of a step repeatedly, and Lightning would use the last part alone."
            way_out = "Set memory.accumulate=1 and memory.micro_batch=null."
            raise ConfigError.of(f"memory.accumulate={trainer.accumulate_grad_batches}", problem, way_out)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches


class PlacedLoader(CombinedLoader):
    """Loaders as Lightning combines them, from a place on or in parts. ``iterables`` are the user's own."""

    def __init__(self, loaders: Any, place: Place | None, parts: Parts | None) -> None:
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
        super().__init__(combined.iterables, combined._mode)
        self._place, self._parts = place, parts
        self._waiting = deque[Any]()

    def __len__(self) -> int:
        return int(super().__len__()) * (1 if self._parts is None else self._parts.number)

    def __iter__(self) -> Self:
        self._waiting.clear()
        if self._parts is not None:
            self._parts.weights.clear()
        if self._place is not None and self._place.is_resuming:  # the first batch opens them; this gives their length
            self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](self.flattened, self._limits)
            return self
        if self._place is not None:
            self._place.opens(self.flattened)
        super().__iter__()
        return self

    def __next__(self) -> Any:
        if self._place is not None and self._place.is_resuming:
            self._place.resume(self.flattened, super().__iter__, super().__next__)
        if self._parts is None:
            return super().__next__()
        if not self._waiting:
            batch, *about = super().__next__()
            self._waiting.extend((part, *about) for part in self._parts.of(batch))
        return self._waiting.popleft()


class Place(pl.Callback):
    """Place in the training data, in checkpoints: finished epochs, batches of the next, and its generators' states.

    A resume opens the loaders as the epoch did, reads up to the place, and restores all generators. Must come before
    the user's callbacks, which may draw.
    """

    def __init__(self, saved: Mapping[str, Any] | None, fed: Any = None) -> None:
        """
        Args:
            saved: the checkpoint to go on from; None = the training is new.
            fed: the engine's loader, which has its own position; None = the user's loaders are read.
        """
        self.epoch = self.batch = self.batches = 0
        """Finished epochs, batches of the next one, and batches in all."""
        self.is_resuming, self._saved, self._fed = saved is not None, saved or {}, fed
        self._start: dict[str, Any] = {}
        """States of generators before the loaders of the present epoch were opened."""
        self._is_open = False
        """The loaders of the next batch have been opened, which may have drawn."""
        self._rng: dict[str, Any] | None = None
        self._device = torch.device("cpu")
        if saved is not None:
            position = saved["position"]
            self.epoch, self.batch, self.batches = (int(position[name]) for name in ("epoch", "batch", "batches"))
            self._start, self._rng = _own(position.get("starts")) or {}, _own(saved.get("rng_of_ranks"))
            self._is_open = bool(position.get("is_open"))

    def opens(self, loaders: list[Any]) -> None:
        """Notes the states of all generators before loaders are opened: order and draws follow from them."""
        self._note_start(loaders)
        self._is_open = True

    def _note_start(self, loaders: list[Any]) -> None:
        if self._fed is None:
            stay = any(getattr(one, "_iterator", None) is not None for one in loaders)
            self._start = {**states_of(loaders), "workers_stay": stay}

    def resume(self, loaders: list[Any], begin: Callable[[], Any], read: Callable[[], Any]) -> None:
        """Opens the loaders as the run did that wrote the checkpoint, and reads up to the place.

        Loaders with ``load_state_dict`` are placed by Lightning.
        """
        was_open, is_placed = self._is_open, any(hasattr(one, "load_state_dict") for one in loaders)
        self.is_resuming, self._is_open = False, True
        if self._start.get("workers_stay"):
            with generators.kept(loaders):
                begin()  # opened a second time they draw no new seed
        if was_open and not is_placed and self._fed is None:
            with generators.kept():
                restore_states(loaders, self._start)
                begin()
                for _ in range(self.batch):
                    read()
            self._restore_rng()
            _LOG.info("%d batches of epoch %d were read again, up to the checkpoint.", self.batch, self.epoch)
            return
        restore_states(loaders, {"held": self._start.get("held")})
        self._restore_rng()
        begin()

    def _restore_rng(self) -> None:
        if self._rng is not None:
            generators.restore(self._rng, self._device)
            self._rng = None

    # -- counting -------------------------------------------------------------------------------------------------

    def count(self, *, is_last: bool) -> None:
        """Counts a batch."""
        self.batch, self.batches = self.batch + 1, self.batches + 1
        if is_last:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self.batch:
            self.epoch, self.batch, self._is_open = self.epoch + 1, 0, False

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._end_epoch()  # a hook has ended the last one, or no further batch came
        if trainer.current_epoch > 0 and not self.is_resuming:
            self._is_open = False  # Lightning opens loaders again that it has just reloaded
        if self.batch or not self._is_open:
            self._restore_rng()  # before draws at the start of an epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._saved:
            # Else ReduceLROnPlateau skips the epoch of a resume, and with max_steps the setter would make it true.
            trainer.fit_loop._restarting = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        loaders = [] if trainer.fit_loop._combined_loader is None else trainer.fit_loop._combined_loader.flattened
        if not self._is_open and not self.is_resuming:
            self._note_start(loaders)
        own = generators.state(trainer.strategy.root_device), self._start
        of_ranks = [own] * trainer.world_size
        if trainer.world_size > 1:  # all ranks save, and one writes
            torch.distributed.all_gather_object(of_ranks, own)
        position: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "batches": self.batches}
        position["is_open"] = self._is_open
        position["starts"] = [start for _, start in of_ranks]
        if self._fed is not None:
            position["loader"] = self._fed.state_dict()
        checkpoint |= {"rng": own[0], "rng_of_ranks": [rng for rng, _ in of_ranks], "position": position}

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" or not self._saved:
            return
        self._device = trainer.strategy.root_device
        if self._fed is not None and "loader" in self._saved["position"]:
            self._fed.load_state_dict(self._saved["position"]["loader"])
            if self.batch and self._fed.state_dict()["batch"] == 0:  # it begins the epoch anew
                self.batch = 0
        counters = checkpoint["loops"]["fit_loop"]
        counters.update(self._counters(counters, int(trainer.accumulate_grad_batches)))

    def _counters(self, before: Mapping[str, Any], parts: int) -> dict[str, Any]:
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


def _own(of_ranks: Any) -> Any:
    """Returns this rank's own entry, or the first where there are others than now."""
    if not of_ranks:
        return None
    return of_ranks[own_rank()] if own_rank() < len(of_ranks) else of_ranks[0]

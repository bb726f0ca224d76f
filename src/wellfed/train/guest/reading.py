"""Reads the user's loaders from a place within an epoch, or in parts of each batch. Keeps that place in checkpoints."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from wellfed.train.guest.data import combined, replaced
from wellfed.train.guest.marks import latest_of, samples_of

_LOG = logging.getLogger(__name__)


@dataclass
class Parts:
    """Parts of each batch, whose summed gradients equal that of the whole batch."""

    number: int
    split: Callable[[Batch, list[int]], list[Batch]]
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


@contextmanager
def weighed(trainer: pl.Trainer, parts: Parts | None, num_ranks: int) -> Iterator[None]:
    """Weighs losses by their samples within the block: those of parts, and of ranks that the engine's loader feeds.

    Logged values are unchanged. The module itself stays as it is, so that a deep copy of it, such as an average of the
    weights, runs its own step.

    Args:
        num_ranks: ranks that the engine's loader feeds; 1 where each reads a loader of the user's.
    """
    step = trainer.strategy.training_step

    def training_step(*arguments: Any, **named: Any) -> Any:
        output, factor = step(*arguments, **named), 1.0 if parts is None else parts.weights.popleft()
        if num_ranks > 1 and (latest := latest_of(trainer)) is not None:
            factor *= 0.0 if latest.is_padding else latest.size * num_ranks / latest.total
        if output is None or factor == 1:
            return output
        return {**output, "loss": output["loss"] * factor} if isinstance(output, Mapping) else output * factor

    with replaced(trainer.strategy, {} if parts is None and num_ranks == 1 else {"training_step": training_step}):
        yield


class SchedulersOfParts(pl.Callback):
    """Scaling of the frequency of schedulers that count batches, since Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if any(isinstance(one, torch.optim.LBFGS) for one in trainer.optimizers):
            problem = "LBFGS computes the gradient of a step repeatedly, and Lightning would use the last part alone."
            way_out = "Set memory.accumulate=1 and memory.micro_batch=null."
            raise ConfigError.of(f"memory.accumulate={trainer.accumulate_grad_batches}", problem, way_out)
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches


class PlacedLoader(CombinedLoader):
    """Loaders as Lightning combines them, from a place on or in parts. ``iterables`` are the user's own."""

    def __init__(self, loaders: Any, place: Place | None, parts: Parts | None) -> None:
        given = combined(loaders)
        super().__init__(given.iterables, given._mode)
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
        """States of generators before the loaders of the present epoch were opened. Without ``rng`` they have not been
        opened, or they keep their place themselves."""
        self._rng: dict[str, Any] | None = None
        self._device = torch.device("cpu")
        if saved is not None:
            position = saved["position"]
            self.epoch, self.batch, self.batches = (int(position[name]) for name in ("epoch", "batch", "batches"))
            self._start, self._rng = _own(position["starts"]), _own(saved["rng_of_ranks"])

    def opens(self, loaders: list[Any]) -> None:
        """Notes the states of all generators before loaders are opened: order and draws follow from them."""
        if self._fed is None:
            keep_place = any(hasattr(one, "load_state_dict") for one in loaders)  # Lightning saves and restores it
            self._start = _unopened(loaders) if keep_place else _states(loaders)

    def resume(self, loaders: list[Any], begin: Callable[[], Any], read: Callable[[], Any]) -> None:
        """Opens the loaders as the run did that wrote the checkpoint, and reads up to the place."""
        start, self.is_resuming = self._start, False
        was_open = start.get("rng") is not None
        self._restore_rng()
        if start.get("workers_stay"):
            with generators.kept(loaders):
                begin()  # opened a second time they draw no new seed
        with generators.kept() if was_open else nullcontext():
            restore_states(loaders, start)
            if not was_open:
                self.opens(loaders)
            begin()
            for _ in range(self.batch if was_open else 0):
                read()
        if was_open:
            _LOG.info("%d batches of epoch %d were read again, up to the checkpoint.", self.batch, self.epoch)

    def _restore_rng(self) -> None:
        if self._rng is not None:
            generators.restore(self._rng, self._device)
            self._rng = None

    def count(self, *, is_last: bool) -> None:
        """Counts a batch."""
        self.batch, self.batches = self.batch + 1, self.batches + 1
        if is_last:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self.batch:
            self.epoch, self.batch, self._start = self.epoch + 1, 0, {}

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._end_epoch()  # a hook has ended the last one, or no further batch came
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:
            self._start = {}  # Lightning opens loaders after this hook, those again that it has just reloaded
        self._restore_rng()  # before draws at the start of an epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._saved:
            # Else ReduceLROnPlateau skips the epoch of a resume, and with max_steps the setter would make it true.
            trainer.fit_loop._restarting = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        read, start = trainer.fit_loop._combined_loader, self._start
        if not (start or self.is_resuming) and self._fed is None:
            start = _unopened([] if read is None else read.flattened)
        own = generators.state(trainer.strategy.root_device), start
        of_ranks = [own] * trainer.world_size
        if trainer.world_size > 1:  # all ranks save, and one writes
            torch.distributed.all_gather_object(of_ranks, own)
        position: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "batches": self.batches}
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
        # Lightning's counters in the file depend on the hook in which it was written, and on the limits of its run.
        counters, parts = checkpoint["loops"]["fit_loop"], int(trainer.accumulate_grad_batches)
        begun, names = self.epoch + (self.batch > 0), ("ready", "started", "processed", "completed")
        epoch = dict(zip(names, (begun, begun, self.epoch, self.epoch), strict=True))
        total, current, none = (dict.fromkeys(names, n) for n in (self.batches * parts, self.batch * parts, 0))
        counters |= {
            "epoch_progress": {"total": dict(epoch), "current": epoch},
            "epoch_loop.batch_progress": {"total": total, "current": current, "is_last_batch": False},
            "epoch_loop.val_loop.batch_progress": {"total": none, "current": dict(none), "is_last_batch": False},
        }
        counters["epoch_loop.state_dict"]["_batches_that_stepped"] = self.batches


def _states(loaders: list[Any]) -> dict[str, Any]:
    stay = any(getattr(one, "_iterator", None) is not None for one in loaders)
    return {**states_of(loaders), "workers_stay": stay}


def _unopened(loaders: list[Any]) -> dict[str, Any]:
    return {**_states(loaders), "rng": None}


def _own(of_ranks: Any) -> Any:
    """Returns this rank's own entry, or the first where there are others than now."""
    return of_ranks[own_rank()] if own_rank() < len(of_ranks) else of_ranks[0]

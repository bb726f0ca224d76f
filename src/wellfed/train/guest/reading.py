"""Reads the user's loaders from a place within an epoch, and keeps that place in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader

from wellfed import generators
from wellfed.data.reading_state import restore_states, states_of
from wellfed.errors import ConfigError
from wellfed.ranks import own_rank
from wellfed.train.guest.data import combined, replaced
from wellfed.train.guest.marks import is_within_step, latest_of

_LOG = logging.getLogger(__name__)


def weigh(trainer: pl.Trainer) -> None:
    """Weighs the losses of ranks that the engine's loader feeds by their samples.

    Logged values are unchanged. The module itself stays as it is, so that a deep copy of it, such as an average of the
    weights, runs its own step.
    """
    strategy: Any = trainer.strategy
    step = strategy.training_step

    def training_step(*arguments: Any, **named: Any) -> Any:
        output, latest = step(*arguments, **named), latest_of(trainer)
        assert latest is not None
        factor = 0.0 if latest.is_padding else latest.size * trainer.world_size / latest.total
        if output is None or factor == 1:
            return output
        return {**output, "loss": output["loss"] * factor} if isinstance(output, Mapping) else output * factor

    strategy.training_step = training_step


class PlacedLoader(CombinedLoader):
    """Loaders as Lightning combines them, from a place on. ``iterables`` are the user's own."""

    def __init__(self, loaders: Any, place: Place | None, parts: int) -> None:
        """``parts``: batches of a step."""
        given = combined(loaders)
        super().__init__(given.iterables, given._mode)
        self._place, self._parts = place, parts

    def __len__(self) -> int:
        """Returns the batches of an epoch: those of whole steps if all loaders drop their last batch."""
        length = int(super().__len__())
        drops_last = all(getattr(one, "drop_last", False) for one in self.flattened)
        return length - length % self._parts if drops_last else length

    def __iter__(self) -> Self:
        with nullcontext(0) if self._place is None else self._place.opening(self.flattened) as num_done:
            super().__iter__()
            for _ in range(num_done):
                super().__next__()
        return self


class Place(pl.Callback):
    """Place in the training data, in checkpoints: finished epochs, batches of the next, and its generators' states.

    A batch is what Lightning counts as one, of which ``memory.accumulate`` make a step. A resume opens the loaders as
    the epoch did, reads up to the place, and restores all generators. Must come before the user's callbacks, which may
    draw.
    """

    def __init__(self, saved: Mapping[str, Any] | None, parts: int, fed: Any = None) -> None:
        """
        Args:
            saved: the checkpoint to go on from; None = the training is new.
            parts: batches of a step.
            fed: the engine's loader, which goes on where it is set; None = the user's loaders are read.
        """
        self.epoch = self.batch = self.batches = self.steps = 0
        """Finished epochs, batches of the next one; batches and steps in all."""
        self._saved, self._parts, self._fed, self._is_to_open = saved, parts, fed, saved is not None
        self._start: dict[str, Any] = {}
        """States of generators before the loaders of the present epoch were opened. Without ``rng`` they have not been
        opened, or they keep their place themselves."""
        self.rng: dict[str, Any] | None = None
        """States of generators for the first step of a resume."""
        self._device = torch.device("cpu")
        if saved is not None:
            position = saved["position"]
            if "steps" not in position:
                raise ConfigError.of("resume", "another version of wellfed wrote it.", "Start again: rerun=<its run>.")
            self.epoch, self.batch = int(position["epoch"]), int(position["batch"]) * parts
            self.steps, self.batches = int(position["steps"]), int(position["batches"]) * parts // position["parts"]
            own = own_rank() if own_rank() < len(position["starts"]) else 0  # there may have been other ranks than now
            self._start, self.rng = position["starts"][own], saved["rng_of_ranks"][own]

    @contextmanager
    def opening(self, loaders: list[Any]) -> Iterator[int]:
        """Returns a context for opening the loaders of an epoch, in which those of a resume find all generators as the
        run had them that wrote the checkpoint. Its value: the batches that were done, which are dropped there."""
        if self._fed is not None:
            self._fed.load_state_dict({**self._fed.state_dict(), "epoch": self.epoch, "batch": self.batch})
            yield 0
        elif not self._is_to_open:
            self._note(loaders)
            yield 0
        else:
            start, self._is_to_open = self._start, False
            was_open = start.get("rng") is not None
            with generators.kept(), ExitStack() as opened_before:
                restore_states(loaders, start if was_open else {**start, "rng": self.rng})
                for one in loaders if start.get("workers_stay") else ():  # opened a second time they draw no new seed
                    opened_before.enter_context(replaced(one, {"generator": torch.Generator()}))
                if was_open:
                    yield self.batch
                    _LOG.info("%d batches of epoch %d were read again, up to the checkpoint.", self.batch, self.epoch)
                else:
                    self._note(loaders)
                    yield 0
                    self.rng = generators.state(self._device)

    def _note(self, loaders: list[Any]) -> None:
        """Notes the states of all generators before loaders are opened: order and draws follow from them."""
        keep_place = any(hasattr(one, "load_state_dict") for one in loaders)  # Lightning saves and restores it
        self._start = {**states_of(loaders), "rng": None} if keep_place else states_of(loaders)

    def restore_rng(self) -> None:
        """Restores the process's generators before the first step of a resume."""
        if self.rng is not None:
            generators.restore(self.rng, self._device)
            self.rng = None

    def _end_epoch(self) -> None:
        if self.batch:
            self.epoch, self.batch, self._start = self.epoch + 1, 0, {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self._parts == 1:
            return
        if any(isinstance(one, torch.optim.LBFGS) for one in trainer.optimizers):
            problem = "LBFGS computes the gradient of a step repeatedly, and Lightning would use the last part alone."
            raise ConfigError.of(f"memory.accumulate={self._parts}", problem, "Set memory.accumulate=1.")
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency > 1:
                config.frequency *= self._parts  # Lightning counts batches

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._end_epoch()  # a hook has ended the last one, or no further batch came
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:
            self._start = {}  # Lightning opens loaders after this hook, those again that it has just reloaded
        self.restore_rng()  # before draws at the start of an epoch

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch, self.batches = self.batch + 1, self.batches + 1
        self.steps += not is_within_step(trainer, batch_idx)
        if trainer.is_last_batch:
            self._end_epoch()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._saved:
            # Else ReduceLROnPlateau skips the epoch of a resume, and with max_steps the setter would make it true.
            trainer.fit_loop._restarting = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        read, start = trainer.fit_loop._combined_loader, self._start
        if not start and self._fed is None:
            start = {**states_of([] if read is None else read.flattened), "rng": None}
        own = generators.state(trainer.strategy.root_device), start
        of_ranks = [own] * trainer.world_size
        if trainer.world_size > 1:  # all ranks save, and one writes
            torch.distributed.all_gather_object(of_ranks, own)
        batch, rest = divmod(self.batch, self._parts)  # a step that is half done is done again
        position: dict[str, Any] = {"epoch": self.epoch, "batch": batch, "steps": self.steps}
        position |= {"batches": self.batches - rest, "parts": self._parts, "starts": [start for _, start in of_ranks]}
        position["loader"] = {} if self._fed is None else self._fed.state_dict()
        checkpoint |= {"rng": own[0], "rng_of_ranks": [rng for rng, _ in of_ranks], "position": position}

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit" or not self._saved:
            return
        self._device = trainer.strategy.root_device
        if self._fed is not None:
            at = {**self._saved["position"]["loader"], "epoch": self.epoch, "batch": self.batch}
            self._fed.load_state_dict(at)
            self.batch = self._fed.state_dict()["batch"]  # 0 if it begins the epoch anew
        # Lightning's counters in the file depend on the hook in which it was written, and on the limits of its run.
        counters, names = checkpoint["loops"]["fit_loop"], ("ready", "started", "processed", "completed")
        begun = self.epoch + (self.batch > 0)
        epoch = dict(zip(names, (begun, begun, self.epoch, self.epoch), strict=True))
        total, current, none = (dict.fromkeys(names, n) for n in (self.batches, self.batch, 0))
        counters |= {
            "epoch_progress": {"total": dict(epoch), "current": epoch},
            "epoch_loop.batch_progress": {"total": total, "current": current, "is_last_batch": False},
            "epoch_loop.val_loop.batch_progress": {"total": none, "current": dict(none), "is_last_batch": False},
        }
        counters["epoch_loop.state_dict"]["_batches_that_stepped"] = self.steps

"""Hands a user's LightningModule the batch of a step in parts, whose gradients Lightning sums before the step.

A part has the samples that a smaller batch would have, and all parts together those of the step: what is learned, the
order of the samples and the position in them stay what they are for whole batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl

from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.streams.stream_loader import UNKNOWN_LENGTH
from wellfed.ranks import share_of
from wellfed.train.lightning.callbacks.clock import TimedLoader


class InParts:
    """A loader of bare batches, each handed out in ``num_parts`` nearly equal parts.

    Always so many, since Lightning steps after so many: of fewer samples the first stands for the parts that are left,
    and counts nothing there.
    """

    def __init__(self, loader: TimedLoader, num_parts: int, split: Callable[[Batch, list[int]], list[Batch]]) -> None:
        """``split``: successive parts of a batch, one of no samples too."""
        self._loader, self._num_parts, self._split = loader, num_parts, split
        self.weight = 1.0
        """By which the loss of the latest part is multiplied. Lightning divides each by their number, and so counts the
        samples of a smaller part more."""

    def __len__(self) -> int:
        steps = len(self._loader)
        return steps if steps == UNKNOWN_LENGTH else steps * self._num_parts

    @property
    def latest(self) -> Delivery | None:
        """The step of the latest part, all of it."""
        return self._loader.latest

    @property
    def on_last(self) -> Callable[[], None]:
        """Told that the next step is the last of its epoch, where only the loader can know that."""
        return self._loader.on_last

    @on_last.setter
    def on_last(self, told: Callable[[], None]) -> None:
        self._loader.on_last = told

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, which counts steps: asked for between two of them."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position."""
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            assert self.latest is not None
            num_samples = self.latest.size
            shares = (share_of(num_samples, part, self._num_parts) for part in range(self._num_parts))
            sizes = sorted(map(len, shares), reverse=True)  # what does not fit shows at once
            parts = list(zip(self._split(batch, sizes), sizes, strict=True))
            del batch
            while parts:  # what stands still here would keep it on the device
                part, size = parts.pop(0)
                self.weight = size * self._num_parts / num_samples
                handed = [part]
                del part
                yield handed.pop()


def weighing_parts(module: Any) -> Callable[..., Any]:
    """The module's ``training_step``, whose loss goes by the weight of the part; what it logs stays as it is."""
    step = module.training_step

    @functools.wraps(step)
    def training_step(*arguments: Any, **named: Any) -> Any:
        output, weight = step(*arguments, **named), getattr(module.trainer.train_dataloader, "weight", 1.0)
        if output is None or weight == 1:
            return output
        return {**output, "loss": output["loss"] * weight} if isinstance(output, Mapping) else output * weight

    return training_step


class SchedulersOfParts(pl.Callback):
    """Lets schedulers that step after every so many batches do so after as many steps: Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

"""Splits the batch of a step for a user's LightningModule; Lightning sums the gradients of the parts.

All parts together have the samples of the step. Learning, the order of the samples and the loader's position are the
same as with whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl

from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.streams.stream_loader import UNKNOWN_LENGTH
from wellfed.ranks import share_of
from wellfed.train.lightning.callbacks.clock import TimedLoader


class InParts:
    """A loader of bare batches, each split into ``num_parts`` nearly equal parts.

    Lightning steps after that number of parts. With fewer samples, the other parts are the first sample with weight 0.
    """

    def __init__(self, loader: TimedLoader, num_parts: int, split: Callable[[Batch, list[int]], list[Batch]]) -> None:
        """``split`` returns successive parts of a batch by their sizes, which may be 0."""
        self._loader, self._num_parts, self._split = loader, num_parts, split
        self.weight = 1.0
        """Factor on the loss of the latest part. Lightning divides each loss by the number of parts, so the samples of
        a smaller part would count too much."""

    def __len__(self) -> int:
        steps = len(self._loader)
        return steps if steps == UNKNOWN_LENGTH else steps * self._num_parts

    @property
    def latest(self) -> Delivery | None:
        """The whole batch of the latest part."""
        return self._loader.latest

    @property
    def on_last(self) -> Callable[[], None]:
        """Function called before the last step of an epoch, if only the loader can recognise it."""
        return self._loader.on_last

    @on_last.setter
    def on_last(self, told: Callable[[], None]) -> None:
        self._loader.on_last = told

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's position, which counts steps. Call it between two steps."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a position."""
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            assert self.latest is not None
            num_samples = self.latest.size
            shares = (share_of(num_samples, part, self._num_parts) for part in range(self._num_parts))
            sizes = sorted(map(len, shares), reverse=True)  # the largest first, so that memory runs out at once
            parts = list(zip(self._split(batch, sizes), sizes, strict=True))
            del batch
            while parts:  # a reference here would keep a part on the device
                part, size = parts.pop(0)
                self.weight = size * self._num_parts / num_samples
                handed = [part]
                del part
                yield handed.pop()


def weighing_parts(trainer: pl.Trainer) -> Callable[..., Any]:
    """Returns the strategy's ``training_step`` with its loss weighed by the part; logged values are unchanged.

    The module itself stays as it is, so that a deep copy of it, such as an average of the weights, runs its own step.
    """
    step = trainer.strategy.training_step

    def training_step(*arguments: Any, **named: Any) -> Any:
        output, weight = step(*arguments, **named), getattr(trainer.train_dataloader, "weight", 1.0)
        if output is None or weight == 1:
            return output
        return {**output, "loss": output["loss"] * weight} if isinstance(output, Mapping) else output * weight

    return training_step


class SchedulersOfParts(pl.Callback):
    """Scaling of the frequency of schedulers that count batches, since Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

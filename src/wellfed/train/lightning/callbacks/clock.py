"""Sets the marks of the step clock and writes finished steps down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.observe.timing.wall import END, EPOCH_END
from wellfed.ranks import largest_share
from wellfed.train.lightning.module import StepModule


class TimedLoader:
    """A loader that tells the clock when it is asked for a batch and when it has it."""

    def __init__(
        self,
        loader: Any,
        clock: StepClock,
        *,
        unwrap: bool = False,
        on_first: Callable[[Mapping[str, int]], None] = lambda by_dtype: None,
    ) -> None:
        """
        Args:
            unwrap: hand out the bare batch, which is what a user's own LightningModule expects.
            on_first: called with the bytes of the first batch by dtype.
        """
        self._loader, self._clock, self._unwrap = loader, clock, unwrap
        self._on_first: Callable[[Mapping[str, int]], None] | None = on_first
        self.latest: Delivery | None = None
        """What was handed out last, without its batch, where that was handed out bare."""
        self.on_last: Callable[[], None] = lambda: None
        """Told that the next batch is the last of its epoch, where only the loader can know that."""

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, int]:
        """The loader's position."""
        return self._loader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position."""
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        batches_of_epoch = iter(self._loader)
        keep_pace = getattr(self._loader, "keep_pace", lambda: None)
        while True:
            keep_pace()
            self._clock.ask()
            try:
                batch = next(batches_of_epoch)
            except StopIteration:
                return
            self._clock.got()
            if self._on_first is not None:
                self._on_first(batches.bytes_by_dtype(batch.batch))
                self._on_first = None
            self._clock.copy_begins(batch.epoch, batch.took)
            if self._unwrap:
                self.latest = replace(batch, batch=None, num_samples=batch.size)
            if batch.is_last:
                self.on_last()
            handed = [batch.batch if self._unwrap else batch]
            del batch  # what stands still here would keep it on the device
            yield handed.pop()


class BareBatches:
    """An evaluation loader without the deliveries around its batches, for a user's own LightningModule."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for delivery in self._loader:
            handed = [delivery.batch]
            del delivery  # what stands still here would keep it on the device
            yield handed.pop()


def step_samples(trainer: pl.Trainer, module: Any, batch: Any) -> int:
    """Samples of the step over all ranks, as the model counts them."""
    delivery = delivery_of(trainer, batch)
    own = module.step.samples if isinstance(module, StepModule) and module.step is not None else None
    if delivery is not None and (delivery.is_padding or own in (None, delivery.size)):
        return delivery.total  # exact where ranks' shares differ by one
    return int((batches.batch_size(batch) if own is None else own) * trainer.world_size)


def delivery_of(trainer: pl.Trainer, batch: Any) -> Delivery | None:
    """What the loader knows of this batch of training, also where the module gets the bare batch."""
    return batch if isinstance(batch, Delivery) else getattr(trainer.train_dataloader, "latest", None)


def is_within_step(trainer: pl.Trainer) -> bool:
    """Whether a step that is done in parts (`lit.parts`) has some left."""
    parts: int = trainer.accumulate_grad_batches
    return parts > 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready % parts != 0


class Clock(pl.Callback):
    """Must be the first callback: what the others do in their hooks is host time."""

    def __init__(
        self, clock: StepClock, take: Callable[[Iterable[StepRow]], None], *, warmup_steps: int = WARMUP_STEPS
    ) -> None:
        self.clock, self._take, self._warmup_left = clock, take, warmup_steps

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.fit_loop.epoch_loop.wall = self.clock.wall  # of `loop.StepLoop`

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.clock.copied()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer):
            return
        step = module.step if isinstance(module, StepModule) else None
        told: Any = step or module
        if disturbed := getattr(told, "was_disturbed", False):
            told.was_disturbed = False
        delivery, parts = delivery_of(trainer, batch), trainer.accumulate_grad_batches
        size = batches.batch_size(batch) if delivery is None else delivery.size
        self.clock.end(
            step=trainer.global_step,
            samples=step_samples(trainer, module, batch),
            micro_batch=step.largest if step else largest_share(size, parts),
            num_micro=step.num_micro_batches if step else parts,
            warmup=disturbed or self._warmup_left > 0,
        )
        self._warmup_left = max(0, self._warmup_left - 1)
        self._take(self.clock.rows())
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.clock.wall.switch(EPOCH_END)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.clock.interrupt()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.clock.interrupt()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.clock.interrupt()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        self.clock.wall.switch(END)
        self._take(self.clock.rows(wait=True))


class StopWhenMeasured(pl.Callback):
    """Must stand behind `Clock`. With several ranks, which would have to agree, all the steps are run.

    The rate is known when half its 95 % interval is ``within`` this part of it.
    """

    def __init__(self, summary: Callable[[], StepSummary | None], within: float) -> None:
        self._summary, self._within = summary, within
        self._next_look = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size > 1 or trainer.global_step < self._next_look:
            return
        found = self._summary()
        steps = 0 if found is None else found.steps
        # Looking takes time that counts: the further on, the rarer.
        self._next_look = trainer.global_step + max(MIN_STEPS - steps, steps // 4, 1)
        if found is None or found.ci95 is None or steps < MIN_STEPS:
            return
        low, high = found.ci95
        trainer.should_stop |= found.samples_per_s > 0 and (high - low) / 2 <= self._within * found.samples_per_s

"""Marks the events of each step on the step clock, and passes on finished steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.own_loader import UNKNOWN_LENGTH
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, WARMUP_STEPS, StepClock, StepRow
from wellfed.observe.timing.wall import END, EPOCH_END
from wellfed.process import StopRequest
from wellfed.ranks import largest_share, share_of
from wellfed.train.lightning.module import StepModule


class TimedLoader:
    """A loader that marks on the clock when a batch is requested and when it is ready."""

    def __init__(
        self,
        loader: Any,
        clock: StepClock,
        *,
        unwrap: bool = False,
        on_first: Callable[[Mapping[str, int]], None] = lambda by_dtype: None,
        on_batch: Callable[[Delivery], None] | None = None,
        stop: StopRequest | None = None,
        num_parts: int = 1,
        split: Callable[[Batch, list[int]], list[Batch]] | None = None,
    ) -> None:
        """
        Args:
            unwrap: yield bare batches, as a user's own LightningModule expects.
            num_parts: yield so many nearly equal parts of each bare batch. With fewer samples, the other parts are the
                first sample with weight 0.
            split: returns successive parts of a batch by their sizes, which may be 0.
            on_first: called with the bytes of the first batch by dtype.
            on_batch: called with each batch, after its wait has ended.
            stop: the request whose signals end a wait for a batch at once.
        """
        self._loader, self._clock, self._unwrap = loader, clock, unwrap
        self._num_parts, self._split = num_parts, split
        self._on_batch, self._stop = on_batch, stop
        self._on_first: Callable[[Mapping[str, int]], None] | None = on_first
        self.latest: Delivery | None = None
        """Latest delivery without its batch, if batches are yielded bare."""
        self.weight = 1.0
        """Factor on the loss of the latest part. Lightning divides each loss by the number of parts, so the samples of
        a smaller part would count too much."""
        self.on_last: Callable[[], None] = lambda: None
        """Function called before the last batch of an epoch, if only the loader can recognise it."""

    def __len__(self) -> int:
        steps = len(self._loader)
        return steps if steps == UNKNOWN_LENGTH else steps * self._num_parts

    def state_dict(self) -> dict[str, int]:
        """Returns the loader's position, which counts steps. Call it between two steps."""
        return self._loader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at a position."""
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        batches_of_epoch = iter(self._loader)
        keep_pace, clock = getattr(self._loader, "keep_pace", None), self._clock
        exchanges = hasattr(self._loader, "on_own")  # ranks then wait for one another, too
        if exchanges:
            self._loader.on_own = clock.got
        while True:
            if keep_pace is not None:
                keep_pace()
            clock.ask()
            if self._stop is not None:
                self._stop.begin_wait()
            try:
                batch = next(batches_of_epoch)
            except StopIteration:
                return
            finally:
                if self._stop is not None:
                    self._stop.is_stepping = True
            if exchanges:
                clock.exchanged()
            else:
                clock.got()
            if self._on_first is not None:
                self._on_first(batches.bytes_by_dtype(batch.batch))
                self._on_first = None
            if self._on_batch is not None:
                self._on_batch(batch)
            clock.copy_begins(batch.epoch, batch.took, batch.copy_ahead_ms)
            if self._unwrap:
                self.latest = replace(batch, batch=None, num_samples=batch.size)
            if batch.is_last:
                self.on_last()
            if self._num_parts == 1:
                handed = [batch.batch if self._unwrap else batch]
                del batch  # a reference here would keep it on the device
                yield handed.pop()
                continue
            parts = self._parts_of(batch)
            del batch
            while parts:
                self.weight = parts[-1][0]
                yield parts.pop()[1]

    def _parts_of(self, batch: Delivery) -> list[tuple[float, Batch]]:
        """Returns the parts of a batch with their weights, the last first."""
        assert self._split is not None
        shares = (share_of(batch.size, part, self._num_parts) for part in range(self._num_parts))
        sizes = sorted(map(len, shares), reverse=True)  # the largest first, so that memory runs out at once
        weights = [size * self._num_parts / batch.size for size in sizes]
        return list(zip(weights, self._split(batch.batch, sizes), strict=True))[::-1]


class BareBatches:
    """An evaluation loader of bare batches, for a user's own LightningModule."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for delivery in self._loader:
            handed = [delivery.batch]
            del delivery  # a reference here would keep it on the device
            yield handed.pop()


def step_samples(trainer: pl.Trainer, module: Any, batch: Any) -> int:
    """Returns the samples of the step over all ranks, counted by the model."""
    delivery = batch if isinstance(batch, Delivery) else delivery_of(trainer, batch)
    own = module.step.passes.samples if isinstance(module, StepModule) and module.step is not None else None
    if delivery is not None and (delivery.is_padding or own is None or own == delivery.size):
        return delivery.total  # exact if ranks' shares differ by one
    return int((batches.batch_size(batch) if own is None else own) * trainer.world_size)


def delivery_of(trainer: pl.Trainer, batch: Any) -> Delivery | None:
    """Returns the delivery of this batch of training, even if the module gets the bare batch."""
    return batch if isinstance(batch, Delivery) else getattr(trainer.train_dataloader, "latest", None)


def is_within_step(trainer: pl.Trainer) -> bool:
    """Returns whether more parts of the step follow (see `TimedLoader`)."""
    parts: int = trainer.accumulate_grad_batches
    return parts > 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready % parts != 0


class Clock(pl.Callback):
    """Marks of a step. Must be the first callback, so that the time of the others counts as host time."""

    def __init__(
        self,
        clock: StepClock,
        take: Callable[[Iterable[StepRow]], None],
        *,
        warmup_steps: int = WARMUP_STEPS,
        on_save: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_save`` is called on each rank before a checkpoint is written."""
        self.clock, self._take, self._warmup_left = clock, take, warmup_steps
        self._on_save = on_save

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        if isinstance(module, StepModule):
            module.clock = self.clock

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.fit_loop.epoch_loop.wall = self.clock.wall  # of `loop.StepLoop`

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.clock.copied()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer):
            return
        step = module.step if isinstance(module, StepModule) else None
        owner: Any = step or module
        if disturbed := getattr(owner, "was_disturbed", False):
            owner.was_disturbed = False
        if step is not None:
            largest, num_parts = step.passes.largest, step.passes.num_micro_batches
        else:
            delivery, num_parts = delivery_of(trainer, batch), trainer.accumulate_grad_batches
            largest = largest_share(batches.batch_size(batch) if delivery is None else delivery.size, num_parts)
        is_due = self.clock.end(
            step=trainer.global_step,
            samples=step_samples(trainer, module, batch),
            micro_batch=largest,
            num_micro=num_parts,
            warmup=disturbed or self._warmup_left > 0,
        )
        if self._warmup_left:
            self._warmup_left -= 1
        if is_due:
            self._take(self.clock.rows())
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.clock.wall.switch(EPOCH_END)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.clock.interrupt()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.clock.interrupt()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.clock.interrupt()
        self._on_save()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        self.clock.wall.switch(END)
        self._take(self.clock.rows(wait=True))


class ModulePhases(pl.Callback):
    """Marks of the phases on the step clock, by Lightning's hooks. Must be the first callback after `Clock`.

    The forward pass begins with the batch. Phases are unknown with manual optimization, and for a module that calls
    its optimizer without Lightning.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._has_stepped = False
        """An optimizer's step was seen. Without one, its time would count as that of another phase."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(FORWARD)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        self._begin(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin(OTHER)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._has_stepped = module.automatic_optimization
        self._begin(OPTIMIZER)

    def _begin(self, phase: int) -> None:
        if self._has_stepped:
            self._clock.mark((phase, self._clock.now_s()))


class StopWhenMeasured(pl.Callback):
    """End of a timed training, once half the 95 % interval of its rate is ``within`` this share of it.

    Must come after `Clock`. Several ranks run all steps, since they would have to agree.
    """

    def __init__(self, summary: Callable[[], StepSummary | None], within: float) -> None:
        self._summary, self._within = summary, within
        self._next_look = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size > 1 or trainer.global_step < self._next_look:
            return
        found = self._summary()
        steps = 0 if found is None else found.steps
        # The check takes time, so it gets rarer.
        self._next_look = trainer.global_step + max(MIN_STEPS - steps, steps // 4, 1)
        if found is None or found.ci95 is None or steps < MIN_STEPS:
            return
        low, high = found.ci95
        trainer.should_stop |= found.samples_per_s > 0 and (high - low) / 2 <= self._within * found.samples_per_s

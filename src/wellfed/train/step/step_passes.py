"""Makes the forward and backward passes of a step, one for each micro-batch, weighted by its share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FeatureSource
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, Mark
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.gradients import as_zeros
from wellfed.train.step.loss import Loss, add_place
from wellfed.train.step.micro_batches import MicroBatch, Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.totals import Totals


class NoWeight(Exception):
    """Error for a step without weight on any rank: nothing is masked, or all is padding."""


class Computation:
    """Forward and backward passes of a step, which compute the gradients of a batch.

    Args:
        ranks: None = this process trains alone.
        features: returns the source of feature rows; called for each micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        prepare: Preparation,
        precision: Precision,
        device: torch.device,
        ranks: Ranks | None = None,
        features: Callable[[], FeatureSource | None] = lambda: None,
    ) -> None:
        self.model, self.loss, self.precision, self.device = model, loss, precision, device
        self.ranks, self.features = ranks or Ranks(), features
        self.micro, self.totals = MicroBatches(1), Totals()
        """Size of micro-batches, and sums of figures; set by the step."""
        self.num_micro_batches = self.largest = self.samples = 0
        """Latest step on this rank: micro-batches, samples of the largest, samples that the model counts."""
        self.mark: Callable[[Mark], None] = deque[Mark](maxlen=0).append
        """Begins a phase on the clock of the training; by default nothing is timed."""
        self.now_s: Callable[[], float] = time.monotonic
        """Returns the time of that clock."""
        self.trained = list(model.parameters())
        """All weights, cached since finding them visits all modules."""
        self._prepare = prepare

    def __call__(self, delivery: Delivery, parts: Sequence[MicroBatch] | None = None) -> Tensor:
        """Computes the gradients of a batch in place of earlier ones, and returns its loss.

        Args:
            parts: its micro-batches; None = it is split.

        Raises:
            NoWeight: the step has no weight on any rank.
        """
        if parts is None:
            parts = self.split(delivery)
        self.forget()
        self.num_micro_batches, self.largest, self.samples = len(parts), 0, 0
        for number, part in enumerate(parts):
            self.largest = max(self.largest, part.size)
            with self.ranks.micro_batch(number, len(parts)):
                self._pass(delivery, part)
            if len(parts) > 1 and number == 0 and self.loss.overwrites:
                for weight in self.trained:  # later gradients are added to a copy
                    weight.grad = None if weight.grad is None else weight.grad.clone()
        return self.totals.pending("loss")

    def _pass(self, delivery: Delivery, part: MicroBatch) -> None:
        ranks, precision = self.ranks, self.precision
        self.mark((FORWARD, self.now_s()))
        with precision.forward():
            loss = ranks.forward(self._weighted_loss, delivery, part)
        if precision.scaler is not None:
            loss = precision.scaler.scale(loss)
        self.mark((BACKWARD, self.now_s()))
        if part.share:
            ranks.backward(loss)
        else:
            with as_zeros(self.trained):
                ranks.backward(loss)
        del loss  # frees its graph

    def _weighted_loss(self, delivery: Delivery, part: MicroBatch) -> Tensor:
        """Returns the weighted loss of a micro-batch; adds its figures to the totals."""
        ranks, prepare, totals = self.ranks, self._prepare, self.totals
        batch = batches.to_device(part.batch, self.device)
        if prepare.has_on_device:
            batch = prepare(batch, delivery, part.number * ranks.size + ranks.number, self.features())
        try:
            output = self.loss(batch)
        except Exception as error:
            add_place(error, delivery, "train")
            raise
        if not delivery.is_padding:
            self.samples += part.size if output.num_samples is None else output.num_samples
        figures = {"loss": output.loss, **output.metrics}
        if not part.share:  # a mean over nothing is NaN
            for name, value in figures.items():
                totals.add(name, torch.zeros_like(value), 1)
            return output.loss.nan_to_num(0.0, 0.0, 0.0) * 0
        # Gradients are averaged over ranks, so a rank's share is multiplied by their number.
        factor, overwrites = part.share * ranks.size, self.loss.overwrites
        for name, value in figures.items():
            totals.add(name, value, factor, is_overwritten=overwrites)
        return output.loss if factor == 1 else output.loss * factor  # a factor of 1 would cost a kernel

    def forget(self) -> None:
        """Drops gradients and figures of an earlier step or attempt."""
        self.totals.drop()
        for weight in self.trained:
            weight.grad = None

    def split(self, delivery: Delivery) -> list[MicroBatch]:
        """Returns the micro-batches of a batch, each with its share of the step.

        Micro-batches without weight are left out. Each of several ranks keeps at least one, whose gradients are
        replaced by zeros.

        Raises:
            NoWeight: the step has no weight on any rank.
        """
        sizes, prepare = self.micro.sizes(delivery.size), self._prepare
        if len(sizes) == 1 and self.ranks.size == 1 and not (prepare.has_own_weight or delivery.is_padding):
            return [MicroBatch(delivery.batch, 0, sizes[0], 1.0)]
        parts = prepare.split(delivery.batch, sizes)
        weights = [0] * len(parts) if delivery.is_padding else prepare.weights(delivery, parts, sizes)
        total: float = delivery.total
        if self.ranks.size == 1 or prepare.has_own_weight:
            total = self.ranks.total(sum(weights))
            if not total:
                raise NoWeight
        found = enumerate(zip(parts, sizes, weights, strict=True))
        made = [MicroBatch(part, number, size, weight / total) for number, (part, size, weight) in found]
        return [part for part in made if part.share] or made[:1]

"""Makes the forward and backward passes of a step, one for each micro-batch, weighted by its share."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FeatureSource
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, Mark
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.compiled import Loss
from wellfed.train.step.gradients import as_zeros
from wellfed.train.step.loss_faults import add_place
from wellfed.train.step.micro_batches import MicroBatch, Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.totals import Totals


class NoWeight(Exception):
    """Error for a step without weight on any rank: nothing is masked, or all is padding."""


@dataclass(frozen=True)
class Computation:
    """Model, loss and data preparation of a step, with its precision, device and other ranks."""

    model: nn.Module
    loss: Loss
    prepare: Preparation
    precision: Precision
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    features: Callable[[], FeatureSource | None] = lambda: None
    """Returns the source of feature rows; called for each micro-batch."""


class StepPasses:
    """Computation of a batch's gradients; adds its figures to the totals."""

    def __init__(
        self,
        computation: Computation,
        micro: MicroBatches,
        totals: Totals,
        *,
        checks_losses: bool = False,
    ) -> None:
        """``checks_losses``: note whether all losses are finite."""
        self.num_micro_batches = self.largest = self.samples = 0
        """Latest step on this rank: micro-batches, samples of the largest, samples that the model counts."""
        self.losses_are_finite: Tensor | None = None
        """Whether all losses of the latest step are finite, as a tensor on the device; None = unknown."""
        self.mark: Callable[[Mark], None] = deque[Mark](maxlen=0).append
        """Begins a phase on the clock of the training; by default nothing is timed."""
        self.now_s: Callable[[], float] = time.monotonic
        """Returns the time of that clock."""
        self.trained = list(computation.model.parameters())
        """All weights, cached since finding them visits all modules."""
        self._loss, self._prepare, self._features = computation.loss, computation.prepare, computation.features
        self._precision, self._device, self._ranks = computation.precision, computation.device, computation.ranks
        self._micro, self._totals, self._checks_losses = micro, totals, checks_losses

    def __call__(self, delivery: Delivery) -> Tensor:
        """Splits a batch, computes its gradients and returns its loss.

        Raises:
            NoWeight: the step has no weight on any rank.
        """
        return self.forward_backward(delivery, self.split(delivery))

    def forward_backward(self, delivery: Delivery, parts: Sequence[MicroBatch]) -> Tensor:
        """Computes the gradients of all micro-batches; replaces earlier gradients. Returns the loss."""
        self.forget()
        self.num_micro_batches, self.largest, self.samples = len(parts), 0, 0
        self.losses_are_finite = None
        for number, part in enumerate(parts):
            self.largest = max(self.largest, part.size)
            context = self._ranks.micro_batch(number, len(parts))
            if context is None:
                self._pass(delivery, part)
            else:
                with context:
                    self._pass(delivery, part)
            if len(parts) > 1 and number == 0 and self._loss.overwrites:
                for weight in self.trained:  # later gradients are added to a copy
                    weight.grad = None if weight.grad is None else weight.grad.clone()
        return self._totals.pending("loss")

    def _pass(self, delivery: Delivery, part: MicroBatch) -> None:
        ranks, precision = self._ranks, self._precision
        self.mark((FORWARD, self.now_s()))
        context = precision.forward()
        if context is None:
            loss = ranks.forward(self._weighted_loss, delivery, part)
        else:
            with context:
                loss = ranks.forward(self._weighted_loss, delivery, part)
        if precision.scaler is not None:
            loss = precision.scale(loss)
        self.mark((BACKWARD, self.now_s()))
        if part.share:
            ranks.backward(loss)
        else:
            with as_zeros(self.trained):
                ranks.backward(loss)
        del loss  # frees its graph

    def _weighted_loss(self, delivery: Delivery, part: MicroBatch) -> Tensor:
        """Returns the weighted loss of a micro-batch; adds its figures to the totals."""
        ranks, prepare, totals = self._ranks, self._prepare, self._totals
        batch = batches.to_device(part.batch, self._device)
        if prepare.has_on_device:
            batch = prepare(batch, delivery, part.number * ranks.size + ranks.number, self._features())
        try:
            output = self._loss(batch)
        except Exception as error:
            add_place(error, delivery, "train")
            raise
        if not delivery.is_padding:
            self.samples += part.size if output.num_samples is None else output.num_samples
        if not part.share:  # a mean over nothing is NaN
            totals.add("loss", torch.zeros_like(output.loss), 1)
            for name, value in output.metrics.items():
                totals.add(name, torch.zeros_like(value), 1)
            return output.loss.nan_to_num(0.0, 0.0, 0.0) * 0
        # Gradients are averaged over ranks, so a rank's share is multiplied by their number.
        factor = part.share * ranks.size
        overwrites = self._loss.overwrites
        totals.add("loss", output.loss, factor, is_overwritten=overwrites)
        for name, value in output.metrics.items():
            totals.add(name, value, factor, is_overwritten=overwrites)
        if self._checks_losses:
            is_finite, before = torch.isfinite(output.loss.detach()), self.losses_are_finite
            self.losses_are_finite = is_finite if before is None else before & is_finite
        return output.loss if factor == 1 else output.loss * factor  # a factor of 1 would cost a kernel

    def forget(self) -> None:
        """Drops gradients and figures of an earlier step or attempt."""
        self._totals.drop()
        for weight in self.trained:
            weight.grad = None

    def split(self, delivery: Delivery) -> list[MicroBatch]:
        """Returns the micro-batches of a batch, each with its share of the step.

        Micro-batches without weight are left out. Each of several ranks keeps at least one, whose gradients are
        replaced by zeros.

        Raises:
            NoWeight: the step has no weight on any rank.
        """
        sizes = self._micro.sizes(delivery.size)
        if len(sizes) == 1 and self._ranks.size == 1 and not (self._prepare.has_own_weight or delivery.is_padding):
            return [MicroBatch(delivery.batch, 0, sizes[0], 1.0)]
        parts = self._prepare.split(delivery.batch, sizes)
        weights = [0] * len(parts) if delivery.is_padding else self._prepare.weights(delivery, parts, sizes)
        if self._ranks.size > 1 and not self._prepare.has_own_weight:
            total: float = delivery.total
        else:
            total = self._ranks.total(sum(weights))
            if not total:
                raise NoWeight
        found = enumerate(zip(parts, sizes, weights, strict=True))
        made = [MicroBatch(part, number, size, weight / total) for number, (part, size, weight) in found]
        return [part for part in made if part.share] or made[:1]

    def weigh(self, delivery: Delivery) -> None:
        """Notes the weights of a batch's micro-batches, unless they are known. The batch must be on the host."""
        if self._prepare.has_own_weight and delivery.weights is None and not delivery.is_padding:
            self._prepare.weigh(delivery, self._micro.sizes(delivery.size))

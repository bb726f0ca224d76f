"""Evaluates the batches of a split, in smaller parts if memory runs out, and merges the metrics of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FeatureSource
from wellfed.errors import DataError, ModelError, OutOfMemoryExhausted
from wellfed.record import OnEvent
from wellfed.train.memory import oom
from wellfed.train.memory.snapshot import Snapshot
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.loss_faults import add_place
from wellfed.train.step.micro_batches import Preparation

SHARING_STRATEGIES = ("auto", "ddp")
"""Strategies in which each rank has the whole model and can evaluate a batch alone."""


@dataclass
class Evaluating:
    """Evaluation of the batches of a split. After an out-of-memory error it halves the batch, and all later ones."""

    model: nn.Module
    evaluation: SplitMetrics
    splits: Mapping[str, Preparation]
    may_halve: bool
    on_event: OnEvent
    shares: bool = False
    """Ranks share the batches, and merge their metrics at the end."""
    _at_most: int | None = None
    _failure: Exception | None = None

    def begin(self) -> None:
        """Empties the metrics before a pass over a split."""
        self.evaluation.reset()
        self._failure = None

    def take(
        self, split: str, delivery: Delivery, features: FeatureSource | None, device: torch.device, step: int
    ) -> None:
        """Adds a batch, which may still be on the host.

        Raises:
            OutOfMemoryExhausted: a single sample does not fit, or the evaluation had already added a part of the batch
                to a large tensor.
        """
        if delivery.is_padding:
            self._failure = delivery.failure
            return
        prepare, evaluation = self.splits[split], self.evaluation
        sizes, done, attempts = self._sizes(delivery.size), 0, oom.Attempts()
        parts = prepare.split(delivery.batch, sizes)

        before: list[Snapshot] = []

        def update() -> None:
            before.clear()
            if self.may_halve:
                before.extend(Snapshot(part, device, leave_out=self.model) for part in evaluation.parts)
            weight = prepare.weight(parts[done], sizes[done]) if evaluation.takes_loss else 0
            batch = prepare(batches.to_device(parts[done], device), delivery, done, features)
            try:
                evaluation.update(batch, weight, features)
            except ModelError as error:
                add_place(error, delivery, split, sum(sizes[:done]))
                raise

        while done < len(sizes):
            if not self.may_halve:
                update()
                done += 1
                continue
            _, failure = attempts(update)
            if failure is None:
                done += 1
                continue
            size = sizes[done]
            restored = [each.restore() for each in before]
            if not all(restored):
                name = type(evaluation.parts[restored.index(False)]).__name__
                raise OutOfMemoryExhausted(
                    f"Out of memory when {name}.update had taken a part of the batch into a large tensor: "
                    f"{failure.message} Next: workload.eval_batch_size={max(1, size // 2)}.",
                    failure.kind,
                )
            oom.release()
            self.on_event("oom", step=step, message=failure.message)
            if size == 1:
                raise OutOfMemoryExhausted(
                    f"Out of memory in the {split} split with one sample: {failure.message} "
                    "Next: a smaller workload.model, memory.features=dynamic, or a card with more memory (gpu=...).",
                    failure.kind,
                )
            self._at_most = size // 2
            self.on_event("step_down", step=step, evaluation_batch=self._at_most, before=size)
            sizes = sizes[:done] + self._sizes(sum(sizes[done:]))
            parts = prepare.split(delivery.batch, sizes)

    def end(self) -> dict[str, float]:
        """Returns the metrics of the pass, over all ranks."""
        if self.shares:
            merge_over_ranks(self.evaluation, self._failure)
        return self.evaluation.compute()

    def _sizes(self, num_samples: int) -> list[int]:
        most = self._at_most or num_samples
        full, rest = divmod(num_samples, most)
        return [most] * full + ([rest] if rest else [])


def merge_over_ranks(evaluation: Any, failure: Exception | None = None) -> None:
    """Merges the metrics of all ranks on each rank. Waits for the other ranks and the device.

    Raises:
        Exception: ``failure``, the error that stopped this rank's evaluation. The other ranks raise a DataError with
            the same text.
    """
    message = None if failure is None else str(failure) or type(failure).__name__
    # Tensors would arrive on the device of the rank that sent them.
    state = batches.map_tensors(evaluation.state(), lambda tensor: tensor.cpu())
    ranks = []
    for rank in range(torch.distributed.get_world_size()):
        # `all_gather_object` would need the largest state once per rank on the device.
        sent = [(message, state)]
        torch.distributed.broadcast_object_list(sent, src=rank)
        ranks.append(sent[0])
    if failure is not None:
        raise failure
    for message, _ in ranks:
        if message is not None:
            raise DataError(message)
    evaluation.merge([state for _, state in ranks])

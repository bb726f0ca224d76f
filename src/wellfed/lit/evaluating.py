"""Passes over a split by the workload's evaluation, in smaller batches where memory does not suffice for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch, Evaluation, FeatureSource
from wellfed.errors import OutOfMemoryExhausted
from wellfed.lit.mean_loss import MeanLoss
from wellfed.memory import oom
from wellfed.memory.kept_state import KeptState
from wellfed.record import OnEvent
from wellfed.step.micro_batches import Preparation


class Evaluating:
    """Hands batches to an evaluation; of one that does not fit the halves, and all later ones in that size."""

    def __init__(
        self,
        model: nn.Module,
        evaluation: Evaluation,
        splits: Mapping[str, Preparation],
        *,
        may_halve: bool,
        on_event: OnEvent,
    ) -> None:
        self._model, self._evaluation, self._splits = model, evaluation, splits
        self._may_halve, self._on_event = may_halve, on_event
        self._at_most: int | None = None

    def take(
        self, split: str, delivery: Delivery, features: FeatureSource | None, device: torch.device, step: int
    ) -> None:
        """Add a batch, which may be on the host still.

        Raises:
            OutOfMemoryExhausted: a single sample does not fit, or memory ran out when the evaluation had already taken
                a part of the batch into a large tensor.
        """
        prepare = self._splits[split]
        sizes, done = self._sizes(delivery.size), 0
        parts = prepare.split(delivery.batch, sizes)
        while done < len(sizes):
            failure = self._add(prepare, delivery, _Part(parts[done], done, sizes[done]), features, device)
            if failure is None:
                done += 1
                continue
            oom.release()
            self._on_event("oom", step=step, message=failure.message)
            if sizes[done] == 1:
                raise OutOfMemoryExhausted(
                    f"Out of memory in the {split} split with one sample: {failure.message} "
                    "Next: a smaller workload.model, memory.features=dynamic, or a card with more memory (gpu=...)."
                )
            self._at_most = sizes[done] // 2
            self._on_event("step_down", step=step, evaluation_batch=self._at_most, before=sizes[done])
            sizes = sizes[:done] + self._sizes(sum(sizes[done:]))
            parts = prepare.split(delivery.batch, sizes)

    def _sizes(self, num_samples: int) -> list[int]:
        most = self._at_most or num_samples
        full, rest = divmod(num_samples, most)
        return [most] * full + ([rest] if rest else [])

    def _add(
        self,
        prepare: Preparation,
        delivery: Delivery,
        part: _Part,
        features: FeatureSource | None,
        device: torch.device,
    ) -> oom.MemoryFailure | None:
        """The failure, with nothing left of it, or None."""
        before = KeptState(self._evaluation, device, leave_out=self._model) if self._may_halve else None
        try:
            self._update(prepare, delivery, part, features, device)
        except Exception as error:
            failure = oom.classify(error)
            if failure is None or before is None:
                raise
        else:
            return None
        if not before.restore():  # outside the handler: its traceback would keep the failed batch's tensors alive
            name = type(self._evaluation).__name__
            raise OutOfMemoryExhausted(
                f"Out of memory when {name}.update had taken a part of the batch into a large tensor: "
                f"{failure.message} "
                f"Next: memory.micro_batch={max(1, part.size // 2)}, which is the size of evaluation batches too."
            )
        return failure

    def _update(
        self,
        prepare: Preparation,
        delivery: Delivery,
        part: _Part,
        features: FeatureSource | None,
        device: torch.device,
    ) -> None:
        evaluation = self._evaluation
        weight = prepare.weight(part.batch, part.size) if isinstance(evaluation, MeanLoss) else 0
        batch = prepare(batches.to_device(part.batch, device), delivery, part.number, features)
        if isinstance(evaluation, MeanLoss):
            evaluation.add(self._model, batch, weight)
        else:
            evaluation.update(self._model, batch, *(() if features is None else (features,)))


@dataclass(frozen=True)
class _Part:
    """Successive samples of a batch."""

    batch: Batch
    number: int
    size: int

"""Evaluates the batches of a split, in smaller parts if memory runs out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FeatureSource
from wellfed.errors import OutOfMemoryExhausted
from wellfed.record.entries import OnEvent
from wellfed.train.memory import oom
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.loss_faults import add_place
from wellfed.train.step.micro_batches import Preparation


class Evaluating:
    """Evaluation of the batches of a split. An out-of-memory error halves the largest part of a batch for good."""

    def __init__(
        self, evaluation: SplitMetrics, splits: Mapping[str, Preparation], *, may_halve: bool, on_event: OnEvent
    ) -> None:
        self._evaluation, self._splits, self._may_halve, self._on_event = evaluation, splits, may_halve, on_event
        self._at_most: int | None = None
        """Maximum samples of a part; None = a whole batch."""

    def take(
        self, split: str, delivery: Delivery, features: FeatureSource | None, device: torch.device, step: int
    ) -> bool:
        """Adds a batch, which may still be on the host, to the metrics.

        Returns False if memory ran out. The pass over the split must then begin again, with empty metrics.

        Raises:
            OutOfMemoryExhausted: a single sample does not fit.
        """
        prepare, evaluation = self._splits[split], self._evaluation
        sizes = MicroBatches(self._at_most or delivery.size).sizes(delivery.size)

        def update() -> None:
            for number, part in enumerate(prepare.split(delivery.batch, sizes)):
                weight = prepare.weight(part, sizes[number]) if evaluation.takes_loss else 0
                batch = prepare(batches.to_device(part, device), delivery, number, features)
                try:
                    evaluation.update(batch, weight, features)
                except Exception as error:
                    add_place(error, delivery, split)
                    raise

        if not self._may_halve:
            update()
            return True
        failure = oom.attempt(update)[1]
        if failure is None:
            return True
        oom.release()
        self._on_event("oom", step=step, message=failure.message)
        if sizes[0] == 1:
            raise OutOfMemoryExhausted(
                f"Out of memory in the {split} split with one sample: {failure.message} "
                "Next: a smaller workload.model, memory.features=dynamic, or a card with more memory (gpu=...).",
                failure.kind,
            )
        self._at_most = sizes[0] // 2
        self._on_event("step_down", step=step, evaluation_batch=self._at_most, before=sizes[0])
        return False

"""Evaluates the batches of a split, again in smaller parts if memory runs out. Merges the metrics of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

SHARING_STRATEGIES = ("auto", "ddp")
"""Strategies in which each rank has the whole model and can evaluate a batch alone."""


@dataclass
class Evaluating:
    """Evaluation of the batches of a split, in parts of at most ``_at_most`` samples.

    An out-of-memory error halves that number for good. The pass over the split must then begin again.
    """

    evaluation: SplitMetrics
    splits: Mapping[str, Preparation]
    may_halve: bool
    on_event: OnEvent
    shares: bool = False
    """Ranks share the batches, and merge their metrics at the end."""
    must_repeat: bool = False
    """Memory ran out in this pass, which must begin again. The rest of it is skipped."""
    _at_most: int | None = None
    _attempts: oom.Attempts = field(default_factory=oom.Attempts)

    def begin(self) -> None:
        """Empties the metrics before a pass over a split."""
        self.evaluation.reset()
        self.must_repeat = False

    def take(
        self, split: str, delivery: Delivery, features: FeatureSource | None, device: torch.device, step: int
    ) -> None:
        """Adds a batch, which may still be on the host.

        Raises:
            OutOfMemoryExhausted: a single sample does not fit.
        """
        if self.must_repeat:
            return
        prepare, evaluation = self.splits[split], self.evaluation
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

        if not self.may_halve:
            update()
            return
        failure = self._attempts(update)[1]
        if failure is None:
            return
        oom.release()
        self.on_event("oom", step=step, message=failure.message)
        if sizes[0] == 1:
            raise OutOfMemoryExhausted(
                f"Out of memory in the {split} split with one sample: {failure.message} "
                "Next: a smaller workload.model, memory.features=dynamic, or a card with more memory (gpu=...).",
                failure.kind,
            )
        self._at_most = sizes[0] // 2
        self.on_event("step_down", step=step, evaluation_batch=self._at_most, before=sizes[0])
        self.must_repeat = True

    def end(self) -> dict[str, float]:
        """Returns the metrics of the pass, over all ranks. Waits for the other ranks if they share its batches."""
        if self.shares:
            self._merge_over_ranks()
        return self.evaluation.compute()

    def _merge_over_ranks(self) -> None:
        # Tensors would arrive on the device of the rank that sent them.
        state = batches.map_tensors(self.evaluation.state(), lambda tensor: tensor.cpu())
        states = []
        for rank in range(torch.distributed.get_world_size()):
            # `all_gather_object` would need the largest state once per rank on the device.
            sent = [state]
            torch.distributed.broadcast_object_list(sent, src=rank)
            states.append(sent[0])
        self.evaluation.merge(states)

"""Makes optimizer steps of the configured model on one device, without a trainer: for `fit` and the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.contract import Batch, FeatureModeName, Features, FeatureSource
from wellfed.memory.checkpointing import checkpoint_blocks
from wellfed.memory.features import DeviceTable, hold
from wellfed.memory.ladder import MicroBatches
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.step.compiled import Loss
from wellfed.step.micro_batches import Preparation
from wellfed.step.precision import Precision
from wellfed.step.train_step import TrainStep, parameter_groups


class ConfiguredStep:
    """Moves the model to ``device``, fills the feature table, and steps; call it with a batch that `place` gave."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        parts: assemble.Parts,
        device: torch.device,
        fill: Callable[[Features, FeatureModeName, torch.device], FeatureSource] = hold,
    ) -> None:
        self.device, self._precision = device, Precision.for_training(plan.device.precision, device.type)
        self._model = model = self._precision.convert(parts.model.to(device))
        if plan.memory.checkpoint_activations:
            checkpoint_blocks(model)
        self._features: FeatureSource | None = None
        if parts.features is not None:
            model.eval()
            self._features = fill(parts.features, plan.memory.features or "dynamic", device)
        model.train()
        groups = parameter_groups(model)
        self._optimizer = assemble.make_optimizer(config, plan, groups, sparse=parts.has_sparse_gradients)
        self._micro = MicroBatches(1)
        self._step = TrainStep(
            model,
            self._optimizer,
            loss=Loss(model, plan.device.compile, lambda message: None),
            prepare=Preparation(parts.data.train, config.seed),
            micro=self._micro,
            precision=self._precision,
            device=device,
            features=lambda: self._features,
            gradient_clip=config.trainer.gradient_clip,
        )
        self._batch: Batch | None = None

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, in the precision of the step; the one before is let go."""
        self._batch = None
        placed = batches.to_device(batch, self.device)
        self._batch = batches.map_tensors(placed, lambda each: each.to(self._precision.dtype_of(each)))
        return self._batch

    def resident(self) -> Iterator[Tensor]:
        """What lies in memory between steps."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if isinstance(self._features, DeviceTable):
            yield self._features.table
        if self._batch is not None:
            yield from batches.tensors(self._batch)

    def __call__(self, batch: Batch) -> None:
        """A step on the whole batch at once; the weights change."""
        self._micro.size = size = batches.batch_size(batch)
        self._step(Delivery(batch, epoch=0, index=0, total=size))

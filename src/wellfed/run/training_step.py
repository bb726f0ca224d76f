"""One optimizer step of the configured model on one device, without a trainer: what `fit` and `probe` run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.contract import Batch, Features, FeatureSource
from wellfed.memory.checkpointing import checkpoint_blocks
from wellfed.memory.features import DeviceTable, Mode, hold
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.step.micro_batches import Loss, Preparation, parameter_groups

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class TrainingStep:
    """Moves the model to ``device``, fills the feature table, and steps; call it with a batch that `place` gave."""

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        parts: assemble.Parts,
        device: torch.device,
        fill: Callable[[Features, Mode, torch.device], FeatureSource] = hold,
    ) -> None:
        self.device, self._precision = device, plan.device.precision
        self._model = parts.model.to(device)
        if self._precision == "bf16-true":
            self._model.to(torch.bfloat16)
        if plan.memory.checkpoint_activations:
            checkpoint_blocks(self._model)
        self._features: FeatureSource | None = None
        if parts.features is not None:
            self._model.eval()
            self._features = fill(parts.features, plan.memory.features or "dynamic", device)
        self._model.train()
        self._prepare = Preparation(parts.data.train, config.seed)
        self._loss = Loss(self._model, plan.device.compile, lambda message: None)
        self._optimizer = assemble.make_optimizer(
            config, plan, parameter_groups(self._model), sparse=parts.has_sparse_gradients
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision == "16-mixed")
        self._batch: Batch | None = None

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, in the precision of the step; the one before is let go."""
        self._batch = None
        placed = batches.to_device(batch, self.device)
        if self._precision == "bf16-true":
            placed = batches.map_tensors(placed, lambda each: each.bfloat16() if each.is_floating_point() else each)
        self._batch = placed
        return placed

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
        """Forward, backward and the optimizer's step; the weights change."""
        for parameter in self._model.parameters():
            parameter.grad = None
        delivery = Delivery(batch, epoch=0, index=0, total=batches.batch_size(batch))
        with self._autocast():
            output = self._loss(self._prepare(batch, delivery, 0, self._features))
        self._scaler.scale(output.loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self._precision)
        return torch.autocast(self.device.type, dtype, cache_enabled=False) if dtype else nullcontext()

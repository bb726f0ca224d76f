"""Counts the bytes of every tensor in training steps on a copy of the model, with fake tensors.

The forward and backward passes are those of `step.step_passes.StepPasses`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch, FeatureModeName, Features, FeatureSource
from wellfed.plan.predict.cuda_emulation import backward
from wellfed.plan.predict.memory_tracker import MemoryTracker
from wellfed.plan.predict.peak import Footprint, Point
from wellfed.train.memory.checkpointing import checkpoint_blocks
from wellfed.train.memory.features import CHUNK_ROWS, Computed, DeviceTable, HostTable, hold
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.compiled import Loss
from wellfed.train.step.micro_batches import MicroBatch, Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import TrainStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """A training to rehearse."""

    make_batch: Callable[[int], Batch]
    """Makes a batch of a given number of samples, the longest if they differ in length (see `estimate.repeated`)."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    prepare: Preparation = field(default_factory=lambda: Preparation(None, 0))
    """Preparation by a copy of the data set, since it may keep fake tensors."""
    precision: str = "32-true"
    checkpointed: bool = False
    channels_last: bool = False
    features: Features | None = None
    """Features of the data; the model's own come from the model."""
    feature_mode: FeatureModeName | None = None
    """None with features means ``dynamic``."""
    compile_mode: str = "none"


class _Counted(Ranks):
    """Counts each micro-batch separately."""

    def __init__(self, live: MemoryTracker, take: Callable[[dict[str, int]], None]) -> None:
        self._live, self._take = live, take

    @contextmanager
    def micro_batch(self, number: int, num_parts: int) -> Iterator[None]:
        self._live.forget_peak()
        with self._live:
            yield
        self._take(self._live.peak)

    def backward(self, loss: Tensor) -> None:
        backward(loss)


class Rehearsal:
    """A model with gradients and optimizer state, whose passes are measured for several micro-batch sizes."""

    def __init__(self, model: nn.Module, task: Task, block_bytes: int, fake: FakeTensorMode) -> None:
        """``fake`` is already active."""
        self._task = task
        self._live = MemoryTracker(block_bytes)
        self._precision = Precision(task.precision, CPU.type)
        self.lowest = 2 if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules()) else 1
        """Smallest micro-batch that runs; BatchNorm has no statistics of a single sample."""
        with FakeCopyMode(fake):
            self._model = copy.deepcopy(model, _converted(model, self._precision.dtype, task.channels_last))
        if task.checkpointed:
            checkpoint_blocks(self._model)
        self._live.note([*self._model.parameters(), *self._model.buffers()], "parameters")
        self._feature_table = self._filling = 0
        self._inputs: tuple[int, ...] = ()
        self._source = self._features()
        self._model.train()
        self._optimizer = self._make_optimizer()
        self._passes: list[dict[str, int]] = []
        computation = Computation(
            self._model,
            Loss(self._model, "none", lambda message: None),
            task.prepare,
            self._precision,
            CPU,
            ranks=_Counted(self._live, self._passes.append),
            features=lambda: self._source,
        )
        self._step = TrainStep(computation, self._optimizer, Fallbacks(MicroBatches(1)))
        self._peaks(self.lowest)
        if any(each.grad is not None and each.grad.is_sparse for each in self._model.parameters()):
            raise TypeError("its gradients are sparse")
        self._optimizer_step()  # creates the state
        self._temporaries = self._optimizer_step()

    def point(self, micro_batch: int) -> Point:
        """Measures the passes of a micro-batch, alone and after one of the same size."""
        alone, after = self._peaks(micro_batch)
        return Point(micro_batch, alone["activations"], alone.get("gradients", 0), after["activations"])

    @property
    def resident_bytes(self) -> int:
        """Bytes outside of passes: parameters, gradients, optimizer state."""
        return sum(self._live.live.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))

    def footprint(self, points: Sequence[Point]) -> Footprint:
        """Returns the footprint with these points."""
        live = self._live.live
        return Footprint(
            parameters=live["parameters"],
            gradients=live.get("gradients", 0),
            optimizer_state=live.get("optimizer state", 0),
            optimizer_temporaries=self._temporaries,
            feature_table=self._feature_table,
            filling=self._filling,
            inputs=self._inputs,
            points=tuple(points),
        )

    def _features(self) -> FeatureSource | None:
        offered = getattr(self._model, "features", None)
        features: Features | None = offered() if callable(offered) else self._task.features
        mode = self._task.feature_mode or "dynamic"
        if features is None:
            return None
        if mode == "dynamic":
            return Computed(features)
        features = replace(features, trainable=False)  # while the table is held
        if features.store is not None:
            return self._store(features, mode)
        # Two chunks show the peak of filling, which further chunks repeat.
        num_rows = min(features.num_rows, 2 * CHUNK_ROWS)
        self._model.eval()
        with self._live:
            few = hold(replace(features, num_rows=num_rows), "cache", CPU)
            row = few.rows(torch.arange(1))
        held = num_rows * row.nbytes
        self._filling = max(0, self._live.peak.get("activations", 0) - held)
        table = torch.zeros((features.num_rows, *row.shape[1:]), dtype=row.dtype)
        if mode == "cache_host":
            return HostTable(table, CPU)
        self._feature_table = table.nbytes
        return DeviceTable(table)

    def _store(self, features: Features, mode: FeatureModeName) -> FeatureSource:
        """Returns a store of zeros to cut rows from, on the device in ``cache`` only."""
        assert features.store is not None
        if mode != "cache":
            return Computed(features)
        with unset_fake_temporarily():  # may prepare the data
            known = features.store()
        table = torch.zeros(known.shape, dtype=known.dtype)
        self._live.note([table], "feature table")  # else a view would count as an activation
        self._feature_table = table.nbytes
        return DeviceTable(table, features.cut)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._task.make_optimizer(self._model)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(f"{type(optimizer).__name__} runs the passes itself, as often as it likes")
        for group in optimizer.param_groups:
            # None means all parameters at once on CUDA, and one after the other on the CPU.
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

        def note_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._live.note([parameter.grad], "gradients")

        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note_gradient)  # type: ignore[no-untyped-call]
        return optimizer

    def _optimizer_step(self) -> int:
        """Runs the optimizer; returns the bytes of its temporaries."""
        live = self._live
        live.making = "optimizer temporaries"
        live.forget_peak()
        with live:
            self._optimizer.step()
        live.note(_state_tensors(self._optimizer.state), "optimizer state")
        for group in self._optimizer.param_groups:
            # Step counts stay in host memory unless a kernel reads them.
            if not (group.get("capturable") or group.get("fused")):
                counts = _state_tensors(self._optimizer.state, group["params"])
                live.note([each for each in counts if each.dim() == 0], "host")
        kept = live.live.get("optimizer temporaries", 0)
        return max(0, live.peak.get("optimizer temporaries", 0) - kept)

    def _peaks(self, micro_batch: int) -> list[dict[str, int]]:
        """Runs the first and the second micro-batch of a step."""
        live = self._live
        # Storages with the size and type of the copies on the device.
        batch = batches.map_tensors(
            self._task.make_batch(micro_batch), lambda each: each.to(self._precision.dtype_of(each), copy=True)
        )
        inputs = list(batches.tensors(batch))
        live.note(inputs, "inputs")
        a_sample = tuple(-(-each.nbytes // micro_batch) for each in inputs)
        # Inputs of a fixed size distort a large micro-batch least.
        self._inputs = min(self._inputs or a_sample, a_sample, key=sum)
        live.making = "activations"
        self._passes.clear()
        delivery = Delivery(batch, epoch=0, index=0, total=2 * micro_batch)
        # A step's only micro-batch is not scaled, so that its loss itself is kept for the totals.
        parts = [MicroBatch(batch, number, micro_batch, share=0.5 if number else 1.0) for number in range(2)]
        self._step.passes.forward_backward(delivery, parts)
        return list(self._passes)


def _converted(model: nn.Module, dtype: torch.dtype | None, channels_last: bool) -> dict[int, Tensor]:
    """Returns copies in another type or memory format, by the original's id; ``to`` can't exchange fake parameters."""
    made: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_image = channels_last and tensor.dim() == 4
        to_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if is_image or to_dtype != tensor.dtype:
            memory_format = torch.channels_last if is_image else torch.preserve_format
            other = tensor.detach().to(to_dtype, copy=True, memory_format=memory_format)
            made[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    return made


def _state_tensors(state: Mapping[Any, Any], keys: Iterable[Any] | None = None) -> list[Tensor]:
    """Returns the optimizer's tensors for these weights; None = for all."""
    found = (state.get(key, {}) for key in (state if keys is None else keys))
    return [each for values in found for each in values.values() if isinstance(each, Tensor)]

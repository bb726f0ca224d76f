"""Finds the device memory of a training run by running its steps on fake tensors, which have shapes but no contents.

Nothing of real size is allocated, and no GPU is needed. torch.compile is ignored. The passes are those of
`step.step_passes.Computation`, on a copy of the model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode, unset_fake_temporarily

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch, FeatureModeName, Features, FeatureSource
from wellfed.errors import type_and_line
from wellfed.plan.predict.cuda_emulation import AsOnCuda, backward
from wellfed.plan.predict.memory_tracker import MemoryTracker
from wellfed.plan.predict.peak import Footprint, NoEstimate, Point
from wellfed.train.memory.checkpointing import checkpoint_blocks
from wellfed.train.memory.features import CHUNK_ROWS, Computed, DeviceTable, HostTable, hold
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import MicroBatch, Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.step_passes import Computation

CPU = torch.device("cpu")
BLOCK_BYTES = 512
"""Smallest block of the CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
PARTS = (16, 4, 2, 1)
"""Micro-batches that are measured, as parts of the whole step, besides the smallest."""


@dataclass(frozen=True)
class Task:
    """A training to rehearse."""

    make_batch: Callable[[int], Batch]
    """Makes a batch of a given number of samples, the longest if they differ in length."""
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    prepare: Preparation = field(default_factory=lambda: Preparation(None, 0))
    """Preparation by a copy of the data set, since it may keep fake tensors."""
    precision: str = "32-true"
    checkpointed: bool = False
    features: Features | None = None
    """Features of the data; the model's own come from the model."""
    feature_mode: FeatureModeName | None = None
    """None with features means ``dynamic``."""


def measure(model: nn.Module, task: Task, samples: int, *, block_bytes: int = BLOCK_BYTES) -> Footprint | NoEstimate:
    """Returns the footprint of a model with ``loss(batch) -> LossOutput``, for micro-batches of 1 to ``samples``.

    The model is copied, not modified. Fake tensors fail if a model reads values (``.item()``, boolean indexing) or has
    sparse gradients. Then the result is a `NoEstimate` with the error as reason.

    Args:
        samples: samples per device in an optimizer step.
        block_bytes: bytes of a tensor are rounded up to a multiple of it.
    """
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(action="ignore"),
            torch.enable_grad(),
            AsOnCuda(),
            FakeTensorMode(allow_non_fake_inputs=True) as fake,
        ):
            return Rehearsal(model, task, block_bytes, fake).footprint(samples)
    except Exception as error:  # noqa: BLE001  the model is foreign code, and an estimate must not end a run
        return NoEstimate(f"fake tensors can't follow the model ({type_and_line(error)})")


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
        with FakeCopyMode(fake):
            self._model = copy.deepcopy(model, _converted(model, self._precision.dtype))
        if task.checkpointed:
            checkpoint_blocks(self._model)
        self._live.note([*self._model.parameters(), *self._model.buffers()], "parameters")
        self._feature_table = self._filling = 0
        self._inputs: tuple[int, ...] = ()
        self._source = self._features()
        self._model.train()
        self._optimizer = self._make_optimizer()
        self._passes: list[dict[str, int]] = []
        self._computation = Computation(
            self._model,
            Loss(self._model),
            task.prepare,
            self._precision,
            CPU,
            ranks=_Counted(self._live, self._passes.append),
            features=lambda: self._source,
        )

    def footprint(self, samples: int) -> Footprint:
        """Measures the passes of some micro-batches up to ``samples``, and the optimizer."""
        # BatchNorm has no statistics of a single sample.
        has_batch_norm = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self._model.modules())
        lowest = min(2 if has_batch_norm else 1, samples)
        self._point(lowest)  # makes the gradients
        self._optimizer_step()  # makes the state
        temporaries = self._optimizer_step()
        points = [self._point(size) for size in sorted({lowest, *(max(samples // part, lowest) for part in PARTS)})]
        return Footprint(
            parameters=self._live.live["parameters"],
            gradients=self._live.live.get("gradients", 0),
            optimizer_state=self._live.live.get("optimizer state", 0),
            optimizer_temporaries=temporaries,
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
        if features.store is not None and mode == "cache_host":
            return Computed(features)
        if features.store is not None:
            with unset_fake_temporarily():  # may prepare the data
                known = features.store()
            table = torch.zeros(known.shape, dtype=known.dtype)
        else:
            table = self._filled(features)
            if mode == "cache_host":
                return HostTable(table, CPU)
        self._live.note([table], "feature table")  # else a view would count as an activation
        self._feature_table = table.nbytes
        return DeviceTable(table, features.cut)

    def _filled(self, features: Features) -> Tensor:
        """Returns the table. Measures two chunks of filling it, which further chunks repeat."""
        num_rows = min(features.num_rows, 2 * CHUNK_ROWS)
        self._model.eval()
        with self._live:
            row = hold(replace(features, num_rows=num_rows), "cache", CPU).rows(torch.arange(1))
        self._filling = max(0, self._live.peak.get("activations", 0) - num_rows * row.nbytes)
        return torch.zeros((features.num_rows, *row.shape[1:]), dtype=row.dtype)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._task.make_optimizer(self._model)
        for group in optimizer.param_groups:
            # None means all parameters at once on CUDA, and one after the other on the CPU.
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

        def note_gradient(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise TypeError("its gradients are sparse")
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
        for values in self._optimizer.state.values():
            tensors = [each for each in values.values() if isinstance(each, Tensor)]
            live.note([each for each in tensors if each.dim()], "optimizer state")
            live.note([each for each in tensors if not each.dim()], "host")  # step counts
        kept = live.live.get("optimizer temporaries", 0)
        return max(0, live.peak.get("optimizer temporaries", 0) - kept)

    def _point(self, micro_batch: int) -> Point:
        """Measures the passes of a micro-batch, alone and after one of the same size."""
        # Storages with the size and type of the copies on the device.
        batch = batches.map_tensors(
            self._task.make_batch(micro_batch), lambda each: each.to(self._precision.dtype_of(each), copy=True)
        )
        inputs: Sequence[Tensor] = list(batches.tensors(batch))
        self._live.note(inputs, "inputs")
        self._inputs = tuple(-(-each.nbytes // micro_batch) for each in inputs)
        self._live.making = "activations"
        self._passes.clear()
        delivery = Delivery(batch, epoch=0, index=0, total=2 * micro_batch)
        # A step's only micro-batch is not scaled, so that its loss itself is kept for the totals.
        parts = [MicroBatch(batch, number, micro_batch, share=0.5 if number else 1.0) for number in range(2)]
        self._computation(delivery, parts)
        alone, after = self._passes
        return Point(micro_batch, alone["activations"], alone.get("gradients", 0), after["activations"])


def _converted(model: nn.Module, dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Returns copies in another type, by the original's id; ``to`` can't exchange fake parameters."""
    made: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if dtype is not None and tensor.is_floating_point():
            other = tensor.detach().to(dtype, copy=True)
            made[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    return made

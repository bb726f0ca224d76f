"""Measures the peak memory of real optimizer steps of several batch sizes.

`find_micro_batch`, ``wellfed fit`` and the steps before training all use `Prober`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from wellfed.contract import Batch
from wellfed.plan.predict import size_search
from wellfed.plan.predict.memory_tracker import MemoryTracker
from wellfed.plan.predict.rehearsal import BLOCK_BYTES
from wellfed.plan.predict.size_search import Fit, Peak, Probe
from wellfed.train.memory import oom

NO_LIMIT = 2**30


def _before_optimizer(step: Callable[[], Any], read: Callable[[], int]) -> int | None:
    """Runs a step; returns the value of ``read`` when its optimizer began, or None without one."""
    found: list[int] = []
    hook = register_optimizer_step_pre_hook(lambda *_: found.append(read()))
    try:
        step()
    finally:
        hook.remove()
    return found[0] if found else None


class TensorMeter:
    """Counts the bytes of all live tensors; on a CPU, these are the requests to a card's allocator."""

    def __init__(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """``resident`` returns the tensors between steps: weights, optimizer state, tables, the batch."""
        self._resident = resident

    def peak(self, step: Callable[[], Any]) -> Peak:
        """Returns the peak of one call of ``step``, which is slow, since every operator is watched."""
        live = MemoryTracker(BLOCK_BYTES)
        live.note(self._resident(), "resident")
        with live:
            before = _before_optimizer(step, lambda: sum(live.peak.values()))
        total = sum(live.peak.values())
        return Peak(total if before is None else before, total)

    def wait(self) -> None:
        """Blocks until the device has finished its queue; a CPU has none."""

    def free(self) -> None:
        """Frees memory without references."""
        gc.collect()

    def available_bytes(self) -> int | None:
        """Returns the device bytes available to this process in all; None if unknown."""
        return None


class CudaMeter:
    """Reads the counters of torch's caching allocator. Nothing else may run on the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self, step: Callable[[], Any]) -> Peak:
        """Returns the peak of a step; its passes end when an optimizer begins."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = _before_optimizer(step, lambda: torch.cuda.max_memory_allocated(self._device))
        torch.cuda.synchronize(self._device)
        total = torch.cuda.max_memory_allocated(self._device)
        # Unused blocks that the allocator keeps count as needed.
        waste = max(0, torch.cuda.max_memory_reserved(self._device) - total)
        return Peak((total if before is None else before) + waste, total + waste)

    def wait(self) -> None:
        """Blocks until the device has finished its queue."""
        torch.cuda.synchronize(self._device)

    def free(self) -> None:
        """Returns cached segments to the driver too, so that the next probe starts at zero."""
        gc.collect()
        torch.cuda.empty_cache()

    def available_bytes(self) -> int | None:
        """Returns the reserved and the free bytes. CUDA's context already exists and is in neither."""
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)


Meter = TensorMeter | CudaMeter
"""Reader of the peak memory of steps on one kind of device."""


@dataclass(frozen=True)
class Prober:
    """Runs optimizer steps of several batch sizes. Running out of memory is a result; other errors raise."""

    step: Callable[[Any], Any]
    """One whole optimizer step on a batch; changes the model."""
    make_batch: Callable[[int], Any]
    """Makes a batch of a given number of samples on the device."""
    meter: Meter

    def peak(self, size: int) -> Peak | None:
        """Measures the peak memory of the second step of ``size`` samples; None if it ran out of memory.

        The first step allocates optimizer state and lets libraries choose kernels.
        """
        found: Peak | None = None
        try:
            found = self._second(size)
        except Exception as error:
            if oom.classify(error) is None:
                raise
        self.meter.free()  # no frame holds the batch now
        return found

    def _second(self, size: int) -> Peak:
        batch = self.make_batch(size)
        self.step(batch)
        return self.meter.peak(lambda: self.step(batch))


def find_micro_batch(
    step: Callable[[Any], Any],
    sample: Batch | Callable[[int], Batch],
    *,
    budget_gib: float,
    max_size: int = NO_LIMIT,
    min_size: int = 1,
    meter: Meter | None = None,
    on_probe: Callable[[Probe], None] | None = None,
) -> Fit:
    """Finds the micro-batch to train with on this device by running steps of at most 6 sizes.

    Args:
        step: one whole optimizer step on a batch: forward, backward and optimizer. It changes the model.
        sample: a batch on the device, whose tensors share their first dimension and whose samples are repeated. Or a
            function that makes a batch of a given size from the longest samples.
        budget_gib: maximum device memory of a step; 0.95 of it is used.
        max_size: samples of an optimizer step on this device.
        min_size: fewest samples that the model can run with; 2 with BatchNorm.
        meter: None = the CUDA device that torch uses, or all tensors if there is none.
        on_probe: called after each size.

    Raises:
        ValueError: a budget or size is not above 0.
    """
    if not budget_gib > 0 or max_size < 1 or min_size < 1:
        raise ValueError(f"budget_gib={budget_gib:g}, max_size={max_size} and min_size={min_size} must be above 0.")
    make: Callable[[int], Batch] = sample if callable(sample) else lambda size: _taken(sample, size)
    if meter is None:
        has_cuda = torch.cuda.is_available()
        meter = CudaMeter(torch.device("cuda", torch.cuda.current_device())) if has_cuda else TensorMeter(_all_tensors)
    prober = Prober(step, make, meter)

    def probe(size: int) -> Probe:
        done = Probe(size, prober.peak(size))
        if on_probe is not None:
            on_probe(done)
        return done

    return size_search.search(probe, max_size=max_size, min_size=min_size, budget_bytes=budget_gib * 2**30)


def _taken(batch: Batch, size: int) -> Batch:
    """Returns ``size`` samples of a batch, repeated if it has fewer."""
    tensors = tree_leaves(batch)
    if not tensors or not all(isinstance(each, Tensor) and each.ndim for each in tensors):
        raise TypeError(
            "sample is no batch of tensors that share a first dimension. Give a function that makes a batch."
        )
    return tree_map(lambda each: each.index_select(0, torch.arange(size, device=each.device) % len(each)), batch)


def _all_tensors() -> Iterator[Tensor]:
    """Yields the tensors of all Python objects, for callers that name none."""
    return (each for each in gc.get_objects() if issubclass(type(each), Tensor))

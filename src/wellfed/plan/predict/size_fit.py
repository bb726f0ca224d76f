"""Runs real steps of growing size to find the micro-batch a device can take; `size_search` decides which sizes."""

from __future__ import annotations

import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from wellfed.contract import Batch
from wellfed.plan.predict import size_search
from wellfed.plan.predict.estimate import BLOCK_BYTES
from wellfed.plan.predict.memory_tracker import MemoryTracker
from wellfed.plan.predict.size_search import Fit, Peak, Probe
from wellfed.train.memory import oom
from wellfed.units import GIB, gib, show_bytes

WARMUP_STEPS = 3
"""The first allocates optimizer state and lets kernels be chosen; the peak counts from the second on."""
NO_LIMIT = 2**30
ROUND_STEPS = 5
"""Steps between two waits for the device: a wait after each would leave it idle while the next is prepared."""
MAX_ROUNDS, TIMED_S, WATCHED_S = 40, 0.5, 2.0
"""How long a probe goes on: longer where utilisation is read, which drivers average over up to a second
(nvmlDeviceGetUtilizationRates)."""


class Meter(ABC):
    """Reads the peak memory of steps on one kind of device; here what holds where nothing runs behind our back."""

    @abstractmethod
    def peak(self, step: Callable[[], Any]) -> Peak:
        """The peak of one call; the device is otherwise idle."""

    def wait(self) -> None:  # noqa: B027
        """Returns when all that was asked of the device is done."""

    def free(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()

    def room(self) -> int | None:
        """Bytes that this process could have of the device in all; None where nothing tells."""
        return None


def _before_optimizer(step: Callable[[], Any], read: Callable[[], int]) -> int | None:
    """Runs a step; what was read where its optimizer began, None where there is none."""
    found: list[int] = []
    hook = register_optimizer_step_pre_hook(lambda *_: found.append(read()))
    try:
        step()
    finally:
        hook.remove()
    return found[0] if found else None


class CudaMeter(Meter):
    """torch's caching allocator. Forward and backward end where an optimizer's step begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self, step: Callable[[], Any]) -> Peak:
        """By the allocator's own counters."""
        torch.cuda.synchronize(self._device)
        rest = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = _before_optimizer(step, lambda: torch.cuda.max_memory_allocated(self._device))
        torch.cuda.synchronize(self._device)
        total = torch.cuda.max_memory_allocated(self._device)
        # Blocks that the allocator keeps and can't use for what is asked count as needed.
        waste = max(0, torch.cuda.max_memory_reserved(self._device) - total)
        return Peak(rest, (total if before is None else before) + waste, total + waste)

    def wait(self) -> None:
        """Synchronises."""
        torch.cuda.synchronize(self._device)

    def free(self) -> None:
        """Cached segments go back to the driver, so that the next probe's count from zero."""
        super().free()
        torch.cuda.empty_cache()

    def room(self) -> int | None:
        """What the allocator holds, and what is free: CUDA's context is there by now and counts in neither."""
        return torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)


class TensorMeter(Meter):
    """Bytes of all live tensors, on any device: on a CPU, what a card's allocator would be asked for."""

    def __init__(self, resident: Callable[[], Iterable[Tensor]]) -> None:
        """``resident``: what is there between steps: parameters, buffers, optimizer state, tables, the batch."""
        self._resident = resident

    def peak(self, step: Callable[[], Any]) -> Peak:
        """By watching every operator, which makes this one call slow."""
        live = MemoryTracker(BLOCK_BYTES)
        live.note(self._resident(), "resident")
        rest = sum(live.live.values())
        with live:
            before = _before_optimizer(step, lambda: sum(live.peak.values()))
        total = sum(live.peak.values())
        return Peak(rest, total if before is None else before, total)


def find_micro_batch(
    step: Callable[[Any], Any],
    sample: Batch | Callable[[int], Batch],
    *,
    budget_gib: float,
    max_size: int = NO_LIMIT,
    min_size: int = 1,
    target_util_pct: float | None = None,
    utilisation: Callable[[], float | None] | None = None,
    meter: Meter | None = None,
    on_probe: Callable[[Probe], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Fit:
    """The micro-batch to train with on this device, by running it; at most 6 sizes are tried.

    Args:
        step: one whole optimizer step on a batch: forward, backward and the optimizer's. It changes the model.
        sample: a batch of one sample or more, whose tensors share their first dimension, on the device; its samples
            are taken again and again. Or a function that makes a batch of so many; the longest, where lengths differ.
        budget_gib: what a step may need, per device; 0.95 of it is used.
        max_size: samples of an optimizer step on this device.
        min_size: the fewest that the model can be run with; 2 for BatchNorm, which has no statistics of one.
        target_util_pct: stop at the first size with this mean GPU utilisation; ignored without ``utilisation``.
        utilisation: the GPU's utilisation now, percent; None where it can't be read.
        meter: None = the CUDA device that torch uses, or all tensors where there is none.
        on_probe: told of each size when it has run.

    Raises:
        ValueError: a budget or a size that is not above 0, or a target that is not a percentage.
    """
    if not budget_gib > 0 or max_size < 1 or min_size < 1:
        raise ValueError(f"budget_gib={budget_gib:g}, max_size={max_size} and min_size={min_size} must be above 0.")
    if target_util_pct is not None and not 0 < target_util_pct <= 100:
        raise ValueError(f"target_util_pct={target_util_pct:g} must be above 0 and at most 100.")
    make: Callable[[int], Batch] = sample if callable(sample) else lambda size: _taken(sample, size)
    if meter is None:
        has_cuda = torch.cuda.is_available()
        meter = CudaMeter(torch.device("cuda", torch.cuda.current_device())) if has_cuda else TensorMeter(_all_tensors)

    def run(size: int) -> Probe:
        batch = make(size)
        for _ in range(WARMUP_STEPS - 1):
            step(batch)
        peak = meter.peak(lambda: step(batch))
        step_s, util_pct = _timed(lambda: step(batch), meter, utilisation, clock)
        return Probe(size, peak, size / step_s, util_pct)

    def probe(size: int) -> Probe:
        try:
            done = run(size)
        except Exception as error:
            if oom.classify(error) is None:
                raise
            done = Probe(size, None)
        meter.free()  # the batch is gone by now
        if on_probe is not None:
            on_probe(done)
        return done

    target = target_util_pct if utilisation is not None else None
    found = size_search.search(
        probe, max_size=max_size, min_size=min_size, budget_bytes=budget_gib * 2**30, target_util_pct=target
    )
    if target_util_pct is not None and all(one.util_pct is None for one in found.probes):
        ignored = f"target_util_pct={target_util_pct:g} was ignored: nothing here reads a GPU's utilisation"
        return replace(found, because=f"{found.because}; {ignored}")
    return found


def _taken(batch: Batch, size: int) -> Batch:
    """So many samples of a batch, which may have fewer: then the first come again."""
    tensors = tree_leaves(batch)
    if not tensors or not all(isinstance(each, Tensor) and each.ndim for each in tensors):
        raise TypeError(
            "sample is no batch of tensors that share a first dimension. Give a function that makes a batch."
        )
    return tree_map(lambda each: each.index_select(0, torch.arange(size, device=each.device) % len(each)), batch)


def _all_tensors() -> Iterator[Tensor]:
    """What any Python object holds; the only way to know what is resident where nobody tells."""
    return (each for each in gc.get_objects() if issubclass(type(each), Tensor))


def row(probe: Probe) -> tuple[str, str, str, str]:
    """Size, samples/s, peak, mean utilisation, for show; empty where there is no figure."""
    peak = "out of memory"
    if probe.peak is not None:
        num_bytes = probe.peak.total
        peak = f"{gib(num_bytes):.3f} GiB" if num_bytes >= GIB else show_bytes(num_bytes)
    rate = "" if probe.samples_per_s is None else f"{probe.samples_per_s:,.0f}"
    return f"{probe.size:,}", rate, peak, "" if probe.util_pct is None else f"{probe.util_pct:.0f} %"


def _timed(
    step: Callable[[], Any],
    meter: Meter,
    utilisation: Callable[[], float | None] | None,
    clock: Callable[[], float],
) -> tuple[float, float | None]:
    """Seconds a step, and mean utilisation in percent where it is read."""
    meter.wait()
    began = now = clock()
    lasts_s = TIMED_S if utilisation is None else WATCHED_S
    seconds: list[float] = []
    utils: list[float] = []
    while not seconds or (now - began < lasts_s and len(seconds) < MAX_ROUNDS):
        for _ in range(ROUND_STEPS):
            step()
        if utilisation is not None and (percent := utilisation()) is not None:  # while the device has work
            utils.append(percent)
        meter.wait()
        before, now = now, clock()
        seconds.append((now - before) / ROUND_STEPS)
    return statistics.median(seconds), statistics.mean(utils) if utils else None

"""Finds the device memory of a training run by running its steps on fake tensors, which have shapes but no contents.

Nothing of real size is allocated, and no GPU is needed. torch.compile is ignored.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from wellfed import batches
from wellfed.contract import Batch
from wellfed.errors import type_and_line
from wellfed.plan.predict.cuda_emulation import as_on_cuda
from wellfed.plan.predict.peak import PEAKS, Footprint, NoEstimate, Point, on_curve, slope
from wellfed.plan.predict.rehearsal import Rehearsal, Task

BLOCK_BYTES = 512
"""Smallest block of the CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
MOST_POINTS = 9
MOST_S = 15.0
"""Seconds after which no further point is measured. A line over a wide gap is too high, never too low."""
NEAR_FRAC = 0.03
"""Maximum error of a line between two points, as a share of the whole peak."""


def measure(model: nn.Module, task: Task, samples: int, *, block_bytes: int = BLOCK_BYTES) -> Footprint | NoEstimate:
    """Returns the footprint of a model with ``loss(batch) -> LossOutput``, for micro-batches of 1 to ``samples``.

    The model is copied, not modified. Fake tensors fail if a model reads values (``.item()``, boolean indexing) or has
    sparse gradients. Then the result is a `NoEstimate` with the error as reason.

    Args:
        samples: samples per device in an optimizer step.
        block_bytes: bytes of a tensor are rounded up to a multiple of it.
    """
    try:
        with _apart(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            rehearsal = Rehearsal(model, task, block_bytes, fake)
            return rehearsal.footprint(
                curve(rehearsal.point, samples, lowest=rehearsal.lowest, beside=rehearsal.resident_bytes)
            )
    except Exception as error:  # noqa: BLE001  the model is foreign code, and an estimate must not end a run
        return NoEstimate(f"fake tensors can't follow the model ({type_and_line(error)})")


def repeated(sample: Batch) -> Callable[[int], Batch]:
    """Returns a function that makes batches of any size by repeating the samples of one."""
    return partial(batches.repeated, sample)


def curve(point: Callable[[int], Point], samples: int, *, lowest: int = 1, beside: int = 0) -> list[Point]:
    """Returns points from ``lowest`` to ``samples``, by rising micro-batch.

    A peak is the maximum over many moments. Each moment is linear in the micro-batch, so the curve only bends upwards.
    Within a gap it lies between the line that joins the ends and the extended lines from both sides. The next point is
    measured where these differ most, at their crossing. With few bends that is the bend itself.

    Args:
        beside: bytes that exist for every micro-batch.
    """
    lowest, began_s = min(lowest, samples), time.monotonic()
    points = [point(size) for size in sorted({lowest, max(samples // 2, lowest), samples})]
    while len(points) < MOST_POINTS and time.monotonic() - began_s < MOST_S:
        doubts = [_doubt(points, gap, value, beside) for gap in range(len(points) - 1) for value in PEAKS]
        frac, size = max(doubts, default=(0.0, 0))
        if frac <= NEAR_FRAC:
            break
        points = sorted([*points, point(size)], key=lambda each: each.micro_batch)
    return points


def _doubt(points: Sequence[Point], gap: int, value: Callable[[Point], int], beside: int) -> tuple[float, int]:
    """Returns the maximum error of the line over a gap, as a share of the peak, and its micro-batch."""
    low, high = points[gap], points[gap + 1]
    if high.micro_batch - low.micro_batch < 2:
        return 0.0, 0
    # Memory never falls with the micro-batch; beyond the last point nothing is known.
    before = slope(points[gap - 1], low, value) if gap else 0.0
    over = slope(low, high, value)
    if gap + 2 < len(points):
        after = slope(high, points[gap + 2], value)
        bend = (over - before) / (after - before) if after > before else 0.0
        # Crossing of both lines, as a share of the gap from its end.
        size = high.micro_batch - bend * (high.micro_batch - low.micro_batch)
    else:
        size = (low.micro_batch + high.micro_batch) / 2
    inside = min(max(round(size), low.micro_batch + 1), high.micro_batch - 1)
    error = (over - before) * (size - low.micro_batch)
    return error / max(1, beside + on_curve([low, high], inside, value)), inside


@contextmanager
def _apart() -> Iterator[None]:
    """Protects random states, warnings and modes of torch from changes."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"), torch.enable_grad(), as_on_cuda():
        yield

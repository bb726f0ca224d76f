"""Finds the device memory of a training run by running its steps on fake tensors, which have shapes but no contents.

Nothing of real size is allocated, and no GPU is needed. A table predicts workspaces of kernels (`as_on_cuda`).
torch.compile is ignored.
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
from wellfed.plan.predict.peak import PEAKS, Footprint, NoEstimate, Point, is_straight, on_curve, slope, whole_pass
from wellfed.plan.predict.rehearsal import Rehearsal, Task
from wellfed.units import show_bytes

BLOCK_BYTES = 512
"""Smallest block of the CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
MOST_POINTS = 9
MOST_S = 15.0
"""Seconds after which no further point is measured. A line over a wide gap is too high, never too low."""
NEAR_FRAC = 0.01
"""Maximum error of a line between two points, as a share of the whole peak."""
FIRST_SMALL_RUN = 2
"""Micro-batch of the first real run; each next one is doubled."""
OUTGROWN = 4
"""Minimum ratio of batch-dependent bytes to all gradients before a line may be extended. A perceptron of three layers
has its last bend at 2."""
SMALL_RUNS_S = 10.0
"""Seconds after which no larger real run starts."""
COPIES = 6
"""Bytes of a real run as a multiple of the parameters: gradients, two states, temporaries, activations."""


def measure(
    model: nn.Module,
    task: Task,
    samples: int,
    *,
    block_bytes: int = BLOCK_BYTES,
    host_bytes: int | None = None,
) -> Footprint | NoEstimate:
    """Returns the footprint of a model with ``loss(batch) -> LossOutput``, for micro-batches of 1 to ``samples``.

    The model is copied, not modified. Fake tensors fail if a model reads values (``.item()``, boolean indexing). Then a
    few samples run for real on the CPU, and the line through them is extended. If that fails too, the result is a
    `NoEstimate` with the error as reason.

    Args:
        samples: samples per device in an optimizer step.
        block_bytes: bytes of a tensor are rounded up to a multiple of it.
        host_bytes: maximum memory of real runs; None = no limit.
    """
    try:
        with _apart(task), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            rehearsal = Rehearsal(model, task, block_bytes, fake)
            points = curve(rehearsal.point, samples, lowest=rehearsal.lowest, beside=rehearsal.resident_bytes)
            return rehearsal.footprint(points, "fake tensors")
    except Exception as error:  # noqa: BLE001  the model is foreign code, and an estimate must not end a run
        why = type_and_line(error)
    needed = COPIES * sum(parameter.nbytes for parameter in model.parameters())
    if host_bytes is not None and needed > host_bytes:
        room = f"{show_bytes(needed)} of host memory, and {show_bytes(host_bytes)} are free"
        return NoEstimate(f"fake tensors can't follow the model ({why}); a real run of a few samples needs {room}")
    try:
        with _apart(task):
            rehearsal = Rehearsal(model, task, block_bytes, None)
            return rehearsal.footprint(_small_runs(rehearsal, samples), "small runs")
    except Exception as error:  # noqa: BLE001  as above
        return NoEstimate(f"fake tensors: {why}; a real run of a few samples: {type_and_line(error)}")


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


def _small_runs(rehearsal: Rehearsal, samples: int) -> list[Point]:
    """Returns points whose last line may be extended.

    A peak bends where activations outgrow the weights' needs, so two equal slopes are not enough. The last slope is
    final if the growing bytes are many times all gradients, or if time is up.
    """
    points: list[Point] = []
    began_s, size = time.monotonic(), FIRST_SMALL_RUN
    while True:
        points.append(rehearsal.point(min(size, samples)))
        if size >= samples:
            return points
        if is_straight(points):
            before, last = points[-2:]
            if slope(before, last, whole_pass) * last.micro_batch > OUTGROWN * rehearsal.gradient_bytes:
                return points
        if time.monotonic() - began_s > SMALL_RUNS_S:
            if is_straight(points):
                return points
            raise ValueError(f"memory does not grow in a line up to {size} samples, tried in {SMALL_RUNS_S:g} s")
        size *= 2


@contextmanager
def _apart(task: Task) -> Iterator[None]:
    """Protects random states, warnings and modes of torch from changes."""
    kernels = as_on_cuda(cudnn_workspaces=task.cudnn_workspaces)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"), torch.enable_grad(), kernels:
        yield

"""Finds the device memory of a training run by rehearsing its steps on fake tensors.

Nothing of real size is allocated, and no GPU is needed. Predicted, not seen: what kernels use inside (`as_on_cuda` has
the table), and torch.compile, which counts as none.
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
from wellfed.plan.predict.footprint import PEAKS, Footprint, NoEstimate, Point, is_straight, on_curve, slope, whole_pass
from wellfed.plan.predict.rehearsal import Rehearsal, Task
from wellfed.units import counted, show_bytes

BLOCK_BYTES = 512
"""The CUDA allocator's smallest block (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
MOST_POINTS = 9
MOST_S = 15.0
"""Seconds after which no further point is begun: a line over a wide gap is too high, never too low."""
NEAR_FRAC = 0.01
"""Of the whole peak: by no more may a line between two points be off."""
FIRST_SMALL_RUN = 2
"""Micro-batch of the first real run; each next one is twice as large."""
OUTGROWN = 4
"""Times all gradients that what grows with the batch must be, before a line is drawn on: a perceptron of three layers
has its last bend at 2 times."""
SMALL_RUNS_S = 10.0
"""Seconds after which no larger one is begun."""
COPIES = 6
"""Times the parameters' bytes that a real run may need: parameters, gradients, two states, temporaries, activations."""


def measure(
    model: nn.Module,
    task: Task,
    samples: int,
    *,
    block_bytes: int = BLOCK_BYTES,
    host_bytes: int | None = None,
) -> Footprint | NoEstimate:
    """The footprint of a model with ``loss(batch) -> LossOutput``, for micro-batches of 1 to ``samples``.

    The model is copied and stays as it is. Where fake tensors can't follow (a model that looks at values: ``.item()``,
    boolean indexing), a few samples are run for real on the CPU, and the line through them is drawn on. Whatever goes
    wrong there too is the reason of a `NoEstimate`.

    Args:
        samples: of one device in an optimizer step.
        block_bytes: what the bytes of a tensor are rounded up to.
        host_bytes: memory that real runs may take; None = as much as they want.
    """
    notes = []
    if task.compile_mode != "none":
        notes.append(f"gpu.compile={task.compile_mode} is predicted as without it")
    if num := sum(isinstance(module, nn.RNNBase) for module in model.modules()):
        notes.append(f"{counted(num, 'RNN')}: cuDNN's reserve is predicted as what the single steps keep")
    try:
        with _apart(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            rehearsal = Rehearsal(model, task, block_bytes, fake)
            points = curve(rehearsal.point, samples, lowest=rehearsal.lowest, beside=rehearsal.resident_bytes)
            return rehearsal.footprint(points, "fake tensors", notes)
    except Exception as error:  # noqa: BLE001  the model is foreign code, and an estimate must not end a run
        why = type_and_line(error)
    needed = COPIES * sum(parameter.nbytes for parameter in model.parameters())
    if host_bytes is not None and needed > host_bytes:
        room = f"{show_bytes(needed)} of host memory, and {show_bytes(host_bytes)} are free"
        return NoEstimate(f"fake tensors can't follow the model ({why}); a real run of a few samples needs {room}")
    try:
        with _apart():
            rehearsal = Rehearsal(model, task, block_bytes, None)
            points = _small_runs(rehearsal, samples)
            tried = ", ".join(str(point.micro_batch) for point in points)
            note = f"fake tensors can't follow the model ({why}): run for real with {tried} samples, and drawn on"
            return rehearsal.footprint(points, "small runs", [note, *notes])
    except Exception as error:  # noqa: BLE001  as above
        return NoEstimate(f"fake tensors: {why}; a real run of a few samples: {type_and_line(error)}")


def repeated(sample: Batch) -> Callable[[int], Batch]:
    """Returns what makes batches of any size out of the samples of one."""
    return partial(batches.repeated, sample)


def curve(point: Callable[[int], Point], samples: int, *, lowest: int = 1, beside: int = 0) -> list[Point]:
    """Points from ``lowest`` to ``samples``, by rising micro-batch.

    A peak is the highest of many moments, each a line of the micro-batch, so its curve bends upwards only: in a gap it
    lies between the line that joins the ends and the lines that come in from either side. Where these leave most
    doubt, at their crossing, the next point is measured. With few bends that is where the bend is.

    Args:
        beside: bytes that are there whatever the micro-batch.
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
    """By how much, as a share of the peak, the line over a gap may be off, and where."""
    low, high = points[gap], points[gap + 1]
    if high.micro_batch - low.micro_batch < 2:
        return 0.0, 0
    # Memory never falls with the micro-batch; beyond the last point nothing is known.
    before = slope(points[gap - 1], low, value) if gap else 0.0
    over = slope(low, high, value)
    if gap + 2 < len(points):
        after = slope(high, points[gap + 2], value)
        bend = (over - before) / (after - before) if after > before else 0.0
        # The crossing of both lines, as a share of the gap seen from its end.
        size = high.micro_batch - bend * (high.micro_batch - low.micro_batch)
    else:
        size = (low.micro_batch + high.micro_batch) / 2
    inside = min(max(round(size), low.micro_batch + 1), high.micro_batch - 1)
    error = (over - before) * (size - low.micro_batch)
    return error / (beside + on_curve([low, high], inside, value)), inside


def _small_runs(rehearsal: Rehearsal, samples: int) -> list[Point]:
    """Points from which the line may go on.

    A peak bends where activations outgrow what the weights need, so two slopes that agree are not enough: a slope is
    the last one once what grows is much more than all gradients, or when time is up.
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
def _apart() -> Iterator[None]:
    """What is drawn, warned of and computed here leaves no trace in the run that follows."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"), torch.enable_grad(), as_on_cuda():
        yield

"""Predicts the device memory of a training run: its parts, the peak of a step, the largest micro-batch.

Pure arithmetic without torch, so that planning can use it. `rehearsal.measure` makes a `Footprint`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

Moment = Literal["forward and backward", "optimizer step", "filling the feature table"]


@dataclass(frozen=True)
class Point:
    """Peak of one micro-batch's forward and backward pass, without bytes that exist all the time."""

    micro_batch: int
    activations: int
    """Tensors made by the pass except gradients: prepared inputs, saved tensors, temporaries, casts of weights."""
    gradients: int
    """Gradients at that moment, if the step has one micro-batch."""
    activations_after: int
    """``activations`` after another micro-batch of the step, when all gradients exist all the time."""


@dataclass(frozen=True)
class Footprint:
    """Device memory (bytes) of a model under training, for one precision, feature mode and checkpointing."""

    parameters: int
    """Parameters, including frozen ones, and buffers."""
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int
    feature_table: int
    """Feature table; 0 unless on the device."""
    filling: int
    """Peak while the feature table is filled, besides parameters and table, wherever the table is."""
    inputs: tuple[int, ...]
    """Bytes per sample of each tensor of a batch from the loader."""
    points: tuple[Point, ...]
    """Peaks by rising micro-batch."""


@dataclass(frozen=True)
class NoEstimate:
    """The reason why there is no footprint."""

    reason: str
    """Text of one line."""


KnownFootprints = Mapping[tuple[str | None, bool], Footprint | NoEstimate]
"""Footprints of one model: feature mode and whether activations are checkpointed -> footprint."""


@dataclass(frozen=True)
class StepShape:
    """The work of one device in an optimizer step."""

    samples: int
    """Samples of the device's share of the effective batch; all are on the device at once and are split there."""
    batches_ahead: int = 0
    """Batches of that size already on the device (``loader.device_prefetch``)."""
    world_size: int = 1
    """Several ranks: DDP's buckets hold the gradients once more."""
    average: int = 0
    """Bytes of a callback's average of the weights."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a run on one device."""

    moment: Moment
    parts: Mapping[str, int]
    """Bytes at the peak by purpose, including entries of 0."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors at the peak. What the allocator and libraries add is left to the share of the budget
        that is not planned with."""
        return sum(self.parts.values())


def predicted_peak(footprint: Footprint, micro_batch: int, step: StepShape) -> Prediction:
    """Returns the peak of a run: in the passes, in the optimizer, or while the feature table is filled.

    Values between measured micro-batches are interpolated. They are never too low, since a peak is the maximum of
    several lines. The first value also holds below the first point. Beyond the last point the line is extended.
    """

    def at(value: Callable[[Point], int]) -> int:
        return on_curve(footprint.points, micro_batch, value)

    always = {
        "parameters": footprint.parameters,
        "optimizer state": footprint.optimizer_state,
        "feature table": footprint.feature_table,
        "inputs": sum(footprint.inputs) * step.samples * (1 + step.batches_ahead),
        "gradient buckets": footprint.gradients if step.world_size > 1 else 0,
    }
    if step.average:
        always["weight average"] = step.average
    existing = footprint.gradients
    if micro_batch < step.samples:
        activations = at(attrgetter("activations_after"))
    else:
        existing = min(existing, at(attrgetter("gradients")))
        activations = at(whole_pass) - existing
    a_pass = {**always, "gradients": existing, "activations": max(0, activations)}
    filling = {"parameters": always["parameters"], "feature table": footprint.feature_table}
    moments: list[tuple[Moment, dict[str, int]]] = [
        ("forward and backward", a_pass),
        (
            "optimizer step",
            {**always, "gradients": footprint.gradients, "optimizer temporaries": footprint.optimizer_temporaries},
        ),
        ("filling the feature table", {**filling, "activations": footprint.filling}),
    ]
    moment, parts = max(moments, key=lambda each: sum(each[1].values()))
    return Prediction(moment, parts)


def largest_micro_batch(footprint: Footprint, budget_bytes: int, step: StepShape) -> int:
    """Returns the largest micro-batch up to ``step.samples`` that fits ``budget_bytes``; 0 if none does."""

    def fits(size: int) -> bool:
        return predicted_peak(footprint, size, step).tensor_bytes <= budget_bytes

    # The whole step first: its gradients do not all exist at the peak of the activations, so it may need less than two
    # micro-batches.
    if fits(step.samples):
        return step.samples
    low, high = 0, step.samples
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def whole_pass(point: Point) -> int:
    """Returns the peak bytes of a micro-batch that is the only one of its step."""
    return point.activations + point.gradients


def on_curve(points: Sequence[Point], micro_batch: int, value: Callable[[Point], int]) -> int:
    """Returns the interpolated value at a micro-batch, rounded up; the last line is extended."""
    if micro_batch <= points[0].micro_batch or len(points) == 1:
        return value(points[0])
    place = min(bisect_left(points, micro_batch, key=attrgetter("micro_batch")), len(points) - 1)
    before, after = points[place - 1], points[place]
    rise = (value(after) - value(before)) * (micro_batch - before.micro_batch)
    return value(before) - (-rise // (after.micro_batch - before.micro_batch))

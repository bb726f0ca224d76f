"""Predicts the device memory of a training run: its parts, the peak of a step, the largest micro-batch.

Pure arithmetic without torch, so that planning can use it. `estimate.measure` makes a `Footprint`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

from wellfed.plan.predict.caching_allocator import reserved_for
from wellfed.plan.predict.replay import Recording, Replayed

Basis = Literal["fake tensors", "small runs"]
Moment = Literal["forward and backward", "optimizer step", "filling the feature table"]

FORMAT = 2
"""Version of a footprint's JSON; others are not read."""
SLOPES_AGREE_FRAC = 0.05
"""Maximum relative difference of two successive slopes on one line, which may then be extended."""
NEAR_FRAC = 0.005
"""Relative precision of `needed_bytes`."""


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
    sparse_gradients: int = 0
    """Sparse gradients left by a pass. They hold only used rows, so they grow with the samples."""
    sparse_temporaries: int = 0
    """Temporaries of the optimizer for sparse gradients."""


@dataclass(frozen=True)
class Footprint:
    """Device memory (bytes) of a model under training, for one precision, feature mode and checkpointing."""

    basis: Basis
    """Whether the passes ran on fake tensors, or for real with a few samples."""
    parameters: int
    """Parameters, including frozen ones, and buffers."""
    gradients: int
    """Dense gradients."""
    optimizer_state: int
    optimizer_temporaries: int
    """Temporaries of the optimizer for dense gradients."""
    feature_table: int
    """Feature table; 0 unless on the device."""
    filling: int
    """Peak while the feature table is filled, besides parameters and table, wherever the table is."""
    inputs: tuple[int, ...]
    """Bytes per sample of each tensor of a batch from the loader."""
    points: tuple[Point, ...]
    """Peaks by rising micro-batch."""
    recording: Recording | None = None
    """All allocations, to predict bytes reserved beyond the tensors; None = not recorded."""

    def __post_init__(self) -> None:
        sizes = [point.micro_batch for point in self.points]
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ValueError(f"a footprint needs points of rising micro-batch, not {sizes}")

    @property
    def reach(self) -> int | None:
        """Largest micro-batch with a prediction; None = any, since the last slopes agree."""
        return None if is_straight(self.points) else self.points[-1].micro_batch

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a JSON file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Footprint:
        """Returns the footprint from the result of `to_dict`.

        Raises:
            ValueError: the values are no footprint, or have another format.
        """
        try:
            rest = dict(values)
            if rest.pop("format") != FORMAT:
                raise ValueError(f"format {values['format']!r} is not {FORMAT}")
            rest["points"] = tuple(Point(**point) for point in rest["points"])
            rest["inputs"] = tuple(rest["inputs"])
            if rest["recording"] is not None:
                rest["recording"] = Recording.from_dict(rest["recording"])
            made = cls(**rest)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a footprint: {error}") from error
        counts = [("inputs", each) for each in made.inputs]
        parts: tuple[Footprint | Point, ...] = (made, *made.points)
        for part in parts:
            counts += [(spec.name, getattr(part, spec.name)) for spec in fields(part) if spec.type == "int"]
        if wrong := [(name, value) for name, value in counts if type(value) is not int or value < 0]:
            raise ValueError(f"not a footprint: {wrong} should be counts of bytes")
        return made


@dataclass(frozen=True)
class NoEstimate:
    """The reason why there is no footprint."""

    reason: str
    """Text of one line."""


@dataclass(frozen=True)
class KnownFootprints:
    """Footprints of one model under several settings."""

    found: Mapping[tuple[str | None, bool], Footprint | NoEstimate]
    """Feature mode and whether activations are checkpointed -> footprint."""
    looked_at: str = ""
    """Text about the samples used as examples, if samples differ in length."""
    digests: Mapping[tuple[str | None, bool], str | None] = field(default_factory=dict)
    """Digests of everything that a footprint depends on, by the same key; None = unknown."""


@dataclass(frozen=True)
class StepShape:
    """The work of one device in an optimizer step."""

    samples: int
    """Samples of the device's share of the effective batch; all are on the device at once and are split there."""
    batches_ahead: int = 0
    """Batches of that size already on the device (``loader.device_prefetch``)."""
    world_size: int = 1
    workspaces: int = 0
    """Bytes of the allocator's memory used by libraries."""
    room_for_sums: int = 0
    """Maximum bytes of gradients summed at a time, besides DDP's buckets, by ranks that can repeat a step."""
    is_sharded: bool = False
    """Whether FSDP divides parameters, gradients and state by ``world_size``. Otherwise DDP's buckets hold the
    gradients once more."""
    gathered: int = 0
    """Bytes of a sharded model that are gathered at a time (see `fsdp_blocks.gathered_bytes`)."""
    average: int = 0
    """Bytes of a callback's average of the weights."""
    num_eval: int = 0
    """Samples of a validation, over all ranks; 0 = there is none. A test comes after the training."""
    eval_batch_size: int | None = None
    """Samples of its batches; None = the micro-batch."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a run on one device."""

    moment: Moment
    parts: Mapping[str, int]
    """Bytes at the peak by purpose, including entries of 0."""
    slack: int = 0
    """Bytes that the CUDA allocator reserves beyond the tensors: rounding, and blocks too small for any request."""
    workspaces: int = 0
    """Bytes that libraries allocate for themselves (see `StepShape`)."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors at the peak."""
        return sum(self.parts.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the CUDA allocator reserves without a limit."""
        return self.tensor_bytes + self.slack + self.workspaces


def predicted_peak(footprint: Footprint, micro_batch: int, step: StepShape, *, with_slack: bool = True) -> Prediction:
    """Returns the peak of a run: in the passes, in the optimizer, or while the feature table is filled.

    Values between measured micro-batches are interpolated. They are never too low, since a peak is the maximum of
    several lines. The first value also holds below the first point. Beyond the last point the line is extended.

    Args:
        with_slack: whether to include bytes reserved beyond the tensors, which need a replay.

    Raises:
        ValueError: micro_batch is below 1, or beyond ``footprint.reach``.
    """
    if micro_batch < 1 or (footprint.reach is not None and micro_batch > footprint.reach):
        raise ValueError(f"micro_batch {micro_batch} is not in 1..{footprint.reach}")

    def share(num_bytes: int) -> int:
        return -(-num_bytes // step.world_size) if step.is_sharded else num_bytes

    def at(samples: int, value: Callable[[Point], int]) -> int:
        return on_curve(footprint.points, samples, value)

    sparse = at(step.samples, attrgetter("sparse_gradients"))
    gradients = share(footprint.gradients) + sparse
    has_buckets = step.world_size > 1 and not step.is_sharded
    always = {
        "parameters": share(footprint.parameters),
        "optimizer state": share(footprint.optimizer_state),
        "feature table": footprint.feature_table,
        "inputs": sum(footprint.inputs) * step.samples * (1 + step.batches_ahead),
        "gradient buckets": gradients + min(gradients, step.room_for_sums) if has_buckets else 0,
    }
    if step.average:
        always["weight average"] = step.average
    is_split = micro_batch < step.samples
    existing = footprint.gradients + sparse
    if is_split:
        activations = at(micro_batch, attrgetter("activations_after"))
    else:
        existing = min(existing, at(micro_batch, attrgetter("gradients")))
        activations = at(micro_batch, whole_pass) - existing
    gathered = {"gathered weights": step.gathered} if step.is_sharded else {}
    a_pass = {**always, **gathered, "gradients": share(existing), "activations": max(0, activations)}
    temporaries = at(step.samples, attrgetter("sparse_temporaries")) + share(footprint.optimizer_temporaries)
    filling = {"parameters": always["parameters"], "feature table": footprint.feature_table}
    if step.is_sharded and footprint.filling:  # filling runs the whole model
        filling["gathered weights"] = footprint.parameters
    moments: list[tuple[Moment, dict[str, int]]] = [
        ("forward and backward", a_pass),
        # Rows of the last micro-batch are added to earlier ones by writing all to new memory.
        ("forward and backward", {**always, "gradients": gradients + (sparse if is_split else 0)}),
        ("optimizer step", {**always, "gradients": gradients, "optimizer temporaries": temporaries}),
        ("filling the feature table", {**filling, "activations": footprint.filling}),
    ]
    moment, parts = max(moments, key=lambda each: sum(each[1].values()))
    return Prediction(moment, parts, _slack(footprint, micro_batch, step) if with_slack else 0, step.workspaces)


def _slack(footprint: Footprint, micro_batch: int, step: StepShape) -> int:
    """Returns the bytes reserved beyond the tensors without a limit."""
    if footprint.recording is None:
        return 0
    replayed = _replayed(footprint, footprint.recording, micro_batch, step)
    unused = replayed.reserved - replayed.asked
    if step.is_sharded:  # gathered weights are in segments of other streams, which keep them
        unused += step.gathered
    if step.batches_ahead:  # as are batches copied ahead
        sizes = [each * step.samples for each in footprint.inputs] * (1 + step.batches_ahead)
        unused += reserved_for(sizes, expandable=footprint.recording.expandable) - sum(sizes)
    return unused + _left_by_evaluation(footprint, micro_batch, step)


def _left_by_evaluation(footprint: Footprint, micro_batch: int, step: StepShape) -> int:
    """Returns the bytes of the segments that stay reserved after an evaluation, and are returned if memory is short.

    Its batches are copied ahead on a stream of their own, whose segments no other stream can use. They count as large
    as those of training.
    """
    size = min(step.eval_batch_size or micro_batch, step.num_eval)
    if footprint.recording is None or not (size and step.batches_ahead):
        return 0
    num_batches = -(-step.num_eval // size)  # dealt among the ranks
    most = min(1 + step.batches_ahead, -(-num_batches // step.world_size))
    return reserved_for([each * size for each in footprint.inputs] * most, expandable=footprint.recording.expandable)


def _replayed(
    footprint: Footprint, recording: Recording, micro_batch: int, step: StepShape, limit: int | None = None
) -> Replayed:
    """Returns a replay in which inputs that are not copied ahead use the computing stream."""
    inputs = [] if step.batches_ahead else [size * step.samples for size in footprint.inputs]
    return recording.replayed(micro_batch, step.samples, inputs, limit)


def fits_within(footprint: Footprint, micro_batch: int, step: StepShape, limit_bytes: int) -> bool:
    """Returns whether a run can continue with at most ``limit_bytes`` reserved.

    Less than the unlimited reservation may suffice, since the allocator returns cached segments to the driver.
    """
    peak = predicted_peak(footprint, micro_batch, step)
    missing = peak.reserved_bytes - _left_by_evaluation(footprint, micro_batch, step) - limit_bytes
    if missing <= 0:
        return True
    if footprint.recording is None or peak.tensor_bytes + peak.workspaces > limit_bytes:
        return False
    freely = _replayed(footprint, footprint.recording, micro_batch, step)
    return _replayed(footprint, footprint.recording, micro_batch, step, freely.reserved - missing).settles


def needed_bytes(footprint: Footprint, micro_batch: int, step: StepShape) -> int:
    """Returns the fewest sufficient bytes, to half a percent."""
    peak = predicted_peak(footprint, micro_batch, step)
    low, high = peak.tensor_bytes + peak.workspaces - 1, peak.reserved_bytes
    while high - low > max(1, NEAR_FRAC * high):
        middle = (low + high) // 2
        low, high = (low, middle) if fits_within(footprint, micro_batch, step, middle) else (middle, high)
    return high


def largest_micro_batch(footprint: Footprint, budget_bytes: int, step: StepShape) -> int:
    """Returns the largest micro-batch up to ``step.samples`` that fits ``budget_bytes``; 0 if none does."""
    reach = step.samples if footprint.reach is None else min(step.samples, footprint.reach)
    # The whole step first: its gradients do not all exist at the peak of the activations, so it may need less than two
    # micro-batches.
    if fits_within(footprint, reach, step, budget_bytes):
        return reach
    low, high = 0, reach
    while high - low > 1:
        middle = (low + high) // 2
        peak = predicted_peak(footprint, middle, step, with_slack=False)
        low, high = (middle, high) if peak.reserved_bytes <= budget_bytes else (low, middle)
    # Reserved bytes don't rise steadily with the size, so search down in growing steps from where the tensors fit.
    number = 0
    while low > 0 and not fits_within(footprint, low, step, budget_bytes):
        low -= max(1, low * (1 + number // 10) // 100)
        number += 1
    return max(0, low)


def whole_pass(point: Point) -> int:
    """Returns the peak bytes of a micro-batch that is the only one of its step."""
    return point.activations + point.gradients


PEAKS: tuple[Callable[[Point], int], ...] = (whole_pass, attrgetter("activations_after"))
"""Peaks of a single micro-batch, and of one after another."""


def slope(low: Point, high: Point, value: Callable[[Point], int]) -> float:
    """Returns the bytes per sample between two points."""
    return (value(high) - value(low)) / (high.micro_batch - low.micro_batch)


def on_curve(points: Sequence[Point], micro_batch: int, value: Callable[[Point], int]) -> int:
    """Returns the interpolated value at a micro-batch, rounded up; the last line is extended."""
    if micro_batch <= points[0].micro_batch or len(points) == 1:
        return value(points[0])
    place = min(bisect_left(points, micro_batch, key=attrgetter("micro_batch")), len(points) - 1)
    before, after = points[place - 1], points[place]
    rise = (value(after) - value(before)) * (micro_batch - before.micro_batch)
    return value(before) - (-rise // (after.micro_batch - before.micro_batch))


def is_straight(points: Sequence[Point]) -> bool:
    """Returns whether the last two slopes of both peaks agree, so that the line may be extended."""
    if len(points) < 3:
        return False
    for value in PEAKS:
        one, two = (slope(before, after, value) for before, after in pairwise(points[-3:]))
        if abs(one - two) > SLOPES_AGREE_FRAC * max(abs(one), abs(two)):
            return False
    return True

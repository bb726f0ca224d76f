"""Predicts the device memory of a training run: its parts, the peak of a step, the largest micro-batch.

Arithmetic on measured figures, without torch, so that planning can use it. `estimate.measure` makes a `Footprint`.
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
"""Format of a footprint's JSON; others are not read."""
SLOPES_AGREE_FRAC = 0.05
"""Largest relative difference of two successive slopes that count as one line, which may be extended."""
NEAR_FRAC = 0.005
"""Relative precision of `needed_bytes`."""


@dataclass(frozen=True)
class Point:
    """The peak of one micro-batch's forward and backward pass: bytes beside those that exist all the time."""

    micro_batch: int
    activations: int
    """Tensors that the pass makes, without gradients: prepared inputs, saved tensors, temporaries, casts of weights."""
    gradients: int
    """Gradients that exist at that moment, if the micro-batch is the only one of its step."""
    activations_after: int
    """``activations`` after another micro-batch of the step: then all gradients exist all the time."""
    sparse_gradients: int = 0
    """Sparse gradients left by a pass. They hold only the rows looked up, so they grow with the samples."""
    sparse_temporaries: int = 0
    """Temporaries of the optimizer for sparse gradients."""


@dataclass(frozen=True)
class Footprint:
    """Device memory (bytes) of a model under training, for one precision, feature mode and checkpointing."""

    basis: Basis
    """Whether the passes ran on fake tensors, or for real with a few samples."""
    parameters: int
    """Parameters, frozen ones too, and buffers."""
    gradients: int
    """Dense gradients."""
    optimizer_state: int
    optimizer_temporaries: int
    """Temporaries of the optimizer for dense gradients."""
    feature_table: int
    """The feature table; 0 unless it is on the device."""
    filling: int
    """Peak beside parameters and table while the feature table is filled, on the device or not."""
    inputs: tuple[int, ...]
    """Bytes a sample of each tensor of a batch as it comes from the loader."""
    points: tuple[Point, ...]
    """Peaks by rising micro-batch."""
    recording: Recording | None = None
    """All allocations, for the bytes reserved beyond the tensors; None: none are."""

    def __post_init__(self) -> None:
        sizes = [point.micro_batch for point in self.points]
        if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
            raise ValueError(f"a footprint needs points of rising micro-batch, not {sizes}")

    @property
    def reach(self) -> int | None:
        """Largest micro-batch that can be predicted; None = any, since the last slopes agree."""
        return None if is_straight(self.points) else self.points[-1].micro_batch

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of a JSON file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Footprint:
        """Returns the footprint that `to_dict` described.

        Raises:
            ValueError: it describes none, or one of another format.
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
    """One line."""


@dataclass(frozen=True)
class KnownFootprints:
    """Footprints of one model under several settings."""

    found: Mapping[tuple[str | None, bool], Footprint | NoEstimate]
    """Footprints by feature mode and whether activations are checkpointed."""
    looked_at: str = ""
    """Text on the samples that represent all others, if they differ in length."""
    digests: Mapping[tuple[str | None, bool], str | None] = field(default_factory=dict)
    """Digests of everything that a footprint depends on, by the same key; None: unknown."""


@dataclass(frozen=True)
class StepShape:
    """The work of one device in an optimizer step."""

    samples: int
    """Samples of its share of the effective batch. All are on the device at once, and are split there."""
    batches_ahead: int = 0
    """Batches of that size that are on the device already (``loader.device_prefetch``)."""
    world_size: int = 1
    workspaces: int = 0
    """Bytes of the allocator's memory that libraries keep on this device."""
    room_for_sums: int = 0
    """Most bytes of gradients that ranks which can repeat a step sum at a time, beside DDP's buckets."""
    is_sharded: bool = False
    """FSDP: parameters, gradients and state are divided by ``world_size``. Otherwise DDP, whose buckets hold the
    gradients once more."""
    gathered: int = 0
    """Bytes of a sharded model that are whole at a time (see `fsdp_blocks.gathered_bytes`)."""
    average: int = 0
    """Bytes of an average of the weights that a callback keeps."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak of a run on one device."""

    moment: Moment
    parts: Mapping[str, int]
    """Bytes by what needs them at that moment, entries of 0 bytes included."""
    slack: int = 0
    """Bytes that the CUDA allocator reserves beyond the tensors: rounded sizes, and blocks that nothing fits into."""
    workspaces: int = 0
    """Bytes that libraries allocate there for themselves (see `StepShape`)."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors that live at the peak."""
        return sum(self.parts.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the CUDA allocator reserves for all of it if nothing limits it."""
        return self.tensor_bytes + self.slack + self.workspaces


def predicted_peak(footprint: Footprint, micro_batch: int, step: StepShape, *, with_slack: bool = True) -> Prediction:
    """Returns the highest moment of a run: in the passes, in the optimizer, or while the feature table is filled.

    Between measured micro-batches the value is that of a line. It is never too low, since a peak is the highest of
    several lines. Below the first point its value is taken; beyond the last, the line is extended.

    Args:
        with_slack: False leaves out the bytes reserved beyond the tensors, which need a replay.

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
    if step.is_sharded and footprint.filling:  # which runs the whole model
        filling["gathered weights"] = footprint.parameters
    moments: list[tuple[Moment, dict[str, int]]] = [
        ("forward and backward", a_pass),
        # The rows of the last micro-batch are added to the earlier ones by writing all of them to new memory.
        ("forward and backward", {**always, "gradients": gradients + (sparse if is_split else 0)}),
        ("optimizer step", {**always, "gradients": gradients, "optimizer temporaries": temporaries}),
        ("filling the feature table", {**filling, "activations": footprint.filling}),
    ]
    moment, parts = max(moments, key=lambda each: sum(each[1].values()))
    return Prediction(moment, parts, _slack(footprint, micro_batch, step) if with_slack else 0, step.workspaces)


def _slack(footprint: Footprint, micro_batch: int, step: StepShape) -> int:
    """Returns the bytes that the allocator reserves beyond the tensors if nothing limits it."""
    if footprint.recording is None:
        return 0
    replayed = _replayed(footprint, footprint.recording, micro_batch, step)
    unused = replayed.reserved - replayed.asked
    if step.is_sharded:  # gathered weights are in segments of other streams, which keep them
        unused += step.gathered
    if step.batches_ahead:  # so are batches copied ahead
        sizes = [each * step.samples for each in footprint.inputs] * (1 + step.batches_ahead)
        unused += reserved_for(sizes, expandable=footprint.recording.expandable) - sum(sizes)
    return unused


def _replayed(
    footprint: Footprint, recording: Recording, micro_batch: int, step: StepShape, limit: int | None = None
) -> Replayed:
    """Returns a replay with the inputs that are copied on the computing stream, which are those not copied ahead."""
    inputs = [] if step.batches_ahead else [size * step.samples for size in footprint.inputs]
    return recording.replayed(micro_batch, step.samples, inputs, limit)


def fits_within(footprint: Footprint, micro_batch: int, step: StepShape, limit_bytes: int) -> bool:
    """Returns whether a run can go on with at most ``limit_bytes`` reserved.

    Less than the unlimited reservation may be enough, since the allocator returns cached segments to the driver.
    """
    peak = predicted_peak(footprint, micro_batch, step)
    missing = peak.reserved_bytes - limit_bytes
    if missing <= 0:
        return True
    if footprint.recording is None or peak.tensor_bytes + peak.workspaces > limit_bytes:
        return False
    freely = _replayed(footprint, footprint.recording, micro_batch, step)
    return _replayed(footprint, footprint.recording, micro_batch, step, freely.reserved - missing).settles


def needed_bytes(footprint: Footprint, micro_batch: int, step: StepShape) -> int:
    """Returns the fewest bytes that are enough, to half a percent."""
    peak = predicted_peak(footprint, micro_batch, step)
    low, high = peak.tensor_bytes + peak.workspaces - 1, peak.reserved_bytes
    while high - low > max(1, NEAR_FRAC * high):
        middle = (low + high) // 2
        low, high = (low, middle) if fits_within(footprint, micro_batch, step, middle) else (middle, high)
    return high


def largest_micro_batch(footprint: Footprint, budget_bytes: int, step: StepShape) -> int:
    """Returns the largest micro-batch up to ``step.samples`` that fits ``budget_bytes``; 0 if none does."""
    reach = step.samples if footprint.reach is None else min(step.samples, footprint.reach)
    # Unsplit comes first: its gradients do not all exist at the peak of the activations, so it may need less than a
    # step in two micro-batches.
    if fits_within(footprint, reach, step, budget_bytes):
        return reach
    low, high = 0, reach
    while high - low > 1:
        middle = (low + high) // 2
        peak = predicted_peak(footprint, middle, step, with_slack=False)
        low, high = (middle, high) if peak.reserved_bytes <= budget_bytes else (low, middle)
    # Reserved bytes don't rise steadily with the size: search down in growing steps from where the tensors fit.
    number = 0
    while low > 0 and not fits_within(footprint, low, step, budget_bytes):
        low -= max(1, low * (1 + number // 10) // 100)
        number += 1
    return max(0, low)


def whole_pass(point: Point) -> int:
    """Returns the bytes at the peak of a micro-batch that is the only one of its step."""
    return point.activations + point.gradients


PEAKS: tuple[Callable[[Point], int], ...] = (whole_pass, attrgetter("activations_after"))
"""Peaks of a micro-batch alone, and after another one."""


def slope(low: Point, high: Point, value: Callable[[Point], int]) -> float:
    """Returns the bytes a sample between two points."""
    return (value(high) - value(low)) / (high.micro_batch - low.micro_batch)


def on_curve(points: Sequence[Point], micro_batch: int, value: Callable[[Point], int]) -> int:
    """Returns the value at a micro-batch, rounded up; the last line is extended beyond the last point."""
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

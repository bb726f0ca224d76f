"""Finds the cheapest memory settings that fit a budget, and alternatives if no allowed setting fits.

Order of cost: a whole step; smaller micro-batches, which use kernels less well; checkpointing, about a third more
compute; a feature table in host memory, with a copy per batch; ``dynamic``, which runs the encoder each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from wellfed.plan.predict.peak import (
    Footprint,
    NoEstimate,
    Prediction,
    StepShape,
    fits_within,
    largest_micro_batch,
    needed_bytes,
    predicted_peak,
)
from wellfed.units import gib, show_bytes

Estimate = Callable[[str | None, bool], Footprint | NoEstimate]
"""Returns the footprint for a feature mode (None = no features) with or without activation checkpointing."""
PLANNED_FRAC = 0.98
"""Maximum share of the budget for a predicted peak; the rest covers errors of the prediction (docs/memory.md)."""


@dataclass(frozen=True)
class SearchSpace:
    """Allowed settings, the cheapest value of each first."""

    features: tuple[str | None, ...]
    checkpointed: tuple[bool, ...]
    micro_batch: int | None
    """The only allowed micro-batch; None = any."""
    at_most: int
    """Largest micro-batch if any is allowed."""
    step: StepShape


@dataclass(frozen=True)
class Candidate:
    """A memory setting with its predicted peak on each device."""

    features: str | None
    checkpointed: bool
    micro_batch: int
    peak: Prediction
    reserved_bytes: int
    """Bytes that the allocator reserves within the budget; if they don't fit, the bytes needed."""
    fits: bool = True

    @property
    def peak_gib(self) -> float:
        """``reserved_bytes`` in GiB."""
        return gib(self.reserved_bytes)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: a candidate, or the reason for having no estimate."""

    candidate: Candidate | None
    """The cheapest candidate that fits, else the allowed one that needs least."""
    passed_over: tuple[Candidate, ...] = ()
    """Cheaper candidates that do not fit, each with the micro-batch that needs least."""
    no_estimate: str | None = None


def limit_bytes(budget_gib: float) -> int:
    """Returns the maximum bytes of a planned peak."""
    return int(PLANNED_FRAC * budget_gib * 2**30)


def cheapest(space: SearchSpace, estimate: Estimate, budget_gib: float | None) -> SearchResult:
    """Returns the first candidate that fits; without a budget all fit."""
    passed: list[Candidate] = []
    for features, checkpointed in product(space.features, space.checkpointed):
        footprint = estimate(features, checkpointed)
        if isinstance(footprint, NoEstimate):
            return SearchResult(None, no_estimate=footprint.reason)
        candidate = _largest(space, features, checkpointed, footprint, budget_gib)
        if candidate.fits:
            return SearchResult(candidate, tuple(passed))
        passed.append(candidate)
    return SearchResult(min(passed, key=lambda each: each.reserved_bytes), tuple(passed))


def remedies(
    space: SearchSpace,
    estimate: Estimate,
    budget_gib: float,
    *,
    features: tuple[str | None, ...],
    may_split: bool,
    has_blocks: bool,
) -> list[Candidate]:
    """Returns settings that fit, cheapest first, if typed settings may be changed too.

    Args:
        features: feature modes that are possible here, the fastest first.
        may_split: whether the model may be trained in micro-batches.
        has_blocks: whether the model has blocks that checkpointing can recompute.
    """
    checkpointed = (False, True) if has_blocks else space.checkpointed
    micro = None if may_split else space.micro_batch or space.step.samples
    wider = SearchSpace(features, checkpointed, micro, space.step.samples, space.step)
    found: list[Candidate] = []
    for mode, is_checkpointed in product(features, checkpointed):
        footprint = estimate(mode, is_checkpointed)
        if not isinstance(footprint, NoEstimate):
            found.append(_largest(wider, mode, is_checkpointed, footprint, budget_gib))
    return [candidate for candidate in found if candidate.fits]


def _largest(
    space: SearchSpace, features: str | None, checkpointed: bool, footprint: Footprint, budget_gib: float | None
) -> Candidate:
    """Returns the candidate with the largest micro-batch that fits, else with the lowest need."""
    limit = None if budget_gib is None else limit_bytes(budget_gib)
    micro = space.micro_batch or space.at_most
    if limit is not None and space.micro_batch is None:
        micro = min(largest_micro_batch(footprint, limit, space.step), space.at_most) or 1
    elif footprint.reach is not None:
        micro = min(micro, footprint.reach)
    peak = predicted_peak(footprint, micro, space.step)
    reserved, fits = peak.reserved_bytes, limit is None or fits_within(footprint, micro, space.step, limit)
    if limit is not None:
        reserved = min(reserved, limit) if fits else needed_bytes(footprint, micro, space.step)
    return Candidate(features, checkpointed, micro, peak, reserved, fits)


def show_parts(candidate: Candidate, most: int = 4) -> str:
    """Returns the largest parts of a peak for messages; with the rest they add up to the reserved bytes."""
    parts: list[tuple[str, int]] = sorted(candidate.peak.parts.items(), key=lambda part: -part[1])
    parts[most:] = [("other parts", sum(size for _, size in parts[most:]))]
    unused = max(0, candidate.reserved_bytes - candidate.peak.tensor_bytes - candidate.peak.workspaces)
    parts += [("the allocator's unused blocks", unused), ("cuBLAS's workspaces", candidate.peak.workspaces)]
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts if size)

"""Computes which knob mattered: the share of the differences that each axis explains alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from wellfed.study.objective import SAMPLES_PER_S, Objective
from wellfed.units import show_percent

_EPSILON = 1e-9
"""Standard deviation of log scores below which all are equal up to rounding."""


@dataclass(frozen=True)
class Effects:
    """Shares of the variance of the log of the score over the points that have one.

    An axis's share is its main effect, corrected for noise (omega squared). Numerator: the sum of squares between its
    values' means, weighted by their points, less one mean square of the rest for each degree of freedom. Denominator:
    the total sum of squares plus that mean square. 0..1; 0 = no more than noise would show. In a full grid the shares
    add up to what all main effects explain. Where points failed, axes are not independent and a note says so.
    """

    shares: Mapping[str, float]
    """Axis -> share, in the sweep's order; axes without one are in ``absent``."""
    absent: Mapping[str, str]
    """Axis -> why it has no share."""
    rest: float | None
    """Share of interactions and noise; None without shares."""
    points: int
    """Points with a score."""
    notes: tuple[str, ...] = ()

    @property
    def by_importance(self) -> list[str]:
        """Axes with a share, the largest first."""
        return sorted(self.shares, key=lambda axis: -self.shares[axis])


def knob_effects(
    values: Sequence[Mapping[str, str]],
    scores: Sequence[float],
    axes: Sequence[str],
    objective: Objective = SAMPLES_PER_S,
    *,
    is_all_tied: bool = False,
) -> Effects:
    """Returns the effects over points with a score: ``values`` by axis, and the score, > 0, of each.

    Args:
        is_all_tied: all points tie, so no knob mattered visibly.
    """
    logs = np.log(np.asarray(scores, dtype=float))
    total = float(((logs - logs.mean()) ** 2).sum()) if len(logs) else 0.0
    if len(logs) < 2:
        why = f"{len(logs) or 'no'} point has {objective.a_noun}, and a comparison needs 2"
        return Effects({}, dict.fromkeys(axes, why), None, len(logs))
    if math.sqrt(total / len(logs)) < _EPSILON:
        return Effects({}, dict.fromkeys(axes, f"all have the same {objective.noun}"), None, len(logs))
    if is_all_tied:
        why = f"all points tie: no difference of {objective.noun} is beyond noise"
        return Effects({}, dict.fromkeys(axes, why), None, len(logs))
    squares: dict[str, float] = {}
    degrees: dict[str, int] = {}
    absent = {}
    for axis in axes:
        groups = defaultdict(list)
        for point, log in zip(values, logs, strict=True):
            groups[point[axis]].append(float(log))
        if len(groups) < 2:
            absent[axis] = f"all points that have {objective.a_noun} share the value {next(iter(groups))}"
            continue
        between = sum(len(group) * (fmean(group) - float(logs.mean())) ** 2 for group in groups.values())
        squares[axis], degrees[axis] = min(total, between), len(groups) - 1
    if not squares:
        return Effects({}, absent, None, len(logs))
    left, rank = _residual([[point[axis] for point in values] for axis in squares], logs - logs.mean())
    left = min(total, left)
    noise = left / (len(logs) - rank) if len(logs) > rank else 0.0
    """Mean square of interactions and noise."""

    def share(explained: float, freedom: int) -> float:
        return max(0.0, (explained - freedom * noise) / (total + noise))

    shares = {axis: share(squares[axis], degrees[axis]) for axis in squares}
    is_independent = abs(sum(squares.values()) + left - total) <= 0.005 * total
    explained = sum(shares.values()) if is_independent else share(total - left, rank - 1)
    rest = min(1.0, max(0.0, 1 - explained))
    shape = len(logs), 1 + sum(degrees.values())
    notes = _notes(shares, rest, rank, shape, is_independent=is_independent)
    return Effects(shares, absent, rest, len(logs), tuple(notes))


def _residual(columns: Sequence[Sequence[str]], logs: NDArray[np.float64]) -> tuple[float, int]:
    """Returns the squared rest of a fit by one figure for each value of each axis, and the rank of the fit.

    Counts of pairs of values are the normal equations, so that the time grows with the points and not with the product
    of points and values.

    Args:
        columns: of each axis the value at each point.
        logs: scores, with mean 0.
    """
    numbers, first = [], 0
    for column in columns:
        names, number = np.unique(column, return_inverse=True)
        numbers.append(first + number)
        first += len(names)
    pairs, sums = np.zeros((first, first)), np.zeros(first)
    for own in numbers:
        np.add.at(sums, own, logs)
        for other in numbers:
            np.add.at(pairs, (own, other), 1.0)
    solution, _, rank, _ = np.linalg.lstsq(pairs, sums, rcond=_EPSILON)
    rest = logs - sum(solution[own] for own in numbers)
    return float((rest**2).sum()), int(rank)


def _notes(
    shares: Mapping[str, float], rest: float, rank: int, shape: tuple[int, int], *, is_independent: bool
) -> list[str]:
    points, effects = shape
    notes = []
    if rank < effects:
        notes.append(
            "Points are missing so that some values occur together only: their axes can't be told apart, and each is "
            "given what they explain together."
        )
    elif not is_independent:
        notes.append(
            "Points are missing, so the axes are not independent: the shares add up to "
            f"{show_percent(sum(shares.values()))}, and all main effects together explain {show_percent(1 - rest)}."
        )
    if points <= rank:
        notes.append("There are as many effects as points: interactions and noise can't be seen, nor taken off.")
    return notes

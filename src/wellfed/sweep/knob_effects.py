"""Computes which knob mattered: the share of the differences that each axis explains taken alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from wellfed.sweep.objective import SAMPLES_PER_S, Objective
from wellfed.units import show_percent

_EPSILON = 1e-9
"""Standard deviation of log scores below which all are the same but for rounding."""


@dataclass(frozen=True)
class Effects:
    """Shares of the variance of the log of the score over the points that have one.

    An axis's share is its main effect: sum of squares between its values' means, each weighted with its number of
    points, over the total sum of squares (eta squared). It is what is explained by knowing this axis and nothing else,
    0..1. In a full grid the shares add up to what all main effects explain together; where points failed the axes are
    no longer independent, a difference may be counted for two of them, and a note says so.
    """

    shares: Mapping[str, float]
    """By axis, in the sweep's order; axes without one are in ``absent``."""
    absent: Mapping[str, str]
    """Axis -> why it has no share."""
    rest: float | None
    """Interactions and noise: what the best sum of one effect a value of each axis (least squares) leaves; None without
    shares."""
    points: int
    """With a score."""
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
) -> Effects:
    """Effects over points that have a score: ``values`` by axis, and the score, > 0, of each."""
    logs = np.log(np.asarray(scores, dtype=float))
    total = float(((logs - logs.mean()) ** 2).sum()) if len(logs) else 0.0
    if len(logs) < 2:
        why = f"{len(logs) or 'no'} point has {objective.a_noun}, and a comparison needs 2"
        return Effects({}, dict.fromkeys(axes, why), None, len(logs))
    if math.sqrt(total / len(logs)) < _EPSILON:
        return Effects({}, dict.fromkeys(axes, f"all have the same {objective.noun}"), None, len(logs))
    shares, absent = {}, {}
    for axis in axes:
        groups = defaultdict(list)
        for point, log in zip(values, logs, strict=True):
            groups[point[axis]].append(float(log))
        if len(groups) < 2:
            absent[axis] = f"all points that have {objective.a_noun} share the value {next(iter(groups))}"
            continue
        between = sum(len(group) * (fmean(group) - float(logs.mean())) ** 2 for group in groups.values())
        shares[axis] = min(1.0, between / total)
    if not shares:
        return Effects(shares, absent, None, len(logs))
    design = np.ones((len(logs), 1))
    for axis in shares:
        levels = sorted({point[axis] for point in values})[1:]
        columns = np.array([[float(point[axis] == level) for level in levels] for point in values])
        design = np.hstack([design, columns])
    solution, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    rest = min(1.0, float(((logs - design @ solution) ** 2).sum()) / total)
    return Effects(shares, absent, rest, len(logs), tuple(_notes(shares, rest, int(rank), design.shape)))


def _notes(shares: Mapping[str, float], rest: float, rank: int, shape: tuple[int, int]) -> list[str]:
    points, effects = shape
    notes = []
    if rank < effects:
        notes.append(
            "Points are missing so that some values occur together only: their axes can't be told apart, and each is "
            "given what they explain together."
        )
    elif abs(sum(shares.values()) - (1 - rest)) > 0.005:
        notes.append(
            "Points are missing, so the axes are not independent: the shares add up to "
            f"{show_percent(sum(shares.values()))}, and all main effects together explain {show_percent(1 - rest)}."
        )
    if points <= rank:
        notes.append("There are as many effects as points: interactions and noise can't be seen.")
    return notes

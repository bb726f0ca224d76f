"""Divides the compute time of steps among forward, backward and optimizer, as far as it was measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.timing.step_clock import COMPUTE_PHASES, MOST_APART
from wellfed.record import TimeEntry
from wellfed.units import show_percent

OTHER = "other compute"
"""Name of compute time outside of the three phases: hooks before the forward pass, splitting a batch, schedulers."""
_LEAST_FRAC = 0.005
"""Minimum share of a step for other work to be shown."""


def phase_shares(time: TimeEntry | None) -> dict[str, float]:
    """Returns the share of each phase in a step, and of other compute; together the compute share. Empty if unknown."""
    shares = {name: None if time is None else time.get(f"{name}_frac") for name in COMPUTE_PHASES}
    known: dict[str, float] = {name: share for name, share in shares.items() if isinstance(share, float)}
    if time is None or len(known) < len(COMPUTE_PHASES):
        return {}
    return {**known, OTHER: max(0.0, time["compute_frac"] - sum(known.values()))}


def show_phases(time: TimeEntry | None) -> str:
    """Returns the shares as text: ``forward 30 %, backward 45 %, optimizer 8 %``; empty if unknown."""
    shares = phase_shares(time).items()
    return ", ".join(f"{name} {show_percent(share)}" for name, share in shares if name != OTHER or share >= _LEAST_FRAC)


def phases_ms(steps: Mapping[str, Series], *, timed_only: bool = False) -> dict[str, Series]:
    """Returns the milliseconds of each phase and of other compute, by step, ``nan`` where unknown; empty without any.

    On a GPU they are the device's, which times one step in a few. Between two of them, at most `MOST_APART` steps
    apart, the shares are interpolated.

    Args:
        steps: columns of steps.csv. Those of a GPU have a time to copy.
        timed_only: leave out steps with interpolated shares.
    """
    compute_ms = np.nan_to_num(steps.get("compute_ms", np.empty(0)))
    on_gpu = bool(np.isfinite(steps.get("copy_ms", np.empty(0))).any())
    columns = {name: steps.get(f"device_{name}_ms" if on_gpu else f"{name}_ms") for name in COMPUTE_PHASES}
    timed = [column for column in columns.values() if column is not None and len(column) == len(compute_ms)]
    if len(timed) < len(COMPUTE_PHASES):
        return {}
    is_known = np.isfinite(np.sum(timed, axis=0)) & (compute_ms > 0)
    known, every = np.flatnonzero(is_known), np.arange(len(compute_ms))
    if not len(known):
        return {}
    if on_gpu and not timed_only:
        after = np.searchsorted(known, every).clip(1, max(1, len(known) - 1))
        before, after = known[after - 1], known[after.clip(max=len(known) - 1)]
        is_known |= (before < every) & (every < after) & (after - before <= MOST_APART)
    shares = [np.interp(every, known, column[known] / compute_ms[known]) for column in timed]
    found = {name: np.where(is_known, share * compute_ms, np.nan) for name, share in zip(columns, shares, strict=True)}
    return {**found, OTHER: np.maximum(0.0, compute_ms - np.sum(list(found.values()), axis=0))}

"""Computes times of steps, their division among phases of compute, and the wall time of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import FEWEST_STEPS
from wellfed.observe.timing.step_clock import COMPUTE_PHASES
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record.entries import RunRecord, TimeEntry, WallEntry

OTHER = "other compute"
"""Name of compute time outside of the three phases: hooks before the forward pass, splitting a batch, schedulers."""


def phase_shares(time: TimeEntry | None) -> dict[str, float]:
    """Returns the share of each phase in a step, and of other compute; together the compute share. Empty if unknown."""
    shares = {name: None if time is None else time.get(f"{name}_frac") for name in COMPUTE_PHASES}
    known: dict[str, float] = {name: share for name, share in shares.items() if isinstance(share, float)}
    if time is None or len(known) < len(COMPUTE_PHASES):
        return {}
    return {**known, OTHER: max(0.0, time["compute_frac"] - sum(known.values()))}


def is_after_resume(record: RunRecord, table: Mapping[str, Series], by: str = "step") -> npt.NDArray[np.bool_]:
    """Returns which rows the last process of a resumed run wrote, by their ``step`` or ``time_s``; all if unknown."""
    resumed = [float(event.get(by) or 0.0) for event in record.events if event["kind"] == "resume"]
    all_rows = np.ones(max(map(len, table.values()), default=0), bool)
    if not resumed or len(table.get(by, ())) != len(all_rows):
        return all_rows
    is_after: npt.NDArray[np.bool_] = table[by] > resumed[-1]
    return is_after if is_after.any() else all_rows


_PARTS_MS = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
"""Columns whose sum is a step's time."""


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps of a run. The warm-up and the steps before the last resume are left out, as in the record's
    figures, except where a name begins with ``all``."""

    record: RunRecord
    all: Mapping[str, Series]
    """Columns of steps.csv, warm-up included; all equally long, or empty."""

    @cached_property
    def num_measured(self) -> int:
        """Number of steps behind the figures of the record; 0 without figures."""
        return self.record.throughput["steps"] if self.record.throughput else 0

    @cached_property
    def is_warmup(self) -> npt.NDArray[np.bool_]:
        """Whether each step is warm-up: as marked in the table, else those that the figures of the record leave out."""
        marks, number = self.all.get("warmup", np.empty(0)), max(map(len, self.all.values()), default=0)
        left_out = self.record.throughput["warmup_steps"] if self.record.throughput else 0
        return marks > 0 if len(marks) else np.arange(number) < left_out

    def column(self, name: str) -> Series:
        """Returns a column, ``nan`` for a step without a figure; empty if the table lacks the column."""
        return self._steady(self.all.get(name, np.empty(0)))

    def known(self, name: str) -> Series:
        """Returns the figures of a column, without steps that have none."""
        found = self.column(name)
        return found[np.isfinite(found)]

    def median(self, name: str) -> float | None:
        """Returns the median of `known`; None with too few figures."""
        found = self.known(name)
        return float(np.median(found)) if len(found) >= FEWEST_STEPS else None

    @cached_property
    def wait_ms(self) -> Series:
        """Milliseconds each step waited for its batch."""
        return np.nan_to_num(self.column("wait_ms"))

    @cached_property
    def rest_ms(self) -> Series:
        """Milliseconds of the rest of each step: copy, compute and host."""
        return self._steady(self._sum_ms(_PARTS_MS[1:]))

    @cached_property
    def all_ms(self) -> Series:
        """Milliseconds of each step, warm-up included."""
        return self._sum_ms(_PARTS_MS)

    @cached_property
    def warmup_ms(self) -> Series:
        """Milliseconds of each warm-up step."""
        return self.all_ms[self.is_warmup] if len(self.all_ms) else self.all_ms

    @property
    def gap_ms(self) -> Series:
        """`all_gap_ms` without the warm-up."""
        return self._steady(self.all_gap_ms)

    @cached_property
    def all_gap_ms(self) -> Series:
        """Milliseconds before each step outside of all steps: a validation, a checkpoint, the end of an epoch.

        A step's ``time_s`` is the host's, which runs ahead of a GPU. So this clock lags behind the sum of the steps
        until the host waits for the device. Only a lead beyond the largest so far is a gap. A missing time has none.
        """
        ended_at_ms, number = 1e3 * self.all.get("time_s", np.empty(0)), len(self.all_ms)
        if number == 0 or len(ended_at_ms) != number:
            return np.zeros(number)
        ahead_ms = ended_at_ms - np.cumsum(self.all_ms)
        gap_ms = np.diff(np.fmax.accumulate(ahead_ms), prepend=ahead_ms[0])
        return np.nan_to_num(gap_ms, posinf=0.0, neginf=0.0)

    @cached_property
    def mean_ms(self) -> float | None:
        """Mean milliseconds of a whole step; None without a table."""
        return float(np.mean(self.wait_ms + self.rest_ms)) if len(self.wait_ms) else None

    def period_s(self, lag: int) -> float | None:
        """Returns the mean seconds from a step to the one ``lag`` steps later, gaps included; None without a table."""
        all_ms = self._steady(self.all_ms + self.all_gap_ms)
        return lag * float(np.mean(all_ms)) / 1e3 if len(all_ms) else None

    @cached_property
    def is_steady(self) -> npt.NDArray[np.bool_]:
        """Whether each step is of this process, and not warm-up."""
        return ~self.is_warmup & is_after_resume(self.record, self.all)

    def _steady(self, column: Series) -> Series:
        return column[self.is_steady] if len(column) else column

    def _sum_ms(self, names: Sequence[str]) -> Series:
        """Returns the sum of the columns that the table has, warm-up included; a missing figure counts as 0. Empty
        for a table without ``wait_ms``, whose header is damaged."""
        nothing = np.zeros(len(self.all.get("wait_ms", ())))
        columns = [self.all[name] for name in names if len(self.all.get(name, ()))] if len(nothing) else []
        return np.asarray(np.sum([nothing, *map(np.nan_to_num, columns)], axis=0))


@dataclass(frozen=True)
class WallTime:
    """Wall time of training."""

    record: RunRecord
    steps: StepTimes

    @cached_property
    def entry(self) -> WallEntry | None:
        """Wall time of training by kind, from the record or else derived from the tables; None if both are empty."""
        if self.record.wall is not None or not len(self.steps.all.get("wait_ms", ())):
            return self.record.wall
        steps_s, between_s = float(self.steps.all_ms.sum()) / 1e3, float(self.steps.all_gap_ms.sum()) / 1e3
        spent_s = {phase: spent["total_s"] for phase, spent in self.record.phases.items()}
        validation_s, checkpoint_s = spent_s.get("validate", 0.0), spent_s.get("checkpoint", 0.0)
        other_s = max(0.0, between_s - validation_s - checkpoint_s)
        return {
            "total_s": steps_s + validation_s + checkpoint_s + other_s,
            "start_s": 0.0,
            "steps_s": steps_s,
            "validation_s": validation_s,
            "checkpoint_s": checkpoint_s,
            "epoch_end_s": 0.0,
            "logging_s": 0.0,
            "callbacks": {},
            "end_s": 0.0,
            "other_s": other_s,
        }

    @cached_property
    def once_s(self) -> float:
        """Seconds that a run loses once, whatever its length: start, end, and the excess of the warm-up."""
        wall, warmup_ms = self.entry, self.steps.warmup_ms
        if wall is None:
            return 0.0
        late_ms = float(warmup_ms.sum()) - len(warmup_ms) * (self.steps.mean_ms or 0.0)
        return wall["start_s"] + wall["end_s"] + max(0.0, late_ms / 1e3)

    @cached_property
    def repeated_s(self) -> float:
        """Seconds of training without `once_s`; 0 if unknown."""
        return 0.0 if self.entry is None else max(0.0, self.entry["total_s"] - self.once_s)

    @cached_property
    def steps_frac(self) -> float:
        """Share of `repeated_s` spent in steps; 1 if unknown."""
        wall, of_s = self.entry, self.repeated_s
        if wall is None or of_s <= 0:
            return 1.0
        late_s = max(0.0, self.once_s - wall["start_s"] - wall["end_s"])
        return min(1.0, max(0.0, (wall["steps_s"] - late_s + hooks_within_steps_s(wall)) / of_s))

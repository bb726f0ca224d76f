"""Computes times of steps from the columns of steps.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellfed.explain.diagnosis.compute_phases import phases_ms
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.record import RunRecord

_PARTS_MS = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
"""Columns whose sum is a step's time."""


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps of a run. The warm-up is left out, except where a name begins with ``all``."""

    record: RunRecord
    all: Mapping[str, Series]
    """Columns of steps.csv, warm-up included; all equally long, or empty."""

    @cached_property
    def num_measured(self) -> int:
        """Number of steps behind the figures of the record; 0 without figures."""
        return self.record.throughput["steps"] if self.record.throughput else 0

    @cached_property
    def num_warmup(self) -> int:
        """Number of warm-up steps, which the figures of the record leave out; 0 without figures."""
        return self.record.throughput["warmup_steps"] if self.record.throughput else 0

    def column(self, name: str) -> Series:
        """Returns a column, ``nan`` for a step without a figure; empty if the table lacks the column."""
        return self.all.get(name, np.empty(0))[self.num_warmup :]

    @cached_property
    def wait_ms(self) -> Series:
        """Milliseconds each step waited for its batch."""
        return np.nan_to_num(self.column("wait_ms"))

    @cached_property
    def rest_ms(self) -> Series:
        """Milliseconds of the rest of each step: copy, compute and host."""
        return self._sum_ms(_PARTS_MS[1:])[self.num_warmup :]

    @cached_property
    def all_ms(self) -> Series:
        """Milliseconds of each step, warm-up included."""
        return self._sum_ms(_PARTS_MS)

    @cached_property
    def all_phases_ms(self) -> Mapping[str, Series]:
        """Milliseconds of compute of each step by phase, warm-up included; see `compute_phases.phases_ms`."""
        return phases_ms(self.all)

    @cached_property
    def gap_ms(self) -> Series:
        """Milliseconds before each step outside of all steps: a validation, a checkpoint, the end of an epoch.

        A step's ``time_s`` is the host's, which runs ahead of a GPU. So this clock lags behind the sum of the steps
        until the host waits for the device. Only a lead beyond the largest so far is a gap.
        """
        ended_at_ms, number = 1e3 * self.column("time_s"), len(self.wait_ms)
        if number == 0 or len(ended_at_ms) != number:
            return np.zeros(number)
        ahead_ms = ended_at_ms - np.cumsum(self.wait_ms + self.rest_ms)
        return np.diff(np.maximum.accumulate(ahead_ms), prepend=ahead_ms[0])

    @cached_property
    def mean_ms(self) -> float | None:
        """Mean milliseconds of a whole step."""
        if len(self.wait_ms):
            return float(np.mean(self.wait_ms + self.rest_ms))
        record, throughput = self.record, self.record.throughput
        if throughput and throughput["samples_per_s"] > 0 and record.steps:
            return 1e3 * record.samples / record.steps / throughput["samples_per_s"]
        return None

    def period_s(self, lag: int) -> float | None:
        """Returns the mean seconds from a step to the one ``lag`` steps later, gaps included."""
        ended_at_s = self.column("time_s")
        if len(ended_at_s) <= lag or not ended_at_s[-1] > ended_at_s[0]:
            return None if self.mean_ms is None else lag * self.mean_ms / 1e3
        return float(np.mean(ended_at_s[lag:] - ended_at_s[:-lag]))

    def _sum_ms(self, names: Sequence[str]) -> Series:
        """Returns the sum of the columns that the table has, warm-up included; a missing figure counts as 0."""
        columns = [np.nan_to_num(self.all[name]) for name in names if len(self.all.get(name, ()))]
        return np.asarray(np.sum(columns or [np.zeros(len(self.all.get("wait_ms", ())))], axis=0))

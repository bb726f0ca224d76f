"""Joins rows of iterations to rows of steps, and numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepRow


class RowsOfSteps:
    """Rows of the iterations of a step that has not ended, and the number of steps."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the latest step."""
        self.num_ended = 0
        """Iterations that ended. A device may not have finished the latest."""
        self._num_taken = self._num_dropped = 0
        self._group: list[StepRow] = []

    def start_again(self) -> bool:
        """Drops all rows so far, and those of iterations that ended; returns whether there was a step."""
        had_steps = self.step > 0
        self._group.clear()
        self.step, self._num_dropped = 0, self.num_ended
        return had_steps

    def joined(self, rows: Sequence[StepRow]) -> list[StepRow]:
        """Returns the steps that end with these rows. An iteration with ``num_micro`` 0 does not end its step."""
        found = []
        for row in rows:
            self._num_taken += 1
            if self._num_taken <= self._num_dropped:
                continue
            self._group.append(row)
            if row.num_micro:
                self.step += 1
                found.append(_joined(self._group, self.step))
                self._group = []
        return found


def _joined(rows: Sequence[StepRow], step: int) -> StepRow:
    """Returns the row of a step from the rows of its iterations."""
    last, warmup = rows[-1], step <= WARMUP_STEPS
    if len(rows) == 1:
        return last._replace(step=step, warmup=warmup)
    sums: dict[str, Any] = {}
    for name in StepRow._fields:
        if name.endswith("_ms") and name != "slowest_ms":
            known = [value for row in rows if (value := getattr(row, name)) is not None]
            sums[name] = sum(known) if known else None
    samples = sum(row.samples for row in rows)
    micro_batch = max(row.micro_batch for row in rows)
    num_micro = sum(max(1, row.num_micro) for row in rows if row.samples > 0) or 1
    return last._replace(
        **sums, step=step, samples=samples, micro_batch=micro_batch, num_micro=num_micro, warmup=warmup
    )

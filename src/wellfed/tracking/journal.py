"""All that a run writes down while it runs: record, tables, events, and the rows for a sink."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from wellfed.record import RunRecord
from wellfed.timing.phases import StepRow
from wellfed.timing.readiness import StepSummary, summarise
from wellfed.tracking.files import CsvTable, column, cut_after
from wellfed.tracking.sink import NoSink, Sink

_LOG = logging.getLogger(__name__)
STEP_COLUMNS = (
    "step",
    "time_s",
    "epoch",
    "samples",
    "micro_batch",
    "num_micro",
    "wait_ms",
    "copy_ms",
    "compute_ms",
    "host_ms",
    "ready",
)
METRIC_COLUMNS = ("step", "epoch", "time_s", "split", "name", "value")
KEPT_STEPS = 100_000
"""Figures at the end are over the last so many steps; steps.csv has them all."""


class Journal:
    """One run's record and files. Trouble with the disk is an event of the run, not its end."""

    def __init__(self, record: RunRecord, folder: Path, *, sink: Sink | None = None, earlier_s: float = 0.0) -> None:
        """
        Args:
            earlier_s: seconds that earlier parts of a resumed run took; ``time_s`` goes on from there.
        """
        self.record, self.folder, self.sink = record, folder, sink or NoSink()
        self.origin_s = time.monotonic() - earlier_s
        self.rows: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self._steps = CsvTable(folder / "steps.csv", STEP_COLUMNS, self._disk_trouble)
        self._metrics = CsvTable(folder / "metrics.csv", METRIC_COLUMNS, self._disk_trouble)

    def time_s(self) -> float:
        """Seconds since the run first started."""
        return time.monotonic() - self.origin_s

    def cut_after(self, step: int) -> None:
        """Forget table rows beyond a step: training resumes there and writes them anew."""
        for table in (self._steps, self._metrics):
            try:
                cut_after(table.path, "step", step)
            except (OSError, ValueError) as error:
                _LOG.warning("%s could not be cut back to step %d: %s", table.path, step, error)

    def samples_written(self) -> int:
        """Samples of all steps in steps.csv; 0 without one."""
        try:
            return int(sum(column(self._steps.path, "samples")))
        except (OSError, ValueError) as error:
            _LOG.warning("%s can't be read (%s): the record counts samples from here on.", self._steps.path, error)
            return 0

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Something happened that a reader of the figures must know."""
        self.record.events.append({"kind": kind, "step": step, "time_s": round(self.time_s(), 3), **facts})
        _LOG.info("event %s at step %d: %s", kind, step, facts)

    def steps(self, rows: Iterable[StepRow]) -> None:
        """Finished optimizer steps."""
        for row in rows:
            self.rows.append(row)
            self._steps.append({name: getattr(row, name) for name in STEP_COLUMNS})

    def metrics(self, split: str, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Figures of a split at a step; ``values`` without the split's name."""
        for name, value in values.items():
            self._metrics.append(
                {"step": step, "epoch": epoch, "time_s": self.time_s(), "split": split, "name": name, "value": value}
            )
        self.sink.log({"step": step, "epoch": epoch, **{f"{split}/{name}": value for name, value in values.items()}})

    def summary(self) -> StepSummary | None:
        """The figures of the steps so far."""
        return summarise(self.rows)

    def recent_summary(self) -> StepSummary | None:
        """The figures of the last 200 steps; cheap enough to ask often."""
        return summarise(list(islice(reversed(self.rows), 200))[::-1])

    def recent_rate(self) -> float | None:
        """Samples/s over the last 50 steps."""
        rows = list(islice(reversed(self.rows), 50))
        total_ms = sum(row.step_ms for row in rows)
        return 1e3 * sum(row.samples for row in rows) / total_ms if total_ms else None

    def save(self) -> None:
        """Bring the files up to date."""
        self._steps.flush()
        self._metrics.flush()
        self.record.duration_s = round(self.time_s(), 3)
        try:
            self.record.write(self.folder)
        except OSError as error:
            self._disk_trouble(error)

    def _disk_trouble(self, error: OSError) -> None:
        self.disk_full(error, self.record.steps)

    def disk_full(self, error: BaseException, step: int) -> None:
        """A file of the run could not be written; noted once."""
        if any(event["kind"] == "disk_full" for event in self.record.events):
            return
        self.event("disk_full", step, message=str(error))
        _LOG.warning("%s can't be written: %s. Training goes on; what was written before is kept.", self.folder, error)

"""Writes record, tables and events of a run while it runs, and passes rows to a sink."""

from __future__ import annotations

import csv
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from wellfed.errors import first_line
from wellfed.masking import hidden_in
from wellfed.observe.loggers.csv_table import LARGE, CsvTable, cell, read_rows
from wellfed.observe.loggers.sink import Sink
from wellfed.observe.telemetry.metrics import COLUMNS as TELEMETRY_COLUMNS
from wellfed.observe.telemetry.metrics import TIME_AXIS, curve
from wellfed.observe.telemetry.series import Sample
from wellfed.observe.timing.readiness import StepSummary, StepTable, summarise
from wellfed.observe.timing.step_clock import PHASE_COLUMNS, StepRow
from wellfed.record.entries import EventKind, RunRecord

Value = TypeVar("Value")
_LOG = logging.getLogger(__name__)
STEP_COLUMNS = (
    *("step", "time_s", "epoch", "samples", "micro_batch", "num_micro"),
    *("wait_ms", "copy_ms", "compute_ms", "host_ms", "ready", "warmup"),
    *("build_ms", "build_cpu_ms", "launch_ms", "slowest_ms", "slowest_index", *PHASE_COLUMNS, "copy_ahead_ms"),
)
METRIC_COLUMNS = ("step", "epoch", "time_s", "split", "name", "value")
MOST_OF_A_KIND = 500
"""Maximum number of events of a kind; ``left_out`` of the last one counts the rest."""
_STEPS_S = 0.8
"""Seconds for which steps may be held back; with `step_clock.WINDOW_S` they are on disk within a second."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, csv.Error)
"""Errors of a table that can't be read, or has missing cells or columns."""
KEPT_STEPS = 100_000
"""Number of latest steps that the final figures cover; steps.csv has all steps."""


class Journal:
    """Record and files of one run. A disk error becomes an event and does not end the run. `event`, `disk_full`,
    `telemetry` and `publish` are safe from any thread, all others only from the training thread."""

    def __init__(self, record: RunRecord, folder: Path, *, sink: Sink | None = None, earlier_s: float = 0.0) -> None:
        """``earlier_s``: seconds of earlier processes of a resumed run, where ``time_s`` starts."""
        self.record, self.folder, self.sink = record, folder, sink or Sink()
        self.origin_s = time.monotonic() - earlier_s
        self._rows = StepTable(KEPT_STEPS)
        self.finished_steps: Callable[[], Iterable[StepRow]] = tuple
        """Returns the rows of steps that are finished and not written; called before rows are read."""
        self._steps = CsvTable(folder / "steps.csv", STEP_COLUMNS, self.disk_full, line=step_line, flush_s=_STEPS_S)
        self._metrics = CsvTable(folder / "metrics.csv", METRIC_COLUMNS, self.disk_full)
        self._resumed_at: int | None = None
        # Written at once: the last seconds show why a run was killed.
        path = folder / "telemetry.csv"
        self._telemetry = CsvTable(path, TELEMETRY_COLUMNS, self.disk_full, line=telemetry_line, flush_s=0)
        # Guards the record's events, also while the record is written. No table's lock is acquired within it.
        self._lock = threading.RLock()
        self._has_failed = False
        """Whether `disk_full` has recorded an error."""

    def time_s(self) -> float:
        """Returns the seconds since the run first started."""
        return time.monotonic() - self.origin_s

    def cut_after(self, step: int) -> None:
        """Drops table rows beyond a step. Training resumes there and writes them again. Also drops telemetry after the
        last save, where a killed run's clock resumes."""
        self._resumed_at = step
        self._cut(step, math.inf, self._steps, self._metrics)
        self._cut(step, self.time_s(), self._telemetry)

    def drop_readings_after(self, time_s: float) -> None:
        """Drops telemetry after a time."""
        self._cut(sys.maxsize, time_s, self._telemetry)

    def _cut(self, step: int, time_s: float, *tables: CsvTable) -> None:
        for table in tables:
            table.flush()  # otherwise these rows would be written later
            self._keep(table, lambda row: int(row["step"]) <= step and float(row["time_s"]) <= time_s)

    def _keep(self, table: CsvTable, is_kept: Callable[[Mapping[str, str]], bool]) -> None:
        try:
            table.keep(is_kept)
        except _DAMAGED as error:
            _LOG.warning("%s can't be cut back, and may have rows twice: %s", table.path, error)

    def samples_written(self) -> int:
        """Returns the samples of all steps in steps.csv; 0 without the file."""
        return sum(self._written(self._steps, lambda row: int(row["samples"])))

    def validations_written(self) -> int:
        """Returns the number of steps with a validation in metrics.csv; 0 without the file."""
        return len({*self._written(self._metrics, lambda row: row["step"] if row["split"] == "val" else "")} - {""})

    def _written(self, table: CsvTable, value: Callable[[Mapping[str, str]], Value]) -> list[Value]:
        try:
            return [value(row) for row in read_rows(table.path)]
        except _DAMAGED as error:
            _LOG.warning("%s can't be read (%s): what it lists is not counted.", table.path, error)
            return []

    def event(self, kind: EventKind, step: int | None = None, **facts: Any) -> None:
        """Adds an event to the record, at the run's latest step by default."""
        step = self.record.steps if step is None else step
        with self._lock:
            facts = hidden_in(facts)
            events = self.record.events
            alike = [event for event in events if event["kind"] == kind]
            if len(alike) < MOST_OF_A_KIND:
                events.append({"kind": kind, "step": step, "time_s": round(self.time_s(), 3), **facts})
            else:
                alike[-1]["left_out"] = alike[-1].get("left_out", 0) + 1
        _LOG.info("event %s at step %d: %s", kind, step, facts)

    def steps(self, rows: Iterable[StepRow]) -> None:
        """Writes finished optimizer steps."""
        if finished := list(rows):
            self._rows.extend(finished)
            self._steps.append(*finished)

    def _take_finished(self) -> None:
        """Writes the steps that are finished. A lost device gives no times; the record is written all the same."""
        try:
            self.steps(self.finished_steps())
        except RuntimeError as error:
            self.finished_steps = tuple
            _LOG.warning("The times of the last steps are lost: %s", first_line(error))

    @property
    def rows(self) -> StepTable:
        """Rows of the latest steps, at most `KEPT_STEPS`."""
        self._take_finished()
        return self._rows

    def metrics(
        self,
        split: str,
        values: Mapping[str, float],
        *,
        step: int,
        epoch: int,
        has_rate: bool = False,
    ) -> None:
        """Writes metrics of a split at a step. Names in ``values`` have no split prefix. ``has_rate``: the rate and the
        time shares of recent steps join the same row of the sink, since each row costs wandb half a millisecond."""
        at, recent = {"step": step, "epoch": epoch}, self.recent(200) if has_rate else None
        figures: dict[tuple[str, str], float | None] = {(split, name): value for name, value in values.items()}
        times: dict[str, float] = {}
        if recent is not None:
            figures["throughput", "samples_per_s"] = recent.samples_per_s
            figures["throughput", "readiness_frac"] = float(recent.ready.mean())
            times = {f"step/{name}": mean_ms for name, mean_ms in recent.means_ms().items()}
        if step == self._resumed_at:  # a killed process may have written these, too
            self._keep(
                self._metrics, lambda row: row["step"] != str(step) or (row["split"], row["name"]) not in figures
            )
        rows = ({"split": of, "name": name, "value": value} for (of, name), value in figures.items())
        in_file = {**at, "time_s": self.time_s()}
        self._metrics.append(*({**in_file, **row} for row in rows))
        self.sink.log({**at, **{f"{of}/{name}": value for (of, name), value in figures.items()}, **times})

    def telemetry(self, samples: Sequence[Sample]) -> None:
        """Writes the samples of one reading to telemetry.csv; they are on disk on return."""
        self._telemetry.append(*samples)

    def publish(self, samples: Sequence[Sample]) -> None:
        """Hands at least one sample to the sink, as one row. May block as long as the sink does."""
        row: dict[str, float | int | None] = {TIME_AXIS: samples[0].time_s}
        for one in samples:
            row.update({curve(one.gpu, name): value for name, value in one.values.items()})
        self.sink.log(row)

    def summary(self) -> StepSummary | None:
        """Returns the figures of the steps so far."""
        return summarise(self.rows)

    def recent(self, number: int) -> StepTable | None:
        """Returns the last steps, up to this number, without warm-up; None without any, or if they took no time."""
        recent = StepTable.of(self.rows).latest(number).steady()
        return None if recent.samples_per_s is None else recent

    def flush(self) -> None:
        """Writes the rows of all tables to disk."""
        self._take_finished()
        for table in (self._steps, self._metrics, self._telemetry):
            table.flush()

    def save(self, *, duration_s: float | None = None) -> None:
        """Writes everything to disk; ``duration_s`` is given for a finished run."""
        self.flush()
        self.record.duration_s = round(self.time_s(), 3) if duration_s is None else duration_s
        try:
            with self._lock:
                self.record.write(self.folder)
        except OSError as error:
            self.disk_full(error)

    def disk_full(self, error: BaseException, step: int | None = None) -> None:
        """Records once in this process that a file of the run could not be written."""
        with self._lock:
            if self._has_failed:
                return
            self._has_failed = True
            self.event("disk_full", step, message=str(error))
        _LOG.warning("%s can't be written: %s. Training goes on; what was written before is kept.", self.folder, error)


def telemetry_line(sample: Sample) -> str:
    """Returns the line of telemetry.csv."""
    return _line((sample.time_s, sample.step, sample.phase, sample.gpu, *map(sample.values.get, TELEMETRY_COLUMNS[4:])))


def step_line(row: StepRow) -> str:
    """Returns the line of steps.csv."""
    return _line((*row[:_READY], row.ready, *row[_READY + 1 :]))


_READY = STEP_COLUMNS.index("ready")


def _line(values: Iterable[Any]) -> str:
    """Returns the line of these `cell` values, most of which are small numbers."""
    return ",".join([f"{each:.6g}" if type(each) is float and -LARGE < each < LARGE else cell(each) for each in values])

"""Writes record, tables and events of a run while it runs, and passes rows to a sink."""

from __future__ import annotations

import csv
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from wellfed.masking import hidden_in
from wellfed.observe.loggers.csv_table import CsvTable, column
from wellfed.observe.loggers.sink import Sink
from wellfed.observe.telemetry.machines import named
from wellfed.observe.telemetry.metrics import COLUMNS as TELEMETRY_COLUMNS
from wellfed.observe.telemetry.metrics import TIME_AXIS, prefix
from wellfed.observe.telemetry.series import Sample
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record import EventKind, RunRecord

_LOG = logging.getLogger(__name__)
_SHARES = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
"""Columns that divide the time of a step."""
STEP_COLUMNS = (
    *("step", "time_s", "epoch", "samples", "micro_batch", "num_micro", *_SHARES, "ready"),
    *("build_ms", "build_cpu_ms", "launch_ms", "slowest_ms", "slowest_index"),
)
METRIC_COLUMNS = ("step", "epoch", "time_s", "split", "name", "value")
MOST_OF_A_KIND = 500
"""Maximum number of events of a kind. The first half and the latest are kept, ``left_out`` counts the rest."""
_LONGEST_FACT = 10_000
"""Maximum number of characters of a text in an event."""
KEPT_STEPS = 100_000
"""Number of latest steps that the final figures cover; steps.csv has all steps."""


class Journal:
    """Record and files of one run. A disk error becomes an event and does not end the run. `event`, `disk_full`,
    `telemetry` and `publish` are safe from any thread, all others only from the training thread."""

    def __init__(self, record: RunRecord, folder: Path, *, sink: Sink | None = None, earlier_s: float = 0.0) -> None:
        """``earlier_s``: seconds of earlier processes of a resumed run, where ``time_s`` starts."""
        self.record, self.folder, self.sink = record, folder, sink or Sink()
        self.origin_s = time.monotonic() - earlier_s
        self.rows: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self._steps = CsvTable(folder / "steps.csv", STEP_COLUMNS, self.disk_full, cells=attrgetter(*STEP_COLUMNS))
        self._metrics = CsvTable(folder / "metrics.csv", METRIC_COLUMNS, self.disk_full)
        # Unbuffered, since the last seconds show why a run was killed.
        self._telemetry = CsvTable(folder / "telemetry.csv", TELEMETRY_COLUMNS, self.disk_full, flush_s=0)
        # Guards the record's events, also while the record is written. Acquire no table's lock inside it.
        self._lock = threading.RLock()

    def time_s(self) -> float:
        """Returns the seconds since the run first started."""
        return time.monotonic() - self.origin_s

    def cut_after(self, step: int) -> None:
        """Drops table rows beyond a step. Training resumes there and writes them again. Also drops telemetry after the
        last save, where a killed run's clock resumes."""
        for table in (self._steps, self._metrics, self._telemetry):
            try:
                damaged = table.cut_after("step", step)
                if table is self._telemetry:
                    damaged += table.cut_after("time_s", self.time_s())
                if damaged:
                    self.event("table_damaged", step=step, file=table.path.name, lines=damaged)
                    _LOG.warning("%s: damaged lines are left out: %d.", table.path, damaged)
            except (OSError, ValueError, csv.Error) as error:
                _LOG.warning("%s could not be cut back to step %d: %s", table.path, step, error)

    def rewind(self, step: int, time_s: float) -> None:
        """Drops steps and metrics after a step, and those written after ``time_s``. Telemetry is kept."""
        while self.rows and self.rows[-1].step > step:
            self.rows.pop()
        for table in (self._steps, self._metrics):
            table.flush()  # otherwise they would be written later
            for column_, last in (("step", step), ("time_s", time_s)):
                try:
                    table.cut_after(column_, last)
                except (OSError, ValueError) as error:
                    _LOG.warning("%s could not be cut back to step %d: %s", table.path, step, error)

    def samples_written(self) -> int:
        """Returns the samples of all steps in steps.csv; 0 without the file."""
        try:
            return int(sum(column(self._steps.path, "samples")))
        except (OSError, ValueError) as error:
            _LOG.warning("%s can't be read (%s): the record counts samples from here on.", self._steps.path, error)
            return 0

    def validations_written(self) -> int:
        """Returns the number of steps with a validation in metrics.csv; 0 without the file."""
        path = self._metrics.path
        if not path.exists():
            return 0
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            return len({row.get("step") for row in csv.DictReader(stream) if row.get("split") == "val"})

    def event(self, kind: EventKind, step: int | None = None, **facts: Any) -> None:
        """Adds an event to the record, at the run's latest step by default."""
        step = self.record.steps if step is None else step
        with self._lock:
            facts = {name: _shortened(fact) for name, fact in hidden_in(facts).items()}
            events = self.record.events
            alike = [index for index, event in enumerate(events) if event["kind"] == kind]
            if len(alike) >= MOST_OF_A_KIND:  # keeps the first half and the latest
                left_out = events.pop(alike[MOST_OF_A_KIND // 2])
                events[alike[MOST_OF_A_KIND // 2 - 1]]["left_out"] = (
                    1 + left_out.get("left_out", 0) + events[alike[MOST_OF_A_KIND // 2 - 1]].get("left_out", 0)
                )
            events.append({"kind": kind, "step": step, "time_s": round(self.time_s(), 3), **facts})
        _LOG.info("event %s at step %d: %s", kind, step, facts)

    def steps(self, rows: Iterable[StepRow]) -> None:
        """Writes finished optimizer steps."""
        finished = list(rows)
        self.rows += finished
        self._steps.append(*finished)

    def metrics(
        self,
        split: str,
        values: Mapping[str, float],
        *,
        step: int,
        epoch: int,
        throughput: Mapping[str, float] | None = None,
    ) -> None:
        """Writes metrics of a split at a step. Names in ``values`` have no split prefix. ``throughput`` and recent time
        shares join the same row of the sink, since each row costs wandb half a millisecond."""
        at = {"step": step, "epoch": epoch}
        figures = [(split, name, value) for name, value in values.items()]
        figures += [("throughput", name, value) for name, value in (throughput or {}).items()]
        in_file = {**at, "time_s": self.time_s()}
        self._metrics.append(*({**in_file, "split": of, "name": name, "value": value} for of, name, value in figures))
        times = self._recent_times() if throughput else {}
        self.sink.log({**at, **{f"{of}/{name}": value for of, name, value in figures}, **times})

    def telemetry(self, samples: Sequence[Sample]) -> None:
        """Writes the samples of one reading to telemetry.csv; they are on disk on return."""
        self._telemetry.append(
            *(
                {"time_s": one.time_s, "step": one.step, "phase": one.phase, "gpu": named(one.gpu), **one.values}
                for one in samples
            )
        )

    def publish(self, samples: Sequence[Sample]) -> None:
        """Passes at least one sample to the sink, as one row. May block as long as the sink does."""
        figures = {f"{prefix(one.gpu)}/{name}": value for one in samples for name, value in one.values.items()}
        self.sink.log({TIME_AXIS: samples[0].time_s, **figures})

    def summary(self) -> StepSummary | None:
        """Returns the figures of the steps so far."""
        return summarise(self.rows)

    def recent_throughput(self) -> dict[str, float]:
        """Returns ``samples_per_s`` and ``readiness_frac`` of the last 200 steps without warm-up; empty without any."""
        rows = self._recent()
        rate = _rate(rows)
        return {} if rate is None else {"samples_per_s": rate, "readiness_frac": fmean(row.ready for row in rows)}

    def _recent_times(self) -> dict[str, float]:
        """Returns ``step/wait_ms`` and so on: means over the same steps as `recent_throughput`."""
        rows = self._recent()
        times = {name: [ms for row in rows if (ms := getattr(row, name)) is not None] for name in _SHARES}
        return {f"step/{name}": fmean(of_steps) for name, of_steps in times.items() if of_steps}

    def _recent(self) -> list[StepRow]:
        return [row for row in islice(reversed(self.rows), 200) if not row.warmup]

    def recent_rate(self) -> float | None:
        """Returns samples/s over the last 50 steps."""
        return _rate(list(islice(reversed(self.rows), 50)))

    def save(self, *, duration_s: float | None = None) -> None:
        """Writes everything to disk; ``duration_s`` is given for a finished run."""
        for table in (self._steps, self._metrics, self._telemetry):
            table.flush()
        self.record.duration_s = round(self.time_s(), 3) if duration_s is None else duration_s
        try:
            with self._lock:
                self.record.write(self.folder)
        except OSError as error:
            self.disk_full(error)

    def disk_full(self, error: BaseException, step: int | None = None) -> None:
        """Records once that a file of the run could not be written."""
        with self._lock:
            if any(event["kind"] == "disk_full" for event in self.record.events):
                return
            self.event("disk_full", step, message=str(error))
        _LOG.warning("%s can't be written: %s. Training goes on; what was written before is kept.", self.folder, error)


def _shortened(fact: Any) -> Any:
    return f"{fact[:_LONGEST_FACT]}..." if isinstance(fact, str) and len(fact) > _LONGEST_FACT else fact


def _rate(rows: Sequence[StepRow]) -> float | None:
    total_ms = sum(row.step_ms for row in rows)
    return 1e3 * sum(row.samples for row in rows) / total_ms if total_ms > 0 else None

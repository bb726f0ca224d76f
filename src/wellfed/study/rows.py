"""Reads the rows of a study: the folder of a trial is its row, by its ``run.json``.

An interrupted study loses at most the trials that were running. The same command again runs what is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar, get_args

from wellfed.explain.diagnosis.run_tables import metric_curves
from wellfed.masking import hidden
from wellfed.record.entries import FILE_NAME, RunRecord, Status
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint
from wellfed.study.trial_end import (
    ERR,
    STDERR_LINES,
    Trial,
    TrialEnd,
    TrialKind,
    TrialMetric,
    last_lines,
    note_end,
    write_end,
)


@dataclass(frozen=True)
class CurvePoint:
    """The metric at one validation."""

    step: int
    """Optimizer steps until then."""
    value: float


def read_curve(folder: Path, metric: str) -> list[CurvePoint]:
    """Returns the metric at each validation, in order; empty where nothing was validated or the file is unreadable."""
    steps, values = metric_curves(folder).get(("val", metric), ((), ()))
    found = {int(step): float(value) for step, value in zip(steps, values, strict=True) if math.isfinite(step)}
    return [CurvePoint(step, value) for step, value in sorted(found.items())]


def reported_metrics(folder: Path) -> list[str]:
    """Returns the names of all metrics of validation."""
    return sorted(name for split, name in metric_curves(folder) if split == "val")


def best_point(curve: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint | None:
    """Returns the last of the best points, as ``best.ckpt`` is; None where no value is finite.

    ``metrics.csv`` has six digits. Values that differ beyond them count as equal.
    """
    finite = [point for point in curve if math.isfinite(point.value)]
    if not finite:
        return None
    return max(finite, key=lambda point: (point.value if higher_is_better else -point.value, point.step))


Outcome = Literal["complete", "pruned", "failed"]
"""complete: trained to its end, with a metric that ranks. pruned: ended early, since others were better by then."""
CONFIRMED = 3
"""Points measured again, the best of them; beside them the baseline of the first."""
CONFIRM_ROUNDS = 3
"""Rounds of these measurements, interleaved so that drift of the machine hits all points alike."""
_KINDS = "|".join(get_args(TrialKind))
_FOLDER = re.compile(rf"(?P<point>\w+)(?:\.(?P<kind>{_KINDS})(?P<attempt>\d+))?")
_Point = TypeVar("_Point")


@dataclass(frozen=True)
class Row:
    """Record of one trial, as ranks and boards use it. Figures are None where they were not measured."""

    point: str
    kind: TrialKind
    overrides: tuple[str, ...]
    """Overrides as typed, those that all points share first."""
    status: Status
    attempt: int = 1
    """Counts the trials of this point and kind, from 1."""
    samples_per_s: float | None = None
    seconds: float = 0.0
    """Duration of the trial, from the start of its process to its end."""
    ci95: tuple[float, float] | None = None
    """95 % interval of samples_per_s, from the steps of this one trial."""
    steps: int = 0
    """Measured steps, without the warm-up."""
    readiness_frac: float | None = None
    ceiling_samples_per_s: float | None = None
    peak_memory_gib: float | None = None
    """Memory reserved by the allocator on CUDA, else the growth of the process."""
    predicted_peak_gib: float | None = None
    util_pct: float | None = None
    """Mean utilisation of the trial's GPUs while it trained; None without NVML."""
    energy_per_sample_j: float | None = None
    """Energy of all its GPUs together; None where one of them was not read for nearly all of training."""
    device: str = ""
    """Description of the device that it trained on."""
    error: Mapping[str, Any] | None = None
    """``kind``, ``message``, ``advice`` as in run.json."""
    exit_code: int | None = None
    """A negative number is the signal that ended the process; None: no trial was started."""
    stderr: tuple[str, ...] = ()
    """The last lines, unless the status is ok."""
    folder: str = ""
    """Trial folder within the study's; empty where no trial was started."""
    started_at: str = ""
    """UTC."""
    ended_at: str = ""
    """UTC, with microseconds."""
    code: str = ""
    """Version of the code, as in the study's file."""
    machine: str = ""
    """Processor and cores of the host; empty where unknown."""
    trial: int | None = None
    """Number of a whole training, from 0; a sampler's trials are numbered by its study. None = a timed trial."""
    outcome: Outcome = "failed"
    """Result of a whole training. ``status`` is that of run.json: a pruned trial ends ``ok``."""
    value: float | None = None
    """The best value of the metric at a validation, that of ``checkpoints/best.ckpt``."""
    value_step: int | None = None
    """Optimizer steps until then; of values that agree in the six digits of ``metrics.csv``, the last."""
    last_value: float | None = None
    """The metric at the last validation."""
    validations: int = 0
    """Validations that gave the metric."""
    trained_steps: int = 0


def row_of(folder: Path, found: RunRecord, metric: TrialMetric | None = None) -> Row:
    """Returns the row of a trial's folder and record; ``metric`` ranks whole trainings."""
    name = _FOLDER.fullmatch(folder.name)
    assert name is not None
    kind: Any = name["kind"] or "trial"
    own = found.trial
    assert own is not None
    rate, memory = found.throughput, found.memory
    low_high = rate["ci95"] if rate else None
    gpus = [] if found.is_on_cpu else found.gpus.values()
    used = [each["util_pct"]["mean"] for each in gpus if each.get("util_pct")]
    spent_j: list[Any] = [each.get("energy_per_sample_j") for each in gpus]
    learned = {} if metric is None else _learned(folder, found, metric)
    return Row(
        point=name["point"],
        kind=kind,
        overrides=tuple(found.overrides),
        status=found.status,
        attempt=int(name["attempt"] or own["attempt"]),
        samples_per_s=rate["samples_per_s"] if rate else None,
        seconds=max(own["seconds"], found.duration_s),  # a resume adds to it
        ci95=(low_high[0], low_high[1]) if low_high else None,
        steps=rate["steps"] if rate else 0,
        readiness_frac=found.readiness_frac,
        ceiling_samples_per_s=found.ceiling["samples_per_s"] if found.ceiling else None,
        peak_memory_gib=memory.get("measured_peak_gib"),
        predicted_peak_gib=memory.get("predicted_peak_gib"),
        util_pct=fmean(used) if used else None,
        energy_per_sample_j=sum(spent_j) if spent_j and None not in spent_j else None,
        device=memory.get("device") or "",
        error=found.error,
        exit_code=found.exit_code,
        stderr=() if found.status == "ok" else tuple(map(hidden, last_lines(folder / ERR, STDERR_LINES))),
        folder="" if found.exit_code is None else folder.name,
        started_at=found.started_at,
        ended_at=own["ended_at"],
        code=own["code"],
        machine=f"{found.machine['cpu']}, {found.machine['cpu_quota_cores']:g} cores" if found.machine else "",
        trial=own["number"],
        **learned,
    )


def _learned(folder: Path, found: RunRecord, metric: TrialMetric) -> dict[str, Any]:
    """Returns the fields of a whole training."""
    curve = read_curve(folder, metric.name)
    best = best_point(curve, higher_is_better=metric.higher_is_better)
    is_pruned = any(event["kind"] == "pruned" for event in found.events)
    last = curve[-1].value if curve else math.nan
    return {
        "outcome": "failed" if found.status != "ok" or best is None else "pruned" if is_pruned else "complete",
        "value": None if best is None else best.value,
        "value_step": None if best is None else best.step,
        "last_value": last if math.isfinite(last) else None,
        "validations": len(curve),
        "trained_steps": found.steps,
    }


@dataclass
class Rows:
    """Rows in the order in which their trials ended."""

    rows: list[Row] = field(default_factory=list)
    unfinished: list[RunRecord] = field(default_factory=list)
    """Records of trials that were running when their command was killed."""

    @cached_property
    def latest(self) -> dict[str, Row]:
        """The trial of each point."""
        return {row.point: row for row in self.rows if row.kind == "trial"}

    @cached_property
    def _by_point(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.point, []).append(row)
        return found

    def confirms(self, point: str, kind: TrialKind = "confirm") -> list[Row]:
        """Returns the rows of this kind that came after the trial of a point and have its code."""
        own = self._by_point.get(point, [])
        last = max((number for number, row in enumerate(own) if row.kind == "trial"), default=len(own))
        return [row for row in own[last + 1 :] if row.kind == kind and row.code == own[last].code]

    def add(self, row: Row) -> None:
        """Adds a row, in place of an earlier attempt of the same trial."""
        self.rows = [each for each in self.rows if _key(each) != _key(row)] + [row]
        for name in ("_by_point", "latest"):
            self.__dict__.pop(name, None)


def _key(row: Row) -> tuple[str, TrialKind, int]:
    return row.point, row.kind, 0 if row.kind == "trial" else row.attempt


def read_rows(folder: Path, metric: TrialMetric | None = None, code: str = "", *, adopts: bool = False) -> Rows:
    """Returns the rows of a study's folder. A record that can't be read counts as none: its trial runs again.

    Args:
        code: version of the code of trials that ended just when their command was killed.
        adopts: writes into the records of these what `write_end` would have written.
    """
    found, adopted = Rows(), list[tuple[Path, RunRecord]]()
    for path in folder.glob(f"*/{FILE_NAME}"):
        if _FOLDER.fullmatch(path.parent.name) is None:  # an earlier attempt
            continue
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            record = RunRecord.read(path.parent)
            has_ended = record.status not in ("running", "killed", "interrupted")
            if record.trial is not None and record.resumed_from is not None and not has_ended:
                record.status, record.error, record.exit_code = "ok", None, 0  # before it was resumed
            if record.trial is not None:
                found.rows.append(row_of(path.parent, record, metric))
            elif not has_ended or not record.started_at:
                found.unfinished.append(record)
            else:
                adopted.append((path.parent, record))
    taken = {row.trial for row in found.rows}
    for own, record in sorted(adopted):
        number = None if metric is None else next(each for each in count() if each not in taken)
        taken.add(number)
        ended = datetime.fromisoformat(record.started_at) + timedelta(seconds=record.duration_s)
        note_end(record, code, 1, number, record.duration_s, ended)
        if adopts:
            record.write(own)
        found.rows.append(row_of(own, record, metric))
    found.rows.sort(key=lambda row: (row.ended_at, row.folder))
    return found


@dataclass
class Kept:
    """The rows of one study in its folder, which no other process writes to."""

    folder: Path
    objective: Objective
    """Ranks the rows."""
    code: str
    """Version of the code that trials run now."""
    retry: Sequence[str] = ()
    """Statuses whose trials are run again."""
    ids: Collection[str] | None = None
    """Points of the grid that is asked for now; None = all points of the folder."""
    metric: TrialMetric | None = None
    """Ranks whole trainings; None = trials are timed."""
    adopted_code: str = ""
    """Version of the code of trials that ended when an earlier command was killed; empty = `code`."""
    group: str = "sweep"
    """Group of knobs that advice names."""
    found: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.found = read_rows(self.folder, self.metric, self.adopted_code or self.code, adopts=True)

    @property
    def latest(self) -> Mapping[str, Row]:
        """The last trial of each point of the study."""
        known = self.found.latest
        return known if self.ids is None else {point: known[point] for point in self.ids if point in known}

    def missing(self, points: Iterable[str]) -> list[str]:
        """Returns the points that still have to be run, in the given order.

        These have no row, were interrupted, were refused before they could run, or have a status that is to be retried.
        """
        latest, again = self.found.latest, self._again
        return [point for point in points if point not in latest or latest[point].status in again]

    @property
    def _again(self) -> set[str]:
        """Statuses whose runs are run again."""
        return {"invalid", "infeasible", "interrupted", *self.retry}

    def known(self, point: str, kind: TrialKind, number: int) -> Row | None:
        """Returns the n-th row of a kind that measures the trial of a point again; None if it is to be run.

        A row with the status ok counts even with ``retry=[ok]``: the trial before it was run again already.
        """
        again = self._again - {"ok"}
        rows = (row for row in self.found.confirms(point, kind) if row.attempt == number and row.status not in again)
        return next(rows, None)

    def best_first(self) -> list[Row]:
        """Returns the latest rows that rank, by their trial alone."""
        found = [(self.objective(row), row) for row in self.latest.values() if row.status == "ok"]
        good = [(self.objective.goodness(figure), row) for figure, row in found if figure is not None]
        return [row for _, row in sorted(good, key=lambda each: -each[0])]

    def best(self) -> Row | None:
        """Returns the row that would be first."""
        return next(iter(self.best_first()), None)

    def to_confirm(self, among: Collection[str], baselines: Mapping[str, str] = {}) -> list[str]:
        """Returns the best and the baseline of the first, in turns; empty where there is nothing to compare.

        Nothing confirms a trial of other code.

        Args:
            among: ids of the points that can be run.
            baselines: as `baselines_of` returns them.
        """
        own = [row.point for row in self.best_first() if row.code == self.code and row.point in among]
        best = own[:CONFIRMED]
        if len(best) < 2:
            return []
        best += [point for point in own[CONFIRMED:] if point == baselines.get(best[0])]
        done = min(sum(row.status not in self._again for row in self.found.confirms(point)) for point in best)
        return [point for number in range(done, CONFIRM_ROUNDS) for point in in_turn(best, number)]

    def begin(self, point: GridPoint, composed: Any, kind: TrialKind = "trial", **how: Any) -> Trial:
        """Returns the next trial of a point and kind; ``composed`` and ``how`` as `Trial` has them."""
        if kind == "trial":
            row = self.found.latest.get(point.id)
            was_begun = (self.folder / point.id).exists() and (row is None or bool(row.folder))
            done = sum(1 for _ in self.folder.glob(f"{point.id}.attempt*")) + was_begun
        else:
            done = max((row.attempt for row in self.found.rows if (row.point, row.kind) == (point.id, kind)), default=0)
        return Trial(point, composed, **{"kind": kind, "attempt": done + 1, **how})

    def end(self, trial: Trial, end: TrialEnd) -> Row:
        """Writes the end of a trial into its folder; returns its row.

        A point that is refused now keeps the row of a trial that is not to be run again.

        Raises:
            OSError: it can't be written.
        """
        is_refused = end.not_started is not None and trial.kind == "trial"
        if not is_refused:
            row = self._row(trial, write_end(trial, end, self.folder, self.code, group=self.group))
        else:
            row = self._row(trial, write_end(trial, end, self.folder, self.code, writes=False))
            last = self.found.latest.get(row.point)
            if last is not None and (last.status, last.error) == (row.status, row.error):
                return last
            if not self.missing([row.point]):
                return row
            row = self._row(trial, write_end(trial, end, self.folder, self.code))
        self.found.add(row)
        return row

    def _row(self, trial: Trial, record: RunRecord) -> Row:
        return row_of(self.folder / trial.folder, record, self.metric)

    def set_aside(self) -> Path:
        """Moves all trials into a folder of their own, and begins anew without rows; returns its path."""
        aside = next(path for number in count(1) if not (path := self.folder / f"before{number}").exists())
        aside.mkdir()
        for path in list(self.folder.glob(f"*/{FILE_NAME}")):
            path.parent.rename(aside / path.parent.name)
        self.found = Rows()
        return aside


def in_turn(points: Sequence[_Point], number: int) -> Sequence[_Point]:
    """Returns the points in the order of a round; every other runs backwards, so none always follows the same one."""
    return points if number % 2 == 0 else points[::-1]

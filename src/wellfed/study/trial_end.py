"""Makes the row of the ledger from what a trial has left in its folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OUT_OF_MEMORY, LESS_HOST_MEMORY, ErrorKind
from wellfed.masking import hidden
from wellfed.record.entries import FILE_NAME, ErrorEntry, RunRecord, Status
from wellfed.record.files import write_atomically
from wellfed.study.learning_curve import best_point, read_curve
from wellfed.study.row import Outcome, Row, TrialMetric

if TYPE_CHECKING:
    from wellfed.study.executors.executor import TrialEnd

OUT, ERR = "stdout.txt", "stderr.txt"
"""Files with what a trial has printed."""
_STDERR_LINES = 20
_LONGEST_LINE = 300
"""Most characters of an error in a cell of a table."""
_NOTE = re.compile(r"\(\d+ frames of libraries are left out: .*\)")
_ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Iteration|Full|Empty|Expired|Fault)\b(: |$)")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILLED = f"Mostly the system's out-of-memory killer: {LESS_HOST_MEMORY} or data."


@dataclass
class RowMaker:
    """Makes the row of a trial that has ended."""

    group: str = "sweep"
    """Group of knobs that advice names."""
    metric: TrialMetric | None = None
    """Ranks whole trainings; None = trials are timed."""

    def __call__(self, row: Row, end: TrialEnd, study: Path) -> Row:
        """Returns the row of an end; ``row`` is what was known before, ``study`` the study's folder."""
        predicted = row.predicted_peak_gib if end.predicted_peak_gib is None else end.predicted_peak_gib
        row = replace(row, host=end.host or row.host, predicted_peak_gib=predicted)
        if end.not_started is not None:
            return replace(refused_row(row, end.not_started, end.message), folder="", seconds=round(end.seconds, 3))
        return self.ended(row, study, end.code, end.seconds, timed_out=end.is_timeout)

    def ended(self, row: Row, study: Path, exit_code: int, seconds: float, *, timed_out: bool = False) -> Row:
        """Returns the row of a trial whose process has ended; completes the trial's record where its end is missing."""
        folder = study / row.folder
        found = record_of(folder)
        status, error = _verdict(found, exit_code, seconds, timed_out, self.group)
        stderr = () if status == "ok" else tuple(map(hidden, last_lines(folder / ERR, _STDERR_LINES)))
        if error is not None and not error["message"]:
            own, named = _error_lines(stderr)
            last = (named or own or [""])[-1].strip().removeprefix("- ")
            error = {**error, "message": last or f"ended with exit code {exit_code}"}
        if found is not None and (found.status, found.exit_code) != (status, exit_code):
            path = folder / FILE_NAME  # the process could not write its own end
            with contextlib.suppress(OSError, ValueError):
                entries = json.loads(path.read_text(encoding="utf-8"))
                entries.update(status=status, error=error, exit_code=exit_code)
                write_atomically(path, json.dumps(entries, indent=1) + "\n")
        ended = replace(row, status=status, exit_code=exit_code, seconds=round(seconds, 3), error=error, stderr=stderr)
        return ended if found is None else _with_curve(with_figures(ended, found), folder, found, self.metric)


def _with_curve(row: Row, folder: Path, found: RunRecord, metric: TrialMetric | None) -> Row:
    """Returns the row of a whole training with what it has learned."""
    if metric is None:
        return row
    curve = read_curve(folder, metric.name)
    best = best_point(curve, higher_is_better=metric.higher_is_better)
    is_pruned = any(event["kind"] == "pruned" for event in found.events)
    outcome: Outcome = "failed" if row.status != "ok" or best is None else "pruned" if is_pruned else "complete"
    last = curve[-1].value if curve else math.nan
    return replace(
        row,
        outcome=outcome,
        value=None if best is None else best.value,
        value_step=None if best is None else best.step,
        last_value=last if math.isfinite(last) else None,
        validations=len(curve),
        trained_steps=found.steps,
    )


def with_figures(row: Row, found: RunRecord) -> Row:
    """Returns the row with what a run record has measured."""
    throughput, memory = found.throughput, found.memory
    low_high = throughput["ci95"] if throughput else None
    gpus = [] if found.is_on_cpu else found.gpus.values()
    used = [each["util_pct"]["mean"] for each in gpus if each.get("util_pct")]
    spent_j: list[Any] = [each.get("energy_per_sample_j") for each in gpus]
    return replace(
        row,
        samples_per_s=throughput["samples_per_s"] if throughput else None,
        ci95=(low_high[0], low_high[1]) if low_high else None,
        steps=throughput["steps"] if throughput else 0,
        warmup_steps=throughput["warmup_steps"] if throughput else 0,
        readiness_frac=found.readiness_frac,
        ceiling_samples_per_s=found.ceiling["samples_per_s"] if found.ceiling else None,
        peak_memory_gib=memory.get("measured_peak_gib"),
        predicted_peak_gib=memory.get("predicted_peak_gib") or row.predicted_peak_gib,
        util_pct=fmean(used) if used else None,
        energy_per_sample_j=sum(spent_j) if spent_j and None not in spent_j else None,
        device=memory.get("device") or row.device,
        started_at=found.started_at,
        host=found.host_name or row.host,
        machine=f"{found.machine['cpu']}, {found.machine['cpu_quota_cores']:g} cores" if found.machine else "",
    )


def recorded_row(row: Row, study: Path, metric: TrialMetric | None = None) -> Row | None:
    """Returns the row of a trial that has ended and is not in the ledger; None if it left no complete record.

    The study was killed just then, or another launcher ran the trial.
    """
    if (found := complete_record(study / row.folder)) is None:
        return None
    is_timeout = found.status == "timeout"
    return RowMaker(metric=metric).ended(row, study, found.exit_code or 0, found.duration_s, timed_out=is_timeout)


def _recorded_end(found: RunRecord) -> tuple[Status, ErrorEntry | None]:
    """Returns the end by a finished record; a configuration refused before the first batch is invalid, not failed."""
    error = found.error
    is_refused = found.exit_code == EXIT_NOTHING_RUN and error is not None and error["kind"] == "config"
    return "invalid" if is_refused else found.status, error


def record_of(folder: Path) -> RunRecord | None:
    """Returns the record of a trial; None where it left none that can be read."""
    try:
        return RunRecord.read(folder)
    except (OSError, ValueError):
        return None


def complete_record(folder: Path) -> RunRecord | None:
    """Returns the record of a trial that has written its own end; None otherwise."""
    found = record_of(folder)
    return None if found is None or found.status in ("running", "killed", "interrupted") else found


def _verdict(
    found: RunRecord | None, exit_code: int, seconds: float, timed_out: bool, group: str
) -> tuple[Status, ErrorEntry | None]:
    if timed_out:
        advice = f"Raise {group}.timeout_s if it is only slow, with {group}.retry=[timeout]."
        return "timeout", _error("code", f"had not ended after {seconds:.0f} s", advice)
    if exit_code < 0:
        number = -exit_code
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        if number in _FROM_OUTSIDE:
            return "killed", _error("host_oom" if name == "SIGKILL" else "code", f"ended by {name}", _KILLED)
        return "failed", _error("code", f"crashed: {name}", "Native code of the model, the data or a driver.")
    if found is not None and found.status not in ("running", "killed"):
        return _recorded_end(found)
    if exit_code == EXIT_NOTHING_RUN:
        return "invalid", _error("config")
    if exit_code == EXIT_OUT_OF_MEMORY:
        return "oom", _error("device_oom")
    return "failed", _error("code")


def _error(kind: ErrorKind, message: str = "", advice: str = "") -> ErrorEntry:
    return {"kind": kind, "message": hidden(message), "advice": hidden(advice)}


def why_of(error: Mapping[str, Any], folder: str) -> str:
    """Returns why a trial has no rank, for one cell of a table: the error's own line, its advice, its log.

    Args:
        folder: the trial's folder; empty where none was started.
    """
    texts = [message_of(error), _in_one_line(str(error.get("advice") or ""))]
    return " ".join([*filter(None, texts), *([f"Log: {folder}/{ERR}"] if folder else [])])


def message_of(error: Mapping[str, Any]) -> str:
    """Returns the message of a row's error in one line of bounded length; of a traceback the line with the error."""
    own, named = _error_lines(str(error.get("message") or "").splitlines())
    return _in_one_line(named[-1] if named else " ".join(own))


def _error_lines(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the lines of a program's own, and those of them that name an error."""
    own = [line for line in lines if not _NOTE.fullmatch(line.strip())]
    return own, [line for line in own if _ERROR_LINE.match(line)]


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def refused_row(row: Row, status: Status, message: str) -> Row:
    """Returns the row of a point that was not started."""
    kind: ErrorKind = "data" if status == "failed" else "config"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(row, status=status, error=_error(kind, message), started_at=now)


def last_lines(path: Path, number: int) -> list[str]:
    """Returns the last lines of a file that are not blank; empty where it can't be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-number:]

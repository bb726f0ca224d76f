"""Writes the end of a trial into its ``run.json``, by what its process has left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OUT_OF_MEMORY, LESS_HOST_MEMORY, ErrorKind
from wellfed.masking import hidden, masked_override
from wellfed.record.entries import ErrorEntry, RunRecord, Status
from wellfed.run.folder.lock import only_one
from wellfed.study.points.grid import GridPoint

TrialKind = Literal["trial", "confirm", "repeat", "before", "after"]
"""``confirm``: one of the best, measured again in turns. ``repeat``: measured again by tune to learn the noise.
``before``, ``after``: start and result of a tune, in turns; both lie beside the result's trial."""


@dataclass(frozen=True)
class TrialMetric:
    """Metric of validation that ranks whole trainings."""

    name: str
    """Without ``val/``."""
    mode: Literal["max", "min"]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return self.mode == "max"


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    point: GridPoint
    composed: Composed[RunConfig]
    """Configuration. The executor sets its ``run_dir``."""
    kind: TrialKind = "trial"
    attempt: int = 1
    """Counts the trials of this point and kind, from 1."""
    number: int | None = None
    """Number of a whole training, from 0. None = a timed trial, planned first."""
    may_be_pruned: bool = False
    """The executor calls ``prune`` after each validation of this trial."""
    beside: str = ""
    """Id of the point beside whose trial its folder lies; empty = its own point's."""

    @property
    def folder(self) -> str:
        """Name of its folder within the study's, which no other trial has."""
        own = self.beside or self.point.id
        return own if self.kind == "trial" else f"{own}.{self.kind}{self.attempt}"


@dataclass(frozen=True)
class TrialEnd:
    """How a trial has ended, or why it was not started."""

    code: int = 0
    """Exit code of its process; negative: the signal that ended it."""
    seconds: float = 0.0
    """Duration of the whole trial, from the start of its process."""
    is_timeout: bool = False
    """The executor ended it at the time limit."""
    not_started: Status | None = None
    """Status of a trial that was not started; ``interrupted``: another process uses its folder."""
    message: str = ""
    """Why it was not started."""
    predicted_peak_gib: float | None = None


OUT, ERR = "stdout.txt", "stderr.txt"
"""Files with what a trial has printed."""
STDERR_LINES = 20
_LONGEST_LINE = 300
"""Most characters of an error in a cell of a table."""
_NOTE = re.compile(r"\(\d+ frames of libraries are left out: .*\)")
_ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Iteration|Full|Empty|Expired|Fault)\b(: |$)")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILLED = f"Mostly the system's out-of-memory killer: {LESS_HOST_MEMORY} or data."


def note_end(record: RunRecord, code: str, attempt: int, number: int | None, seconds: float, ended: datetime) -> None:
    """Sets what a study notes in the record of a trial that has ended."""
    ended_at = ended.isoformat(timespec="microseconds")
    record.trial = {
        "code": code,
        "attempt": attempt,
        "number": number,
        "seconds": round(seconds, 3),
        "ended_at": ended_at,
    }


def write_end(
    trial: Trial, end: TrialEnd, study: Path, code: str, *, group: str = "sweep", writes: bool = True
) -> RunRecord:
    """Completes and returns the record of a trial that has ended; one that left none, or was refused, gets a small one.

    Args:
        study: folder of the study.
        code: version of the code.
        group: group of knobs that advice names.
        writes: whether the record is written, too.

    Raises:
        OSError: it can't be written.
    """
    folder = study / trial.folder
    record = _ended_record(trial, end, folder, group) if end.not_started is None else _refused_record(trial, end)
    note_end(record, code, trial.attempt, trial.number, end.seconds, datetime.now(UTC))
    if writes and end.not_started != "interrupted":
        if end.not_started is not None:
            open_trial_folder(folder)
        record.write(folder)
    return record


def _refused_record(trial: Trial, end: TrialEnd) -> RunRecord:
    assert end.not_started is not None
    record = _small_record(trial)
    record.status = end.not_started
    record.error = _error("data" if end.not_started == "failed" else "config", end.message)
    if end.predicted_peak_gib is not None:
        record.memory = {"predicted_peak_gib": end.predicted_peak_gib}
    return record


def _small_record(trial: Trial) -> RunRecord:
    overrides = [*map(masked_override, trial.point.overrides)]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunRecord(trial.folder, started_at=now, host_name=socket.gethostname(), overrides=overrides)


def _ended_record(trial: Trial, end: TrialEnd, folder: Path, group: str) -> RunRecord:
    found = record_of(folder)
    status, error = _verdict(found, end, group)
    if error is not None and not error["message"]:
        own, named = _error_lines(list(map(hidden, last_lines(folder / ERR, STDERR_LINES))))
        last = (named or own or [""])[-1].strip().removeprefix("- ")
        error = {**error, "message": last or end.message or f"ended with exit code {end.code}"}
    record = found or _small_record(trial)
    record.status, record.error, record.exit_code = status, error, end.code
    if record.memory.get("predicted_peak_gib") is None and end.predicted_peak_gib is not None:
        record.memory["predicted_peak_gib"] = end.predicted_peak_gib
    return record


def open_trial_folder(folder: Path) -> None:
    """Makes the folder of a trial. One of an earlier attempt is kept beside it, once no other process writes to it.

    Raises:
        ConfigError: another process writes to it, such as a run that was resumed there.
    """
    if folder.exists():
        with only_one(folder):
            found = record_of(folder)
            if found is not None and found.exit_code is None and found.trial is not None:
                shutil.rmtree(folder)  # it was refused
            else:
                asides = (folder.with_name(f"{folder.name}.attempt{number}") for number in count(1))
                folder.rename(next(aside for aside in asides if not aside.exists()))
    folder.mkdir()


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


def _verdict(found: RunRecord | None, end: TrialEnd, group: str) -> tuple[Status, ErrorEntry | None]:
    exit_code = end.code
    if end.is_timeout:
        advice = f"Raise {group}.timeout_s if it is only slow, with {group}.retry=[timeout]."
        return "timeout", _error("code", f"had not ended after {end.seconds:.0f} s", advice)
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


def last_lines(path: Path, number: int) -> list[str]:
    """Returns the last lines of a file that are not blank; empty where it can't be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-number:]

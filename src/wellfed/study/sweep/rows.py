"""Makes the row of the ledger from what a trial has left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from wellfed import record
from wellfed.errors import EXIT_NOTHING_RUN, EXIT_OUT_OF_MEMORY, LESS_HOST_MEMORY, ErrorKind
from wellfed.masking import hidden
from wellfed.record import EngineState, ErrorEntry, GitState, RunRecord, Status, engine_version
from wellfed.study.sweep.ledger import Row

R = TypeVar("R", bound=Row)

OUT, ERR = "stdout.txt", "stderr.txt"
"""What a trial has printed."""
_STDERR_LINES = 20
_LONGEST_LINE = 300
"""Characters of an error in a cell of a table."""
_NOTE = re.compile(r"\(\d+ frames of libraries are left out: .*\)")
_ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Iteration|Full|Empty|Expired|Fault)\b(: |$)")
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILLED = f"Mostly the system's out-of-memory killer: {LESS_HOST_MEMORY} or data."


def ended_row(row: R, sweep: Path, exit_code: int, seconds: float, *, timed_out: bool, group: str = "sweep") -> R:
    """The row of a trial whose process has ended, made of what was known before; what its record lacks of its end is
    written there too. ``group`` has the knobs that advice names."""
    folder = sweep / row.folder
    found = _read(folder)
    status, error = _verdict(found, exit_code, seconds, timed_out, group)
    stderr = () if status == "ok" else tuple(map(hidden, last_lines(folder / ERR, _STDERR_LINES)))
    if error is not None and not error["message"]:
        error = {**error, "message": _last_own_line(stderr) or f"ended with exit code {exit_code}"}
    if found is not None and (found.status, found.exit_code) != (status, exit_code):
        path = folder / record.FILE_NAME  # the process could not write its own end
        with contextlib.suppress(OSError, ValueError):
            entries = json.loads(path.read_text(encoding="utf-8"))
            entries.update(status=status, error=error, exit_code=exit_code)
            record.write_atomically(path, json.dumps(entries, indent=1) + "\n")
    ended = replace(row, status=status, exit_code=exit_code, seconds=round(seconds, 3), error=error, stderr=stderr)
    return ended if found is None else with_figures(ended, found)


def with_figures(row: R, found: RunRecord) -> R:
    """The row with what a run record has measured."""
    throughput, memory = found.throughput, found.memory
    low_high = throughput["ci95"] if throughput else None
    gpus = found.gpus.values()
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
    )


def recorded_row(row: R, sweep: Path) -> R | None:
    """The row of a trial that has ended and is not in the ledger: the sweep was killed just then, or another launcher
    ran it. None if it left no complete record."""
    found = _read(sweep / row.folder)
    if found is None or found.status in ("running", "killed", "interrupted"):
        return None
    status, error = _as_told(found)
    ended = replace(
        row,
        status=status,
        error=error,
        exit_code=found.exit_code,
        seconds=found.duration_s,
        stderr=() if status == "ok" else tuple(last_lines(sweep / row.folder / ERR, _STDERR_LINES)),
        overrides=tuple(found.overrides),
        code=code_version(found.git, found.engine),
    )
    return with_figures(ended, found)


def _as_told(found: RunRecord) -> tuple[Status, ErrorEntry | None]:
    """What a finished record says; a configuration that was refused before the first batch is no failure."""
    error = found.error
    is_refused = found.exit_code == EXIT_NOTHING_RUN and error is not None and error["kind"] == "config"
    return "invalid" if is_refused else found.status, error


def code_version(git: GitState | None, engine: EngineState | None) -> str:
    """Returns the project's commit, with a digest of what was changed since.

    The engine's version follows if it is not part of the project's checkout. Without a checkout it stands alone.
    """
    if git is None:
        return engine_version(engine)
    own = "" if engine is None or engine["within_project"] else f", {engine_version(engine)}"
    # Records of earlier versions have no digest.
    digest = git.get("digest") or (hashlib.sha256(git["diff"].encode()).hexdigest() if git["diff"].strip() else "")
    return f"{git['commit'][:10]}{'+' if digest else ''}{digest[:6]}{own}"


def _read(folder: Path) -> RunRecord | None:
    try:
        return RunRecord.read(folder)
    except (OSError, ValueError):
        return None


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
            return "killed", _error("host_oom" if number == signal.SIGKILL else "code", f"ended by {name}", _KILLED)
        return "failed", _error("code", f"crashed: {name}", "Native code of the model, the data or a driver.")
    if found is not None and found.status not in ("running", "killed"):
        return _as_told(found)
    if exit_code == EXIT_NOTHING_RUN:
        return "invalid", _error("config")
    if exit_code == EXIT_OUT_OF_MEMORY:
        return "oom", _error("device_oom")
    return "failed", _error("code")


def _error(kind: ErrorKind, message: str = "", advice: str = "") -> ErrorEntry:
    return {"kind": kind, "message": hidden(message), "advice": hidden(advice)}


def why_of(error: Mapping[str, Any], folder: str) -> str:
    """Why a trial has no rank, for one cell of a table: the error's own line, its advice, and where its log is.

    Args:
        folder: of the trial; empty where none was started.
    """
    parts = [message_of(error), _in_one_line(str(error.get("advice") or ""))]
    return " ".join([*filter(None, parts), *([f"Log: {folder}/{ERR}"] if folder else [])])


def message_of(error: Mapping[str, Any]) -> str:
    """The message of a row's error in one line of bounded length: of a traceback the line that names the error."""
    lines = str(error.get("message") or "").splitlines()
    own = [line for line in lines if not _NOTE.fullmatch(line.strip())]
    named = [line for line in own if _ERROR_LINE.match(line)]
    return _in_one_line(named[-1] if named else " ".join(own))


def _in_one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def _last_own_line(lines: Sequence[str]) -> str:
    """The line of printed text that says what was wrong: the last that names an error, else the last."""
    own = [line for line in lines if not _NOTE.fullmatch(line.strip())]
    named = [line for line in own if _ERROR_LINE.match(line)]
    return (named or own or [""])[-1].strip().removeprefix("- ")


def refused_row(row: R, status: Status, message: str) -> R:
    """The row of a point that was not started."""
    kind: ErrorKind = "data" if status == "failed" else "config"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(row, status=status, error=_error(kind, message), started_at=now)


def started_at(folder: Path) -> str | None:
    """When the run of a folder began, UTC; None where it has no record."""
    found = _read(folder)
    return None if found is None else found.started_at


def last_lines(path: Path, number: int) -> list[str]:
    """The last lines of a text that hold something; none where it can't be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-number:]

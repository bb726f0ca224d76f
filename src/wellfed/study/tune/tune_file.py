"""Writes and reads ``tune.json``: what a tune was asked and what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from wellfed.record import plain, write_atomically
from wellfed.study.points.guided.gain import TuneGain
from wellfed.study.points.guided.tune_search import TuneSearch
from wellfed.study.points.guided.tune_steps import Step

FILE_NAME = "tune.json"
SCHEMA = 1


@dataclass(frozen=True)
class TurnsMeasured:
    """Start and result, measured in turns."""

    before: Sequence[float | None]
    """Figures of the start, one a round; None where it did not end well."""
    after: Sequence[float | None]
    gain: TuneGain | None
    seconds: float
    """Duration of all these trials."""
    problem: str | None = None
    """The first failure, in one line."""

    @property
    def result_holds(self) -> bool:
        """Whether the result ran in every round and is not worse beyond noise; else the start stays."""
        return None not in self.after and self.gain is not None and not self.gain.is_loss


@dataclass(frozen=True)
class TuneFile:
    """State of a tune."""

    name: str
    workload: str
    sample_unit: str
    start: tuple[str, ...]
    """Overrides as typed, with secrets as ``***``."""
    objective: str
    trial_steps: int
    code: str
    """Version of the code, as in the ledger."""
    machine: str
    flags: tuple[str, ...] = ()
    """Flags of the command line that set where configurations are searched."""
    status: Literal["running", "done", "stopped"] = "running"
    """``running`` without a process: it was killed, and the same command goes on."""
    ended_because: str | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    """Steps in order, the start first."""
    trial_seconds: float = 0.0
    """Duration of these trials together."""
    result: tuple[str, ...] = ()
    """Overrides behind those of the start; empty for the start itself."""
    comparison: TurnsMeasured | None = None
    """None where the start is the result, or the tune has not come to it."""
    advice: Sequence[Mapping[str, Any]] = ()
    written: tuple[str, ...] = ()
    """Option files."""
    use: tuple[str, ...] = ()
    """Overrides of the recommended command."""
    unproven: tuple[str, ...] = ()
    """Overrides that run the result, where its gain is within noise and the start is recommended."""

    def write(self, folder: Path) -> None:
        """Replaces the file as a whole."""
        write_atomically(folder / FILE_NAME, json.dumps(plain({"schema": SCHEMA, **asdict(self)}), indent=1) + "\n")

    def differs_from(self, earlier: Mapping[str, Any]) -> list[str]:
        """Returns what differs from an earlier tune in the folder; empty where its figures can be used."""
        told = {"code": "the version of the code", "machine": "the machine", "trial_steps": "sweep.trial_steps"}
        return [
            f"{words} ({earlier.get(name)} -> {getattr(self, name)})"
            for name, words in told.items()
            if earlier.get(name) != getattr(self, name)
        ]


def read(folder: Path) -> dict[str, Any] | None:
    """Returns the content of the file; None where it can't be read."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None


def beside_of(found: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    """Returns the preparation seconds of each trial of an earlier tune, by its overrides."""
    return {tuple(step["overrides"]): float(step.get("beside_seconds", 0.0)) for step in found["steps"]}


def steps_of(search: TuneSearch) -> list[dict[str, Any]]:
    """Returns the steps as `TuneFile.steps` has them."""
    return [_of_step(step) for step in search.steps]


def _of_step(step: Step) -> dict[str, Any]:
    change, trial = step.change, step.trial
    return {
        "turned": list(change.turned),
        "overrides": list(change.overrides),
        "because": change.because,
        "finding": change.finding,
        "status": trial.status,
        "before": step.before,
        "after": trial.figure,
        "ci95": trial.ci95,
        "gain": step.gain,
        "is_kept": step.is_kept,
        "why": step.why,
        "seconds": trial.seconds,
        "beside_seconds": round(trial.beside_seconds, 3),
    }

"""Runs one planted fault the way a user would meet it, and checks what the run says about itself afterwards."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.commands import ROOT, Done, environment, run
from wellfed.record.entries import RunRecord

STEPS = 24
"""Three epochs of eight."""
YAML = """
name: planted
effective_batch_size: 8
model: {_target_: planted.Classifier}
data: {_target_: planted.datasets}
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
"""
SHORT = ("trainer.max_epochs=3", "logger=none", "telemetry=none", "loader.backend=inline")
FIXED = (
    "workload=planted",
    "+callbacks.watch._target_=planted.Watch",
    *SHORT,
)
TIMEOUT_S = 150


@dataclass
class Case:
    """The result of a planted fault."""

    kind: str
    code: int | None = None
    status: str = ""
    lost: str = ""
    """Steps that were done and are in no checkpoint that loads, and whether a message said so."""
    faults: list[str] = field(default_factory=list)
    """Claims and actions of the run that are wrong; empty = survived."""
    message: str = ""
    """Last line of the command's stderr."""


@dataclass
class Box:
    """A user's folder with a training in it."""

    folder: Path
    workload: str = "planted"
    done: Done | None = None
    """The latest command."""

    def __post_init__(self) -> None:
        (self.folder / "conf" / "workload").mkdir(parents=True, exist_ok=True)
        (self.folder / "conf" / "workload" / "planted.yaml").write_text(YAML)
        (self.folder / "planted.py").write_text(Path(__file__).with_name("planted.py").read_text())

    def train(self, *overrides: str, plant: str = "", around: str = "", is_resumed: bool = False, **more: str) -> Done:
        """Runs ``python src/train.py`` on the planted training.

        Args:
            plant: `planted.planted` reads it.
            around: a shell line with the command as ``"$@"``: mounts, limits, traps.
            is_resumed: the settings are those of the run that is resumed.
        """
        words = (*_fixed(overrides, is_resumed=is_resumed), *overrides)
        return self.script("train.py", *words, around=around, PLANTED=plant, **more)

    def script(self, name: str, *words: str, around: str = "", **more: str) -> Done:
        """Runs a script of ``src/`` that finds the planted training."""
        given = {"PYTHONPATH": str(self.folder), "PLANTED": "", "PLANTED_FOLDER": str(self.folder), **more}
        words = ("--config-dir", str(self.folder / "conf"), *words)
        if around:
            command = ["bash", "-c", around, "bash", sys.executable, str(ROOT / "src" / name), *words]
            self.done = self._run(command, **given)
        else:
            self.done = run(name, *words, cwd=self.folder, timeout_s=TIMEOUT_S, **given)
        return self.done

    def _run(self, command: list[str], **variables: str) -> Done:
        process = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(**variables),
            text=True,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Done(process.returncode, process.stdout, process.stderr)

    @property
    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted((self.folder / "logs" / self.workload / "runs").glob("*"))

    @property
    def run(self) -> Path:
        """The newest run folder."""
        return self.runs[-1]

    @property
    def record(self) -> Mapping[str, Any]:
        """The record of the newest run."""
        found: Mapping[str, Any] = json.loads((self.run / "run.json").read_text())
        return found

    @property
    def last(self) -> Path:
        """The latest checkpoint of the newest run."""
        return self.run / "checkpoints" / "last.ckpt"


def _fixed(overrides: tuple[str, ...], *, is_resumed: bool) -> tuple[str, ...]:
    """Returns the overrides of `FIXED` that no other override replaces."""
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    wanted = FIXED[:3] if is_resumed else FIXED
    return tuple(text for text in wanted if text.lstrip("+").partition("=")[0] not in named)


def step_of(checkpoint: Path) -> int | None:
    """Returns the step of a checkpoint that loads weights-only, else None."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"])
    except Exception:  # noqa: BLE001 - whatever a damaged file raises
        return None


def kept(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints of a run folder that load, rising."""
    found = (path for path in (folder / "checkpoints").glob("*.ckpt") if path.is_file())
    return sorted(step for step in map(step_of, found) if step is not None)


def steps_done(folder: Path) -> int:
    """Returns the last step in the table and the record."""
    try:
        recorded = int(json.loads((folder / "run.json").read_text())["steps"])
    except (OSError, ValueError, KeyError):
        recorded = 0
    try:
        rows = (folder / "steps.csv").read_text(errors="replace").splitlines()[1:]
        return max([recorded, *(int(row.partition(",")[0]) for row in rows if row.partition(",")[0].isdigit())])
    except OSError:
        return recorded


@dataclass(frozen=True)
class Expected:
    """Correct results of a fault. If several are listed, any of them is right."""

    codes: tuple[int, ...] = (1,)
    statuses: tuple[str, ...] = ("failed",)
    """Status of the newest run's record; ``""`` = the record can't be read; no entry = there must be no run folder."""
    says: str = ""
    """Pattern that the command's output must match."""
    resumes: bool = True
    """Whether ``resume=auto`` must complete the training once the fault is gone."""
    keeps: int = 0
    """Step that a checkpoint on the disk must have reached."""


def judge(box: Box, kind: str, expected: Expected) -> Case:
    """Compares the output of the latest command with the files on the disk."""
    done = box.done
    assert done is not None
    case = Case(kind, code=done.code, message=_last_line(done))
    if done.code not in expected.codes:
        case.faults.append(f"exit code {done.code}, expected {' or '.join(map(str, expected.codes))}")
    if re.search(r'File "[^"]*(/src/wellfed/|/site-packages/)', done.text):
        case.faults.append("a traceback through code that is not the user's")
    if expected.says and not re.search(expected.says, done.text, re.DOTALL):
        case.faults.append(f"does not say {expected.says!r}")
    if not expected.statuses:
        if box.runs:
            case.faults.append("left a run folder")
        return case
    if not box.runs:
        case.faults.append("left no run folder")
        return case
    try:
        case.status = shown_status(box)
    except (OSError, ValueError) as error:
        if "" not in expected.statuses:
            case.faults.append(f"run.json can't be read: {error}")
        return case
    if case.status not in expected.statuses:
        case.faults.append(f"status {case.status}, expected {' or '.join(expected.statuses)}")
    _check_claims(box, case, done, expected.keeps)
    if expected.resumes and case.status != "ok":
        _resume(box, case)
    return case


def shown_status(box: Box) -> str:
    """Returns the status that the project's readers show: a dead process is killed, whatever its file says."""
    return RunRecord.read(box.run).status


def _check_claims(box: Box, case: Case, done: Done, keeps: int) -> None:
    took, holds = steps_done(box.run), kept(box.run)
    lost = took - max(holds, default=0)
    said = re.search(r"last saved step (\d+) of (\d+)", done.text)
    case.lost = "nothing" if lost <= 0 else f"{lost} of {took} steps" + (", said" if said else "")
    if max(holds, default=0) < keeps:
        case.faults.append(f"step {keeps} was saved, and the checkpoints that load are of {holds}")
    if case.status == "ok" and lost > 0:
        case.faults.append(f"ok, and the weights of step {took} are nowhere (checkpoints: {holds})")
    if said and int(said[1]) not in (holds or [0]):
        case.faults.append(f"says last saved step {said[1]}, and the checkpoints that load are of {holds}")
    if lost > 0 and not said and case.status != "killed":
        case.faults.append(f"{lost} steps are lost, and no line says what was saved last")
    if doubled := _doubled_rows(box.run):
        case.faults.append(f"steps.csv has rows twice: {doubled[:5]}")
    if not holds and re.search(r"resume=auto goes on from", done.text):
        case.faults.append("says resume=auto goes on, and there is no checkpoint")


def _resume(box: Box, case: Case) -> None:
    before, holds = box.runs, kept(box.run)
    again = box.train("resume=auto", is_resumed=bool(holds))
    if again.code != 0:
        case.faults.append(f"resume=auto: exit code {again.code}: {_last_line(again)}")
        return
    began = [run for run in box.runs if run not in before]
    if holds and began:
        case.faults.append("resume=auto began another run though there is a checkpoint")
        return
    run = began[0] if began else before[-1]
    record = json.loads((run / "run.json").read_text())
    if record["status"] != "ok" or record["steps"] != STEPS:
        case.faults.append(f"resumed: status {record['status']}, {record['steps']} of {STEPS} steps")
    elif max(kept(run), default=0) != STEPS:
        case.faults.append("resumed: the last weights are not on the disk")
    elif doubled := _doubled_rows(run):
        case.faults.append(f"resumed: steps.csv has rows twice: {doubled[:5]}")


def _doubled_rows(run: Path) -> list[str]:
    """Returns the steps that steps.csv has more than once."""
    try:
        lines = (run / "steps.csv").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    count = Counter(line.partition(",")[0] for line in lines)
    return [step for step, times in count.items() if times > 1 and step.isdigit()]


def _last_line(done: Done) -> str:
    lines = [line.strip() for line in done.err.splitlines() if line.strip()] or done.out.strip().splitlines()
    return lines[-1][:160] if lines else ""

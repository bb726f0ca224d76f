"""Runs one planted fault the way a user would meet it, and checks what the run says about itself afterwards."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.commands import ROOT, Done, environment, run
from wellfed.record import RunRecord

STEPS = 24
"""Three epochs of eight."""
YAML = """
name: planted
effective_batch_size: 8
model: {_target_: planted.Classifier}
data: {_target_: planted.datasets}
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
"""
FIXED = (
    *("config.allow_targets=[planted,torch]", "workload=planted", "trainer.max_epochs=3", "logger=none"),
    *("telemetry=none", "loader.backend=inline", "+callbacks.watch._target_=planted.Watch"),
)
TIMEOUT_S = 150


@dataclass
class Case:
    """What became of a planted fault."""

    kind: str
    seconds: float = 0.0
    code: int | None = None
    status: str = ""
    lost: str = ""
    """Steps that were done and are in no checkpoint that loads, and whether that was claimed."""
    faults: list[str] = field(default_factory=list)
    """What the run said or did that it may not; empty = survived."""
    message: str = ""
    """Its last word."""
    skipped: str = ""
    """Why it was not tried on this machine."""


@dataclass
class Box:
    """A user's folder with the planted training in it."""

    folder: Path
    done: Done | None = None
    """The latest command."""

    def __post_init__(self) -> None:
        (self.folder / "conf" / "workload").mkdir(parents=True, exist_ok=True)
        (self.folder / "conf" / "workload" / "planted.yaml").write_text(YAML)
        (self.folder / "planted.py").write_text(Path(__file__).with_name("planted.py").read_text())

    def train(
        self,
        *overrides: str,
        plant: str = "",
        around: str = "",
        is_resumed: bool = False,
        timeout_s: float = TIMEOUT_S,
        **more: str,
    ) -> Done:
        """``python src/train.py`` on the planted training.

        Args:
            plant: what `planted.planted` reads.
            around: a shell line that ends in the command, which stands for ``"$@"`` in it: mounts, limits, traps.
            is_resumed: the settings are those of the run that is resumed.
        """
        given = {
            "PYTHONPATH": str(self.folder),
            "PLANTED": plant,
            "PLANTED_FOLDER": str(self.folder),
            **more,
        }
        words = ("--config-dir", str(self.folder / "conf"), *_fixed(overrides, is_resumed=is_resumed), *overrides)
        if around:
            command = [sys.executable, str(ROOT / "src" / "train.py"), *words]
            shell = ["bash", "-c", around, "bash", *command]
            process = subprocess.run(
                shell, cwd=self.folder, env=environment(**given), text=True, capture_output=True, timeout=timeout_s
            )
            self.done = Done(process.returncode, process.stdout, process.stderr)
        else:
            self.done = run("train.py", *words, cwd=self.folder, timeout_s=timeout_s, **given)
        return self.done

    def command(self, *words: str) -> Done:
        """``python -m wellfed ...`` in the folder."""
        command = [sys.executable, "-m", "wellfed", *words]
        env = environment(PYTHONPATH=os.pathsep.join([str(self.folder), str(ROOT / "src")]))
        process = subprocess.run(
            command, cwd=self.folder, env=env, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        self.done = Done(process.returncode, process.stdout, process.stderr)
        return self.done

    @property
    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted((self.folder / "logs" / "planted" / "runs").glob("*"))

    @property
    def run(self) -> Path:
        """The newest."""
        return self.runs[-1]

    @property
    def record(self) -> Mapping[str, Any]:
        """Of the newest run."""
        found: Mapping[str, Any] = json.loads((self.run / "run.json").read_text())
        return found

    @property
    def last(self) -> Path:
        return self.run / "checkpoints" / "last.ckpt"


def _fixed(overrides: tuple[str, ...], *, is_resumed: bool) -> tuple[str, ...]:
    """Those of `FIXED` that no override replaces."""
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    wanted = FIXED[:2] if is_resumed else FIXED
    return tuple(text for text in wanted if text.lstrip("+").partition("=")[0] not in named)


def step_of(checkpoint: Path) -> int | None:
    """The step of a checkpoint that loads weights-only; None where it does not."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"])
    except Exception:  # noqa: BLE001 - whatever a damaged file raises
        return None


def kept(folder: Path) -> list[int]:
    """The steps of all checkpoints of a run folder that load, rising."""
    steps = [step_of(path) for path in (folder / "checkpoints").glob("*.ckpt")]
    return sorted(step for step in steps if step is not None)


def steps_done(folder: Path) -> int:
    """By the rows that were written, and by the record."""
    try:
        recorded = int(json.loads((folder / "run.json").read_text())["steps"])
    except (OSError, ValueError, KeyError):
        recorded = 0
    try:
        rows = (folder / "steps.csv").read_text(errors="replace").splitlines()[1:]
        return max([recorded, *(int(row.partition(",")[0]) for row in rows if row.partition(",")[0].isdigit())])
    except OSError:
        return recorded


def judge(
    box: Box,
    kind: str,
    codes: tuple[int, ...],
    statuses: tuple[str, ...],
    says: str,
    resumes: bool,
    fresh: Callable[[], Done] | None = None,
) -> Case:
    """Compares what the latest command said with what is on the disk.

    Args:
        codes: exit codes that are right for this fault.
        statuses: status of the newest run's record; empty = there must be no run folder.
        says: what the command's output must match.
        resumes: ``resume=auto`` must complete the training now that the fault is gone.
    """
    done = box.done
    assert done is not None
    case = Case(kind, code=done.code, message=_last_word(done))
    if done.code not in codes:
        case.faults.append(f"exit code {done.code}, expected {' or '.join(map(str, codes))}")
    if re.search(r'File "[^"]*(/src/wellfed/|/site-packages/)', done.text):
        case.faults.append("a traceback through code that is not the user's")
    if says and not re.search(says, done.text, re.DOTALL):
        case.faults.append(f"does not say {says!r}")
    if not statuses:
        if box.runs:
            case.faults.append("left a run folder")
        return case
    if not box.runs:
        case.faults.append("left no run folder")
        return case
    try:
        case.status = shown_status(box)
    except (OSError, ValueError) as error:
        if "" not in statuses:
            case.faults.append(f"run.json can't be read: {error}")
        return case
    if case.status not in statuses:
        case.faults.append(f"status {case.status}, expected {' or '.join(statuses)}")
    _claims(box, case, done)
    if resumes and case.status != "ok":
        _resume(box, case)
    return case


def shown_status(box: Box) -> str:
    """The status as a reader of the project sees it: a dead process is killed, whatever its file says."""
    return RunRecord.read(box.run).status


def _claims(box: Box, case: Case, done: Done) -> None:
    took, holds = steps_done(box.run), kept(box.run)
    lost = took - max(holds, default=0)
    said = re.search(r"last saved step (\d+) of (\d+)", done.text)
    case.lost = "nothing" if lost <= 0 else f"{lost} of {took} steps" + (", said" if said else "")
    if case.status == "ok" and lost > 0:
        case.faults.append(f"ok, and the weights of step {took} are nowhere (checkpoints: {holds})")
    if said and int(said[1]) not in (holds or [0]):
        case.faults.append(f"says last saved step {said[1]}, and the checkpoints that load are of {holds}")
    if lost > 0 and not said and case.status != "killed":
        case.faults.append(f"{lost} steps are lost, and no line says what was saved last")
    if not holds and re.search(r"resume=auto goes on from", done.text):
        case.faults.append("says resume=auto goes on, and there is no checkpoint")


def _resume(box: Box, case: Case) -> None:
    before, holds = box.runs, kept(box.run)
    again = box.train("resume=auto", is_resumed=bool(holds))
    if again.code != 0:
        case.faults.append(f"resume=auto: exit code {again.code}: {_last_word(again)}")
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


def _last_word(done: Done) -> str:
    lines = [line.strip() for line in done.err.splitlines() if line.strip()] or done.out.strip().splitlines()
    return lines[-1][:160] if lines else ""


def quoted(path: Path) -> str:
    """For a shell."""
    return shlex.quote(str(path))

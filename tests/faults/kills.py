"""Kills whole process trees with SIGKILL at random moments, resumes them, and compares them with undisturbed runs.

make kills N=200 SEED=1
make kills ARGS="--only ranks"

Each training is killed up to four times, resumed by ``resume=auto`` and completed. Its last weights must then be those
of the undisturbed training, bit for bit, and steps.csv must have each step once, with all samples. Every fifth training
runs in a container of its own (a namespace of process numbers) if this process may make one.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from tests.end_to_end.commands import ROOT, environment
from tests.faults.harness import FIXED, STEPS, Box
from tests.faults.plants import KEEPS_TWO, may_mount

SETTINGS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "worker processes": ("loader.backend=processes", "loader.num_workers=2"),
    "micro-batches": ("memory.micro_batch=4",),
    "EMA": ("callbacks=ema",),
    "clipping": ("trainer.gradient_clip=0.5",),
    "two ranks": ("trainer.devices=2", "trainer.strategy=ddp"),
    "two ranks, micro-batches": ("trainer.devices=2", "trainer.strategy=ddp", "memory.micro_batch=2"),
}
"""Trainings whose resumption is exact, by the documents."""
MOST_KILLS = 4
"""Kills of one training."""
PAUSE = "loss:*:pause"
CONTAINER = ("unshare", "-p", "-f", "--mount-proc", "--kill-child")


@dataclass
class Trial:
    """A training that was killed and resumed."""

    kind: str
    kills: int = 0
    in_container: bool = False
    faults: list[str] = field(default_factory=list)


class Training:
    """The planted training in a folder, whose process trees are killed."""

    def __init__(self, folder: Path, kind: str, *, in_container: bool) -> None:
        self.box = Box(folder)
        self._settings, self._in_container = SETTINGS[kind], in_container

    def complete(self) -> int:
        """Starts or resumes the training, and returns the exit code at its end."""
        process = self._start()
        try:
            return process.wait(timeout=300)
        finally:
            kill_tree(process)

    def kill_after(self, seconds: float) -> int | None:
        """Starts or resumes the training, and kills it after some seconds.

        Returns:
            The exit code of a training that ended before; None = it was killed.
        """
        process = self._start()
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_tree(process)

    def _start(self) -> subprocess.Popen[bytes]:
        own = ("--config-dir", str(self.box.folder / "conf"), *FIXED[:2], "resume=auto")
        # A run that resumes has its settings already.
        rest = () if any(self.box.runs) and self._has_checkpoint() else (*FIXED[2:], *KEEPS_TWO, *self._settings)
        command = [sys.executable, str(ROOT / "src" / "train.py"), *own, *rest]
        variables = {"PYTHONPATH": str(self.box.folder), "PLANTED": PAUSE, "PLANTED_FOLDER": str(self.box.folder)}
        with (self.box.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [*(CONTAINER if self._in_container else ()), *command],
                cwd=self.box.folder,
                env=environment(**variables),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _has_checkpoint(self) -> bool:
        return any((self.box.run / "checkpoints").glob("*.ckpt"))

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the last weights."""
        found: dict[str, torch.Tensor] = torch.load(self.box.last, map_location="cpu", weights_only=True)["state_dict"]
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Returns step and samples of each row of steps.csv."""
        with (self.box.run / "steps.csv").open(newline="") as stream:
            return [(row["step"], row["samples"]) for row in csv.DictReader(stream)]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started, without a moment between."""
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        tree = [own, *own.children(recursive=True)]
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.suspend()
        for each in tree:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def tried(kind: str, folder: Path, drawn: random.Random, whole: Training, took_s: float, most: int) -> Trial:
    """Kills and resumes one training, and compares it with the undisturbed one."""
    # Drawn in any case: a seed then has the same moments on each machine.
    trial = Trial(kind, in_container=drawn.random() < 0.2 and may_mount())
    training = Training(folder, kind, in_container=trial.in_container)
    code: int | None = None
    for _ in range(min(most, drawn.randint(1, MOST_KILLS))):
        code = training.kill_after(drawn.uniform(0.1, 1.0) * took_s)
        if code is not None:
            break
        trial.kills += 1
    else:
        record = training.box.record if training.box.runs else {}  # a run may be killed after its last file
        code = 0 if record.get("status") == "ok" else training.complete()
    if code != 0:
        output = (folder / "output").read_text(errors="replace").strip().splitlines()
        trial.faults.append(f"exit code {code}: {output[-1] if output else ''}")
        return trial
    expected, found = whole.weights(), training.weights()
    if expected.keys() != found.keys() or not all(torch.equal(expected[name], found[name]) for name in expected):
        trial.faults.append("the last weights differ from those of the undisturbed training")
    if training.rows() != whole.rows():
        trial.faults.append(f"steps.csv has {len(training.rows())} rows, or other samples; expected {STEPS}")
    return trial


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="make kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills in all (default 20)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="default: another each time")
    parser.add_argument("--only", default="", metavar="TEXT", help="trainings whose name contains this")
    given = parser.parse_args(words)
    kinds = [kind for kind in SETTINGS if given.only in kind]
    if not kinds:
        parser.error(f"no training is called {given.only!r}: {', '.join(SETTINGS)}")
    drawn, trials = random.Random(given.seed), list[Trial]()
    print(f"seed {given.seed}", flush=True)
    undisturbed: dict[str, tuple[Training, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        while (left := given.kills - sum(trial.kills for trial in trials)) > 0:
            kind = kinds[len(trials) % len(kinds)]
            if kind not in undisturbed:
                undisturbed[kind] = _undisturbed(Path(temporary) / f"whole-{len(undisturbed)}", kind)
            folder = Path(temporary) / f"{len(trials):03d}"
            trials.append(tried(kind, folder, drawn, *undisturbed[kind], left))
            print(_row(trials[-1]), flush=True)
    bad = sum(bool(trial.faults) for trial in trials)
    kills = sum(trial.kills for trial in trials)
    print(
        f"\n{kills} kills in {len(trials)} trainings, {len(trials) - bad} of them as if undisturbed, seed {given.seed}"
    )
    return 1 if bad else 0


def _undisturbed(folder: Path, kind: str) -> tuple[Training, float]:
    """Returns a completed training, and its seconds."""
    training, began_s = Training(folder, kind, in_container=False), time.monotonic()
    if (code := training.complete()) != 0:
        raise RuntimeError(
            f"{kind}: the undisturbed training ends with {code}: {(folder / 'output').read_text()[-500:]}"
        )
    return training, time.monotonic() - began_s


def _row(trial: Trial) -> str:
    where = "container" if trial.in_container else ""
    return f"{trial.kind:28} {trial.kills:2} kills  {where:10} {'; '.join(trial.faults) or 'as if undisturbed'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

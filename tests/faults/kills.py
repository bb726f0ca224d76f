"""Kills whole process trees with SIGKILL at random moments, resumes them, and compares them with undisturbed runs.

make kills N=200 SEED=1
make kills ARGS="--only ranks --most 1"

Each training is killed up to four times, resumed by ``resume=auto`` and completed. It must then be as the undisturbed
one: the last weights, the rows of steps.csv and metrics.csv, each sample once an epoch, one id in wandb. Every fifth
resume is in a restarted container (a namespace of process numbers) if this process may make one.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import psutil
import pytest
import torch

from tests.end_to_end.commands import ROOT, environment
from tests.fake_cuda.marker import simulated_machine
from tests.faults.harness import STEPS, Box

SAMPLES, BATCH = 64, 8
"""Samples of an epoch and of a step, as in planted.py."""
OWN = "workload=planted"
"""Settings that a resumed run needs, too."""
COMMON = (
    *("workload.model._target_=killed.Classifier", "workload.data._target_=killed.datasets"),
    *("trainer.max_epochs=3", "trainer.checkpoint_every_steps=6", "trainer.log_every_steps=4"),
    *("loader.backend=inline", "telemetry=none", "logger=wandb", "logger.mode=offline"),
)
WATCHED = ("+callbacks.watch._target_=planted.Watch",)
"""A callback that knows the step."""
GUEST = ("+callbacks.watch._target_=planted.GuestWatch",)
"""The same of Lightning's, which trains the model."""
WORKERS = ("loader.backend=processes", "loader.num_workers=2")
STREAM = ("workload.data._target_=killed.stream", *WORKERS)
FEATURES = "workload.data._target_=killed.encoded"
MODULE = ("workload.model._target_=killed.Module", "workload.optimizer=null")
TWO_RANKS = ("trainer.devices=2", "trainer.strategy=ddp")
ON_CARDS = ("gpu.precision=32-true",)
CARD_MIB = 512
LARGE, LARGER = "+workload.model.large_mib=80", "+workload.model.large_mib=160"
"""Memory of a sample with which 4 fit on a card and 8 do not; with which 2 fit and 4 do not."""


@dataclass(frozen=True)
class Kind:
    """A kind of training whose resumption is exact, by the documents."""

    settings: tuple[str, ...] = ()
    cards: int = 0
    """Number of simulated cards; 0 = it trains on the CPU."""
    nodes: int = 1
    """Machines, each a torchrun with two ranks on this one. A machine takes no more ranks than it has cores."""


KINDS = {
    "one process": Kind(WATCHED),
    "no callbacks": Kind(("trainer.checkpoint_every_steps=8",)),
    "worker processes": Kind((*WATCHED, *WORKERS)),
    "micro-batches": Kind((*WATCHED, "memory.micro_batch=4")),
    "EMA": Kind((*WATCHED, "callbacks=ema")),
    "clipping": Kind((*WATCHED, "trainer.gradient_clip=0.5")),
    "OneCycleLR": Kind(
        (
            *(*WATCHED, "workload.schedule._target_=torch.optim.lr_scheduler.OneCycleLR"),
            *("workload.schedule.max_lr=0.05", f"workload.schedule.total_steps={STEPS}"),
        )
    ),
    "BatchNorm": Kind((*WATCHED, "+workload.model.batch_norm=true")),
    "features cached": Kind((*WATCHED, FEATURES, "memory.features=cache")),
    "features computed": Kind((*WATCHED, FEATURES, "memory.features=dynamic")),
    "a stream": Kind((*WATCHED, *STREAM)),
    "a LightningModule": Kind((*GUEST, *MODULE)),
    "a callback of Lightning's": Kind(GUEST),
    "two ranks": Kind((*WATCHED, *TWO_RANKS)),
    "two ranks, micro-batches": Kind((*WATCHED, *TWO_RANKS, "memory.micro_batch=2")),
    "two ranks, a stream": Kind((*WATCHED, *TWO_RANKS, *STREAM)),
    "four ranks": Kind((*WATCHED, *TWO_RANKS, "trainer.num_nodes=2", "trainer.accelerator=cpu"), nodes=2),
    "a card, 16-mixed": Kind((*WATCHED, "gpu.precision=16-mixed", "+workload.model.scale=64"), cards=1),
    "a card, out of memory": Kind((*WATCHED, *ON_CARDS, LARGE), cards=1),
    "a card, out of memory, a LightningModule": Kind((*GUEST, *MODULE, *ON_CARDS, LARGE), cards=1),
    "two cards, out of memory": Kind((*WATCHED, *TWO_RANKS, *ON_CARDS, LARGER), cards=2),
}
MOST_KILLS = 4
"""Kills of one training."""
LIMIT_S = 600
"""Seconds after which a training hangs."""
PAUSE = "loss:*:pause"
"""A plant that makes each step longer, so that more kills are in the training."""
CONTAINER = ("unshare", "-p", "-f", "--mount-proc", "--kill-child")
AGENTS = (
    'agent="$0 -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --master-addr=127.0.0.1 --master-port={port}"; '
    '$agent --node-rank=1 "$@" & exec $agent --node-rank=0 "$@"'
)
"""A shell line that starts Python (``$0``) as two agents of torchrun, the second as a child of the first."""


@cache
def may_contain() -> bool:
    """Returns whether this process may start others in a namespace of process numbers."""
    if shutil.which(CONTAINER[0]) is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


def free_port() -> int:
    """Returns a port that no process uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class Trial:
    """A training that was killed and resumed."""

    kind: str
    kills: int = 0
    resumes: int = 0
    from_checkpoint: int = 0
    """Resumes that found a checkpoint. The others began anew."""
    in_container: int = 0
    """Resumes in a restarted container."""
    faults: list[str] = field(default_factory=list)


_COUNTS = ("kills", "resumes", "from_checkpoint", "in_container")
"""Figures of a `Trial` that a table sums."""


class Training:
    """A training in a folder, whose process trees are killed."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.box = Box(folder)
        (folder / "killed.py").write_text(Path(__file__).with_name("killed.py").read_text())
        self.kind = KINDS[kind]

    def run(self, seconds: float, *, in_container: bool = False, plant: str = PAUSE) -> int | None:
        """Starts or resumes the training, and kills it after some seconds.

        Returns:
            The exit code of a training that ended before; None = it was killed.
        """
        process = self._start(plant, in_container=in_container)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_tree(process)

    def _start(self, plant: str, *, in_container: bool) -> subprocess.Popen[bytes]:
        own = ("--config-dir", str(self.box.folder / "conf"), OWN, "resume=auto")
        rest = () if self.has_checkpoint else (*COMMON, *self.kind.settings)  # a run that resumes has its settings
        command = [sys.executable, str(ROOT / "src" / "train.py"), *own, *rest]
        if self.kind.nodes > 1:
            command = ["bash", "-c", AGENTS.format(port=free_port()), *command]
        paths = os.pathsep.join(filter(None, [str(self.box.folder), self.cards.get("PYTHONPATH")]))
        variables = {"PLANTED": plant, "PLANTED_FOLDER": str(self.box.folder), **self.cards, "PYTHONPATH": paths}
        with (self.box.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [*(CONTAINER if in_container else ()), *command],
                cwd=self.box.folder,
                env=environment(**variables),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @cached_property
    def cards(self) -> dict[str, str]:
        """Variables for its simulated cards. The first access in a process may compile them."""
        return simulated_machine().environment(cards=self.kind.cards, mib=CARD_MIB) if self.kind.cards else {}

    @property
    def has_checkpoint(self) -> bool:
        """Whether ``resume=auto`` finds a checkpoint of the newest run."""
        return bool(self.box.runs) and any((self.box.run / "checkpoints").glob("*.ckpt"))

    @property
    def is_complete(self) -> bool:
        """Whether the newest run says that it ended well."""
        try:
            return self.box.record["status"] == "ok"
        except (IndexError, FileNotFoundError):  # killed before the first record
            return False

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the last weights; with EMA, the average and the weights behind it."""
        content = torch.load(self.box.last, map_location="cpu", weights_only=True)
        behind = content.get("current_model_state", {})
        return {**content["state_dict"], **{f"{name} (not averaged)": value for name, value in behind.items()}}

    def steps(self) -> list[tuple[str, str]]:
        """Returns step and samples of each row of steps.csv."""
        return [(row["step"], row["samples"]) for row in self._rows("steps.csv")]

    def metrics(self) -> Counter[tuple[str, str, str]]:
        """Returns step, split and name of the rows of metrics.csv. Rates are absent: no row has those of a warm-up."""
        rows = self._rows("metrics.csv")
        return Counter((row["step"], row["split"], row["name"]) for row in rows if row["split"] != "throughput")

    def _rows(self, name: str) -> list[dict[str, str]]:
        with (self.box.run / name).open(newline="") as stream:
            return list(csv.DictReader(stream))

    def wandb_ids(self) -> set[str]:
        """Returns the id in the record, and those of the parts that wandb has written."""
        parts = [path.name.rpartition("-")[2] for path in (self.box.run / "wandb").glob("offline-run-*")]
        return {(self.box.record["wandb"] or {}).get("id", "none"), *(parts or ["no part"])}

    def samples(self) -> dict[int, list[int]]:
        """Returns the samples of each step: those of the last attempt of the last process that made it."""
        found: dict[int, list[int]] = {}
        files = list(self.box.folder.glob("samples-*"))
        for file in files:  # one of each rank
            latest: dict[int, tuple[str, list[int]]] = {}
            for line in file.read_text().splitlines():
                process, *numbers = line.split()
                step, *samples = map(int, numbers)
                earlier = latest.get(step, ("", []))
                latest[step] = process, samples if earlier[0] != process else [*earlier[1], *samples]
            for step, (_, samples) in latest.items():
                found.setdefault(step, []).extend(samples[-(BATCH // len(files)) :])
        return found


def differences(whole: Training, training: Training) -> Iterator[str]:
    """Yields what a training that was killed has lost or has twice, beside an undisturbed one of its kind."""
    expected, found = whole.weights(), training.weights()
    if expected.keys() != found.keys():
        yield "the last checkpoint has other weights than that of the undisturbed training"
    elif not all(torch.equal(found[name], expected[name]) for name in expected):
        yield "the last weights differ from those of the undisturbed training"
    if training.steps() != whole.steps():
        yield f"steps.csv has {len(training.steps())} rows, or other samples; expected {STEPS}"
    rows = training.metrics()
    if twice := [row for row, times in rows.items() if times > 1]:
        yield f"metrics.csv has rows twice: {twice[:3]}"
    if odd := sorted(rows.keys() ^ whole.metrics().keys()):
        yield f"metrics.csv lacks rows, or has more: {odd[:3]}"
    if len(ids := training.wandb_ids()) > 1:
        yield f"wandb has several runs: {sorted(ids)}"
    if WATCHED[0] not in training.kind.settings:
        return  # without the step, no samples were noted
    steps, per_epoch = training.samples(), SAMPLES // BATCH
    for first in range(1, STEPS, per_epoch):
        samples = Counter(sample for step in range(first, first + per_epoch) for sample in steps.get(step, []))
        if odd := [sample for sample in range(SAMPLES) if samples[sample] != 1]:
            yield f"samples not trained on once in the epoch of step {first}: {odd[:5]}"


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it has started, without a moment between."""
    tree = set[psutil.Process]()
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        while found := {own, *own.children(recursive=True)} - tree:  # they may start others until they are suspended
            tree |= found
            for each in found:
                with suppress(psutil.NoSuchProcess):
                    each.suspend()
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def tried(kind: str, folder: Path, whole: Training, moments_s: Sequence[float], resumes: int = 0) -> Trial:
    """Kills and resumes one training, and compares it with the undisturbed one.

    Args:
        moments_s: seconds after each start at which the training is killed.
        resumes: resumes of other trainings before.
    """
    trial, training, code = Trial(kind), Training(folder, kind), None
    for number, seconds in enumerate([*moments_s, LIMIT_S], resumes):
        if training.is_complete:  # it was killed after its last file
            code = 0
            break
        # Every fifth resume is in a container, as is the start before it: its process number is then in use again.
        in_container = number % 5 in (4, 0) and may_contain()
        if number > resumes:
            trial.resumes += 1
            trial.from_checkpoint += training.has_checkpoint
            trial.in_container += in_container and number % 5 == 0
        runs = training.box.runs if training.has_checkpoint else None
        code = training.run(seconds, in_container=in_container)
        if runs not in (None, training.box.runs):
            trial.faults.append("resume=auto began another run, and there was a checkpoint")
        if code is not None:
            break
        trial.kills += seconds != LIMIT_S
    if code == 0:
        trial.faults += differences(whole, training)
    else:
        kept = ROOT / "build" / "kills" / f"{kind.replace(' ', '_')}_{folder.name}.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "output", kept)
        how = "hangs" if code is None else f"exit code {code}"
        trial.faults.append(f"{how}; its output is {kept.relative_to(ROOT)}")
    return trial


def undisturbed(kind: str, folder: Path) -> tuple[Training, float]:
    """Returns a completed training of a kind, and its seconds.

    Raises:
        RuntimeError: it does not end well.
    """
    training = Training(folder, kind)
    assert training.cards is not None  # compiled before the clock runs
    began_s = time.monotonic()
    code = training.run(LIMIT_S)
    took_s = time.monotonic() - began_s
    if code != 0:
        output = (folder / "output").read_text(errors="replace")
        raise RuntimeError(f"the undisturbed training ends with {code}: {output[-500:]}")
    if faults := list(differences(training, training)):
        raise RuntimeError(f"the undisturbed training: {'; '.join(faults)}")
    return training, took_s


def moment_s(drawn: random.Random, whole: Training, took_s: float) -> float:
    """Returns a random moment of an undisturbed training; in two of three cases one after its first checkpoint."""
    record = whole.box.record
    saved_s = next(event["time_s"] for event in record["events"] if event["kind"] == "checkpoint")
    # The run's clock starts once Python has imported it.
    first_s = took_s - record["duration_s"] + saved_s if drawn.random() < 2 / 3 else 0.1 * took_s
    return drawn.uniform(min(first_s, took_s), took_s)


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="make kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills in all (default 20)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="default: another each time")
    parser.add_argument("--only", default="", metavar="TEXT", help="trainings whose name contains this")
    parser.add_argument("--most", type=int, default=MOST_KILLS, metavar="N", help="kills of one training (default 4)")
    given = parser.parse_args(words)
    kinds = [kind for kind in KINDS if given.only in kind]
    if not kinds:
        parser.error(f"no training is called {given.only!r}: {', '.join(KINDS)}")
    drawn, trials = random.Random(given.seed), list[Trial]()
    drawn.shuffle(kinds)  # a short command takes other kinds each time
    print(f"seed {given.seed}", flush=True)
    wholes: dict[str, tuple[Training, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        while kinds and (left := given.kills - sum(trial.kills for trial in trials)) > 0:
            kinds.append(kind := kinds.pop(0))
            if kind not in wholes:
                try:
                    wholes[kind] = undisturbed(kind, Path(temporary) / f"whole-{list(KINDS).index(kind)}")
                except pytest.skip.Exception as skip:  # a compiler is missing
                    print(f"{kind:40} not done: {skip}", flush=True)
                    kinds.remove(kind)
                    continue
                except RuntimeError as error:
                    trials.append(Trial(kind, faults=[str(error)]))
                    print(_row(trials[-1]), flush=True)
                    kinds.remove(kind)
                    continue
            whole, took_s = wholes[kind]
            times = min(left, drawn.randint(1, given.most))
            moments_s = [moment_s(drawn, whole, took_s) for _ in range(times)]
            resumes = sum(trial.resumes for trial in trials)
            trials.append(tried(kind, Path(temporary) / f"{len(trials):03d}", whole, moments_s, resumes))
            print(_row(trials[-1]), flush=True)
    bad = sum(bool(trial.faults) for trial in trials)
    kills, resumes, loaded, contained = (sum(getattr(trial, name) for trial in trials) for name in _COUNTS)
    says = (
        f"{kills} kills in {len(trials)} trainings, {len(trials) - bad} of them as if undisturbed: {resumes} resumes, "
        f"{loaded} from a checkpoint, {contained} in a restarted container."
    )
    print(f"\n{says}")
    if not may_contain():
        print("No container was restarted: this process may not make namespaces of process numbers.")
    return 1 if bad else 0


def _row(trial: Trial) -> str:
    counts = f"{trial.kills} kills, {trial.from_checkpoint} of {trial.resumes} resumes from a checkpoint"
    where = ", restarted container" if trial.in_container else ""
    return f"{trial.kind:40} {counts}{where}: {'; '.join(trial.faults) or 'as if undisturbed'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

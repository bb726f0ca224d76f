"""Lists the faults that `make faults` plants: how, and what a run must say of each.

Where several statuses or exit codes are right, the claims that are checked beside them decide.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.harness import Box, Case, judge, quoted

Plant = Callable[[Box], None]
Change = Callable[[Path], object]
"""Of a run folder, or of a file."""
RUN_NAMED = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}"
"""The name of a run folder."""
UNREADABLE = ("",)
"""The status of a record that can't be read."""
KEEPS_TWO = ("trainer.checkpoint_every_steps=6", "trainer.keep_last=2")


@dataclass(frozen=True)
class Fault:
    """A fault, and what is right for it."""

    kind: str
    plant: Plant
    """Leaves the command that is judged as the box's latest."""
    codes: tuple[int, ...] = (1,)
    statuses: tuple[str, ...] = ("failed",)
    says: str = ""
    resumes: bool = True
    needs_root: bool = False

    def tried(self, folder: Path) -> Case:
        """Plants it in an empty folder."""
        if self.needs_root and not may_mount():
            return Case(self.kind, skipped="needs the right to mount")
        box = Box(folder)
        self.plant(box)
        return judge(box, self.kind, self.codes, self.statuses, self.says, self.resumes)


@cache
def may_mount() -> bool:
    """Whether this process may have a mount namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=16k tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def trained(plant: str, *overrides: str, **more: str) -> Plant:
    """One command with this plant."""
    around = 'exec "$@"' if ":full" in plant else ""  # what it says goes through pipes, not to a file on the full disk

    def of(box: Box) -> None:
        box.train(*overrides, plant=plant, around=around, **more)

    return of


def mounted(place: str, size: str, *overrides: str, plant: str = "", **more: str) -> Plant:
    """One command that has a small file system of its own at ``place``; what lies there is copied back at the end."""

    def of(box: Box) -> None:
        where, back = Path(place.format(box=box.folder)), box.folder / "copied"
        where.mkdir(parents=True, exist_ok=True)
        text = (
            f'mount -t tmpfs -o size={size} tmpfs {quoted(where)} || exit 99; "$@"; code=$?; '
            f"cp -a {quoted(where)} {quoted(back)}; exit $code"
        )
        shell = f'exec unshare -m bash -c {quoted(Path(text))} bash "$@"'
        box.train(
            *overrides, plant=plant, around=shell, **{key: one.format(box=box.folder) for key, one in more.items()}
        )
        if where.is_relative_to(box.folder):
            shutil.rmtree(where)
            back.rename(where)

    return of


def damaged(change: Change) -> Plant:
    """A run that ended at step 20 with checkpoints of 12 and 18; its folder is changed, and it is resumed."""

    def planted(box: Box) -> None:
        box.train(*KEEPS_TWO, plant="step:20:sigkill")
        change(box.run)
        box.train("resume=auto", is_resumed=True)

    return planted


def of(name: str, change: Change) -> Change:
    """A change of one file of a run folder."""
    return lambda run: change(run / name)


def last(change: Change) -> Change:
    """A change of the latest checkpoint alone."""
    return of("checkpoints/last.ckpt", change)


def all_checkpoints(change: Change) -> Change:
    """A change of each checkpoint."""

    def change_all(run: Path) -> None:
        for checkpoint in (run / "checkpoints").glob("*.ckpt"):
            change(checkpoint)

    return change_all


def cut(path: Path) -> None:
    """The second half is missing."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    """Nothing is left."""
    path.write_bytes(b"")


def noise(path: Path) -> None:
    """Other bytes."""
    path.write_bytes(bytes(range(256)) * 16)


def flipped(path: Path) -> None:
    """One bit in the midst of the weights."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def flipped_in_directory(path: Path) -> None:
    """One bit in the archive's list of its members, which no checksum of a member covers."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 42] ^= 4
    path.write_bytes(bytes(content))


def first_line(table: Path) -> None:
    """The head of a table is overwritten."""
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(["\x00garbage,,,\n", *lines[1:]]))


def torn(table: Path) -> None:
    """A row that was cut off while it was written."""
    with table.open("a") as file:
        file.write("21,0.1,2,8")


def changed(**values: object) -> Change:
    """run.json has these values."""

    def change(run: Path) -> None:
        found = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(found | values))

    return change


def read_by(command: str, change: Change) -> Plant:
    """A command reads a run that is damaged, beside a good one, which ``runs`` must list."""

    def planted(box: Box) -> None:
        box.train("telemetry=default")
        good = box.run
        shutil.copytree(good, good.with_name("2099-01-01_00-00-00_dead"))
        change(box.run)
        done = box.command(command, *([] if command == "runs" else [str(box.run)]))
        if command == "runs" and good.name not in done.out:
            raise AssertionError(f"the good run is not listed: {done.text}")
        shutil.rmtree(box.run)

    return planted


def restarted_container(box: Box) -> None:
    """Process 1 of a container is killed, and the next container's is 1 again."""
    shell = 'exec unshare -p -f --mount-proc "$@"'
    box.train(*KEEPS_TWO, plant="step:20:sigkill", around=shell)
    box.train("resume=auto", around=shell, is_resumed=True)


def under_nohup(box: Box) -> None:
    """SIGHUP is ignored from the start."""
    box.train(plant="step:12:sighup", around='trap "" HUP; exec "$@"')


def without_logs(box: Box) -> None:
    """A file stands where the folder of all runs should be."""
    (box.folder / "logs").write_text("")
    box.train(TMPDIR=str(box.folder))


def logs_removed(box: Box) -> None:
    """The folder of a run that goes on is deleted."""
    _with_callback(box, "on_train_epoch_end", "shutil.rmtree('logs', ignore_errors=True)")


def without_checkpoints_folder(box: Box) -> None:
    """A file stands where the folder of the checkpoints should be."""
    line = "[(one / 'checkpoints').write_text('') for one in Path('logs').glob('*/runs/*')]"
    _with_callback(box, "on_train_start", line)


def _with_callback(box: Box, hook: str, line: str) -> None:
    (box.folder / "own.py").write_text(
        "import shutil\nfrom pathlib import Path\nimport lightning.pytorch as pl\n"
        f"class Own(pl.Callback):\n    def {hook}(self, trainer, module):\n        {line}\n"
    )
    box.train("+callbacks.own._target_=own.Own", "config.allow_targets=[planted,torch,own]")


def with_ranks(plant: str, *overrides: str) -> Plant:
    """One command that trains with two processes."""
    return trained(plant, "trainer.devices=2", "trainer.strategy=ddp", *overrides)


WORKERS = ("loader.backend=processes", "loader.num_workers=2", "loader.timeout_s=5", "trainer.checkpoint_every_steps=6")
WANDB = ("logger=wandb", "logger.mode=offline")
KILLED = {"codes": (-9,), "statuses": ("killed",)}
"""By SIGKILL: nothing can be said or saved any more."""
LAST_SAVED = "last saved step"


def fine(kind: str, plant: Plant, *, needs_root: bool = False) -> Fault:
    """The training is completed."""
    return Fault(kind, plant, (0,), ("ok",), needs_root=needs_root)


def stopped(kind: str, plant: Plant, code: int = 143) -> Fault:
    """The training ends early, as asked."""
    return Fault(kind, plant, (code,), ("interrupted",))


def refused(kind: str, plant: Plant, says: str = "", *, needs_root: bool = False) -> Fault:
    """Nothing is run."""
    return Fault(kind, plant, (2,), (), says, resumes=False, needs_root=needs_root)


def full(kind: str, plant: Plant, says: str = LAST_SAVED, *, needs_root: bool = False) -> Fault:
    """There is no room to the end, so that the record may be that of the start."""
    return Fault(kind, plant, (1,), ("failed", "killed"), says, resumes=False, needs_root=needs_root)


def read(kind: str, command: str, change: Change) -> Fault:
    """A command reads a run that is damaged; beside it lies a good one."""
    return Fault(kind, read_by(command, change), (0, 1, 2), ("ok",), resumes=False)


SIGNALS = (
    stopped("SIGTERM in a step", trained("loss:12:sigterm")),
    stopped("SIGTERM between steps", trained("step:12:sigterm")),
    stopped("SIGTERM in validation", trained("validation:2:sigterm")),
    stopped("SIGTERM while saving", trained("save:2:sigterm")),
    stopped("SIGTERM in the test", trained("test:1:sigterm")),
    stopped("SIGTERM twice in a step", trained("loss:12:sigterm; loss:12:sigterm", *KEEPS_TWO)),
    stopped("SIGTERM in the first epoch", trained("step:3:sigterm")),
    stopped("Ctrl-C in a step", trained("loss:12:sigint"), 130),
    stopped("Ctrl-C in validation", trained("validation:1:sigint"), 130),
    stopped("KeyboardInterrupt raised by code", trained("step:12:interrupt"), 130),
    stopped("SIGHUP in a step", trained("loss:12:sighup"), 129),
    fine("SIGHUP under nohup", under_nohup),
    stopped("SIGUSR1 in a step", trained("loss:12:sigusr1"), 138),
    Fault("SIGKILL in a step", trained("loss:12:sigkill", *KEEPS_TWO), **KILLED),
    Fault("SIGKILL while saving", trained("save:2:sigkill", *KEEPS_TWO), **KILLED),
    Fault("SIGKILL in validation", trained("validation:2:sigkill"), **KILLED),
    Fault("SIGKILL before the first checkpoint", trained("loss:3:sigkill"), **KILLED),
    Fault("SIGSEGV in a step", trained("loss:12:sigsegv", *KEEPS_TWO), (-11,), ("killed",)),
    fine("a container that restarts after a kill", restarted_container, needs_root=True),
    fine("a dead run whose process number is in use", damaged(changed(pid=os.getpid()))),
)
DISK = (
    full("disk full from step 12 on", trained("step:12:full"), f"{LAST_SAVED} 8 of 24"),
    refused("disk full from the start", mounted("{box}/logs", "64k"), "No space left", needs_root=True),
    full("disk full at the last save", trained("save:5:full; test:1:room")),
    fine("disk full at one save, then free", trained("save:1:full; step:12:room")),
    fine("$TMPDIR of 12 KB", mounted("{box}/tmp", "12k", TMPDIR="{box}/tmp"), needs_root=True),
    full("a file in place of the checkpoints' folder", without_checkpoints_folder, f"{LAST_SAVED} 0 of 24"),
    Fault("logs/ can't be made", without_logs, (0,), (), resumes=False),
    Fault("logs/ deleted during the run", logs_removed, (1,), (), "can't be written", resumes=False),
)
RESUMED = (
    fine("last.ckpt cut in half", damaged(last(cut))),
    fine("last.ckpt empty", damaged(last(empty))),
    fine("last.ckpt of noise", damaged(last(noise))),
    fine("a bit flipped in last.ckpt's weights", damaged(last(flipped))),
    fine("a bit flipped in last.ckpt's directory", damaged(last(flipped_in_directory))),
    fine("last.ckpt deleted", damaged(last(Path.unlink))),
    Fault("all checkpoints cut", damaged(all_checkpoints(cut)), (2,), ("killed",), RUN_NAMED, resumes=False),
    Fault("run.json cut", damaged(of("run.json", cut)), (2,), UNREADABLE, RUN_NAMED, resumes=False),
    Fault("run.json of noise", damaged(of("run.json", noise)), (2,), UNREADABLE, RUN_NAMED, resumes=False),
    Fault(
        "run.json of other types", damaged(changed(steps="many", plan=[])), (2,), UNREADABLE, RUN_NAMED, resumes=False
    ),
    fine("steps.csv with a damaged first line", damaged(of("steps.csv", first_line))),
    fine("metrics.csv with a damaged first line", damaged(of("metrics.csv", first_line))),
    fine("steps.csv deleted", damaged(of("steps.csv", Path.unlink))),
    fine("a torn last row in steps.csv", damaged(of("steps.csv", torn))),
)
WORKER = (
    Fault("a worker killed", trained("train_sample:40!:worker_sigkill", *WORKERS)),
    Fault("a worker that leaves with 0", trained("train_sample:40!:worker_exit0", *WORKERS), says="exit"),
    Fault("a worker that leaves with 1", trained("train_sample:40!:worker_exit1", *WORKERS), says="exit"),
    Fault("a worker that crashes", trained("train_sample:40!:worker_sigsegv", *WORKERS), says="SIGSEGV|egmentation"),
    Fault("a worker that hangs", trained("train_sample:40!:worker_hang", *WORKERS), says="timeout_s|5 s"),
    Fault("a sample that raises in a worker", trained("train_sample:40!:raise", *WORKERS), says="sample 40"),
    Fault("a validation worker killed", trained("val_sample:5!:worker_sigkill", *WORKERS)),
    Fault(
        "/dev/shm of 1 MB", mounted("/dev/shm", "1m", *WORKERS), (0, 1, 2), ("ok", "failed"), "", False, needs_root=True
    ),
)
DATA = (
    Fault("a sample that raises", trained("train_sample:40!:raise"), says="sample 40"),
    Fault("an I/O error of a sample", trained("train_sample:40!:oserror"), says="sample 40"),
    Fault("NaN in one sample", trained("train_sample:40!:nan"), says="sample 40"),
    Fault("a sample of another shape", trained("train_sample:40!:shape"), says=r"shape|size|\[3\]"),
    Fault("a class that the model lacks", trained("train_sample:40!:class"), says="7"),
    refused("a validation sample that raises", trained("val_sample:5!:raise"), "sample 5"),
    refused("validation without samples", trained("", "+workload.data.val=0"), "no val batch of its 0 samples"),
    refused(
        "a test without samples",
        trained("", "+workload.data.test=0", "trainer.sanity_batches=0"),
        "no test batch of its 0 samples",
    ),
    refused("data that can't be made", trained("data:1:raise"), "planted failure"),
    refused(
        "a member that can't be cut into micro-batches",
        trained("", "memory.micro_batch=4", PLANTED_TEXT="uneven"),
        r"batch\['numbers'\] can't be cut",
    ),
    fine("texts that are cut into micro-batches", trained("", "memory.micro_batch=4", PLANTED_TEXT="even")),
    Fault("a loss that becomes NaN", trained("loss:12:nan"), says="(?i)nan"),
    Fault("a loss that becomes infinite", trained("loss:12:inf"), says="(?i)inf|nan"),  # the mean with later steps
    fine("a loss that becomes NaN, skipped", trained("loss:12:nan", "trainer.on_nan=skip")),
    Fault(
        "a learning rate that blows up", trained("", "workload.optimizer.lr=1e30"), says="(?i)nan|inf", resumes=False
    ),
)
CODE = (
    Fault("a step that raises", trained("loss:12:raise"), says="planted failure"),
    Fault("a callback that raises between steps", trained("step:12:raise"), says="planted failure"),
    Fault("a callback that raises at an epoch's end", trained("epoch:2:raise"), says="planted failure"),
    Fault("evaluation that raises", trained("validation:2:raise"), says="planted failure"),
    Fault("a test that raises", trained("test:1:raise"), says="planted failure"),
    Fault("a collate function that raises", trained("collate:12:raise"), says="planted failure"),
    Fault("a hook of saving that raises", trained("save:2:raise"), says="planted failure"),
    Fault("sys.exit(7) in a step", trained("step:12:sysexit"), (1, 7), ("failed",)),
    Fault("os._exit(0) in a step", trained("step:12:exit0"), (0,), ("killed",)),
    Fault("endless recursion", trained("step:12:recursion"), says="recursion"),
    Fault("a key that the batch lacks", trained("loss:1:key"), says="labels", resumes=False),
    Fault("a loss that is a vector", trained("loss:*:vector"), (1, 2), ("failed",), "shape", resumes=False),
    Fault("MemoryError in a step", trained("step:12:memory"), (3,), ("oom",)),
    Fault("MemoryError in validation", trained("validation:2:memory"), (3,), ("oom",)),
)
READERS = (
    read("runs: run.json cut", "runs", of("run.json", cut)),
    read("runs: run.json of wrong types", "runs", changed(throughput=[], steps=None)),
    read("report: run.json of wrong types", "report", changed(findings=3, time="x", gpus=[])),
    read("report: tables of noise", "report", of("telemetry.csv", noise)),
    read("diagnose: tables of noise", "diagnose", of("steps.csv", noise)),
    read(
        "diagnose: infinite figures", "diagnose", changed(throughput={"samples_per_s": "inf", "ci95": 1, "steps": -3})
    ),
)
LOGGERS = (
    fine("wandb's service killed", trained("step:12:wandb", *WANDB)),
    fine("wandb's folder can't be written", trained("", *WANDB, WANDB_DIR="/proc/none")),
)
RANKS = (
    Fault("two ranks: one is killed", with_ranks("step:12:sigkill", *KEEPS_TWO), (1, -9), ("failed", "killed")),
    Fault("two ranks: a step raises", with_ranks("loss:12:raise"), says="planted failure"),
    stopped("two ranks: SIGTERM", with_ranks("step:12:sigterm")),
)
TWO_AT_ONCE = (
    full("disk full while a worker dies", trained("step:3:full; train_sample:40!:then_worker_sigkill", *WORKERS)),
    full("a step raises on a full disk", trained("step:10:full; step:12:raise")),
    full("NaN on a full disk", trained("step:10:full; loss:12:nan"), "(?i)nan"),
    Fault("SIGTERM while a checkpoint fails", trained("save:2:full; loss:14:sigterm", *KEEPS_TWO),
          (1, 143), ("failed", "interrupted", "killed"), LAST_SAVED, resumes=False),
)  # fmt: skip
FAULTS = (*SIGNALS, *DISK, *RESUMED, *WORKER, *DATA, *CODE, *READERS, *LOGGERS, *RANKS, *TWO_AT_ONCE)


def tried(number: int, root: str) -> Case:
    """One fault in a folder of its own."""
    fault, began_s = FAULTS[number], time.monotonic()
    folder = Path(root) / f"{number:03d}"
    folder.mkdir()
    try:
        case = fault.tried(folder)
    except Exception as error:  # noqa: BLE001 - a row of the table, whatever happened
        where = traceback.extract_tb(error.__traceback__)[-1]
        case = Case(fault.kind, faults=[f"{type(error).__name__}: {error} ({where.name})"])
    case.seconds = time.monotonic() - began_s
    return case

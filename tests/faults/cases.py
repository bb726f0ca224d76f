"""Lists the faults that `make faults` plants, and what each run must say of its fault.

Where several statuses or exit codes are right, the claims that are checked beside them decide.
"""

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fake_nvml.driver import DRIVER_NOT_LOADED, Hang, Lost, Scenario
from tests.faults.damages import (
    Change,
    all_checkpoints,
    both,
    changed,
    code,
    cut,
    empty,
    first_line,
    flipped,
    flipped_in_directory,
    folder_instead,
    last,
    noise,
    of,
    pipe_instead,
    torn,
    zeros,
)
from tests.faults.examples import IMAGES, RATINGS, SCENES, SERIES, SOUNDS, Example
from tests.faults.harness import Box, Case, Expected, judge
from tests.faults.plants import (
    KEEPS_TWO,
    Plant,
    card,
    damaged,
    driven,
    evaluated,
    killed_twice,
    may_mount,
    mounted,
    on_card,
    read_by,
    restarted_container,
    resumed_from,
    swept,
    trained,
    with_callback,
    with_ranks,
    without_logs,
)

RUN_NAMED = r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}"
"""The name of a run folder."""
UNREADABLE = ("",)
"""The status of a record that can't be read."""
WORKERS = ("loader.backend=processes", "loader.num_workers=2", "loader.timeout_s=5", "trainer.checkpoint_every_steps=6")
WANDB = ("logger=wandb", "logger.mode=offline")
LAST_SAVED = "last saved step"


@dataclass(frozen=True)
class Fault:
    """A fault and its correct results."""

    kind: str
    plant: Plant
    expected: Expected
    needs_root: bool = False
    workload: str = "planted"

    def tried(self, folder: Path) -> Case:
        """Plants the fault in an empty folder and returns its result."""
        if self.needs_root and not may_mount():
            return Case(self.kind, skipped="needs the right to mount")
        box = Box(folder, self.workload)
        try:
            self.plant(box)
        except pytest.skip.Exception as skip:  # a compiler or an extra is missing
            return Case(self.kind, skipped=str(skip))
        return judge(box, self.kind, self.expected)


def failed(
    kind: str, plant: Plant, says: str = "", *, resumes: bool = True, codes: tuple[int, ...] = (1,),
    statuses: tuple[str, ...] = ("failed",), needs_root: bool = False,
) -> Fault:  # fmt: skip
    """Returns a fault that ends the training with an error."""
    return Fault(kind, plant, Expected(codes, statuses, says, resumes), needs_root)


def fine(kind: str, plant: Plant, says: str = "", *, needs_root: bool = False) -> Fault:
    """Returns a fault with which the training is completed."""
    return Fault(kind, plant, Expected((0,), ("ok",), says), needs_root)


def stopped(kind: str, plant: Plant, code: int = 143) -> Fault:
    """Returns a fault that ends the training early, as asked."""
    return Fault(kind, plant, Expected((code,), ("interrupted",)))


def killed(kind: str, plant: Plant, keeps: int = 0, *, code: int = -9, needs_root: bool = False) -> Fault:
    """Returns a fault by which the process ends at once, so that it can neither report nor save anything."""
    return Fault(kind, plant, Expected((code,), ("killed",), keeps=keeps), needs_root)


def refused(kind: str, plant: Plant, says: str = "", *, needs_root: bool = False) -> Fault:
    """Returns a fault because of which nothing is run."""
    return Fault(kind, plant, Expected((2,), (), says, resumes=False), needs_root)


def elsewhere(kind: str, plant: Plant, *, needs_root: bool = False) -> Fault:
    """Returns a fault because of which the run goes to the folder for temporary files."""
    return Fault(kind, plant, Expected((0,), (), "this run goes to", resumes=False), needs_root)


def full(kind: str, plant: Plant, says: str = LAST_SAVED, *, needs_root: bool = False) -> Fault:
    """Returns a fault that leaves no space to the end, so that the record may be that of the start."""
    return Fault(kind, plant, Expected((1,), ("failed", "killed"), says, resumes=False), needs_root)


def read(kind: str, command: str, change: Change) -> Fault:
    """Returns a fault in a run that a command reads."""
    return Fault(kind, read_by(command, change), Expected((0, 1, 2), ("ok",), resumes=False))


def evaluation(kind: str, change: Change) -> Fault:
    """Returns a fault in a run that is evaluated."""
    return Fault(kind, evaluated(change), Expected((2,), ("ok",), RUN_NAMED, resumes=False))


def unresumable(kind: str, change: Change, statuses: tuple[str, ...] = UNREADABLE) -> Fault:
    """Returns a damage with which ``resume=auto`` ends and names the run."""
    return Fault(kind, damaged(change), Expected((2,), statuses, RUN_NAMED, resumes=False))


def data(kind: str, example: Example, change: Change, says: str = "", *, is_refused: bool = False) -> Fault:
    """Returns a damage in a user's data: a sample of them is left out, or nothing is run."""
    expected = Expected((2,), (), says, resumes=False) if is_refused else Expected((0,), ("ok",), says)
    return Fault(kind, example.with_damage(change), expected, workload=example.workload)


SIGNALS = (
    stopped("SIGTERM in a step", trained("loss:12:sigterm")),
    stopped("SIGTERM between steps", trained("step:12:sigterm")),
    stopped("SIGTERM in validation", trained("validation:2:sigterm")),
    stopped("SIGTERM while saving", trained("save:2:sigterm")),
    stopped("SIGTERM in the test", trained("test:1:sigterm")),
    stopped("SIGTERM at an epoch's end", trained("epoch:2:sigterm")),
    stopped("SIGTERM before the first step", trained("fit:1:sigterm")),
    stopped("SIGTERM in the sanity check", trained("evaluate:1:sigterm")),
    stopped("SIGTERM while the model is built", trained("model:1:sigterm")),
    stopped("SIGTERM twice in a step", trained("loss:12:sigterm; loss:12:sigterm", *KEEPS_TWO)),
    stopped("SIGTERM in the first epoch", trained("step:3:sigterm")),
    stopped("SIGTERM with workers", trained("loss:12:sigterm", *WORKERS)),
    stopped("Ctrl-C in a step", trained("loss:12:sigint"), 130),
    stopped("Ctrl-C in validation", trained("validation:1:sigint"), 130),
    stopped("Ctrl-C while saving", trained("save:2:sigint"), 130),
    stopped("Ctrl-C twice in a step", trained("loss:12:sigint; loss:12:sigint", *KEEPS_TWO), 130),
    stopped("KeyboardInterrupt raised by code", trained("step:12:interrupt"), 130),
    stopped("SIGHUP in a step", trained("loss:12:sighup"), 129),
    fine("SIGHUP under nohup", trained("step:12:sighup", around='trap "" HUP; exec "$@"')),
    stopped("SIGUSR1 in a step", trained("loss:12:sigusr1"), 138),
    fine("SIGSTOP, two seconds later SIGCONT", trained("step:12:stop")),
    killed("SIGKILL in a step", trained("loss:12:sigkill", *KEEPS_TWO), 6),
    killed("SIGKILL while saving", trained("save:2:sigkill", *KEEPS_TWO), 6),
    killed("SIGKILL before a checkpoint is renamed", trained("rename_last.ckpt:2:sigkill", *KEEPS_TWO), 6),
    killed("SIGKILL before the record is renamed", trained("step:12:pause; rename_run.json:*:then_sigkill")),
    killed("SIGKILL in validation", trained("validation:2:sigkill"), 8),
    killed("SIGKILL in the test", trained("test:1:sigkill"), 24),
    killed("SIGKILL before the first checkpoint", trained("loss:3:sigkill")),
    killed("SIGKILL with workers", trained("loss:15:sigkill", *WORKERS), 12),
    killed("SIGKILL, and again after it was resumed", killed_twice("sigkill"), 12),
    killed("SIGSEGV in a step", trained("loss:12:sigsegv", *KEEPS_TWO), 6, code=-11),
    fine("a container that restarts after a kill", restarted_container, needs_root=True),
    fine("a dead run whose process number is in use", damaged(changed(pid=os.getpid()))),
)
POWER = (
    killed("power cut in a step: names are kept", trained("loss:20:powercut", *KEEPS_TWO), 18),
    killed("power cut in a step: names are lost, too", trained("loss:20:powercut-names", *KEEPS_TWO), 18),
    killed("power cut before a checkpoint is renamed",
           trained("rename_last.ckpt:3:powercut", *KEEPS_TWO), 12),
    killed("power cut in the test: names are lost, too", trained("test:1:powercut-names", *KEEPS_TWO), 24),
)  # fmt: skip
DISK = (
    full("disk full from step 12 on", trained("step:12:full"), f"{LAST_SAVED} 8 of 24"),
    refused("disk full from the start", mounted("{box}/logs", "size=64k"), "No space left", needs_root=True),
    elsewhere("logs/ on a file system that is read-only", mounted("{box}/logs", "ro", TMPDIR="{box}"), needs_root=True),
    elsewhere("no inodes left", mounted("{box}/logs", "size=50m,nr_inodes=3", TMPDIR="{box}"), needs_root=True),
    full("disk full at the last save", trained("save:5:full; test:1:room")),
    fine("disk full at one save, then free", trained("save:1:full; step:12:room")),
    fine("$TMPDIR of 12 KB", mounted("{box}/tmp", "size=12k", TMPDIR="{box}/tmp"), needs_root=True),
    fine("$TMPDIR read-only", mounted("{box}/tmp", "ro", TMPDIR="{box}/tmp"), needs_root=True),
    fine("$TMPDIR that does not exist", trained("", TMPDIR="{box}/none")),
    full("a file in place of the checkpoints' folder",
         with_callback("on_train_start", "[(one / 'checkpoints').write_text('') for one in RUNS]"),
         f"{LAST_SAVED} 0 of 24"),
    elsewhere("logs/ can't be made", without_logs),
    failed("logs/ deleted during the run",
           with_callback("on_train_epoch_end", "shutil.rmtree('logs', ignore_errors=True)"), "can't be written",
           resumes=False, statuses=()),
    fine("checkpoints deleted during the run",
         with_callback("on_train_epoch_start", "[shutil.rmtree(one / 'checkpoints', True) for one in RUNS]")),
    fine("stdout on a full disk", trained("", around='exec "$@" > /dev/full')),
    fine("stderr on a full disk", trained("", around='exec "$@" 2> /dev/full')),
    fine("stdout closed", trained("", around='exec "$@" >&-')),
    fine("the reader of the output has gone", trained("", around='"$@" | true; exit ${PIPESTATUS[0]}')),
)  # fmt: skip
MEMORY = (
    failed("MemoryError in a step", trained("step:12:memory"), codes=(3,), statuses=("oom",)),
    failed("MemoryError in validation", trained("validation:2:memory"), codes=(3,), statuses=("oom",)),
    Fault("a worker that leaks until memory ends", trained("train_sample:40!:worker_leak", *WORKERS),
          Expected((1, 3), ("failed", "oom"), "host's memory")),
    failed("the host's memory ends in a step", trained("step:12:leak"), codes=(1, 3), statuses=("failed", "oom")),
    Fault("/dev/shm of 1 MB", mounted("/dev/shm", "size=1m", *WORKERS),
          Expected((0, 1, 2), ("ok", "failed"), resumes=False), needs_root=True),
    Fault("/dev/shm read-only", mounted("/dev/shm", "ro", *WORKERS),
          Expected((0, 1, 2), ("ok", "failed"), resumes=False), needs_root=True),
    Fault("48 file handles", trained("", around='ulimit -n 48; exec "$@"'), Expected((0, 1, 2), ("ok", "failed"))),
    fine("no file handle left from step 12 to 20", trained("step:12:handles; step:20!:close")),
    fine("the card's memory ends in one step", on_card("loss:12:oom", "memory.on_oom=retry")),
    failed("the card's memory ends in one step, and may not",
           on_card("loss:12:oom", "memory.on_oom=fail"), codes=(3,), statuses=("oom",), resumes=False),
)  # fmt: skip
RESUMED = (
    fine("last.ckpt cut in half", damaged(last(cut))),
    fine("last.ckpt empty", damaged(last(empty))),
    fine("last.ckpt of noise", damaged(last(noise))),
    fine("last.ckpt of zeros", damaged(last(zeros))),
    fine("last.ckpt that would run code", damaged(last(code))),
    fine("a folder in place of last.ckpt", damaged(last(folder_instead))),
    fine("a named pipe in place of last.ckpt", damaged(last(pipe_instead))),
    fine("a bit flipped in last.ckpt's weights", damaged(last(flipped))),
    fine("a bit flipped in last.ckpt's directory", damaged(last(flipped_in_directory))),
    fine("last.ckpt deleted", damaged(last(Path.unlink))),
    unresumable("all checkpoints cut", all_checkpoints(cut), ("killed",)),
    unresumable("run.json cut", of("run.json", cut)),
    unresumable("run.json of noise", of("run.json", noise)),
    unresumable("run.json of zeros", of("run.json", zeros)),
    unresumable("run.json deleted", of("run.json", Path.unlink)),
    unresumable("a named pipe in place of run.json", of("run.json", pipe_instead)),
    unresumable("run.json of other types", changed(steps="many", plan=[])),
    fine("steps.csv with a damaged first line", damaged(of("steps.csv", first_line))),
    fine("metrics.csv with a damaged first line", damaged(of("metrics.csv", first_line))),
    fine("steps.csv deleted", damaged(of("steps.csv", Path.unlink))),
    fine("steps.csv and metrics.csv of noise", damaged(both(of("steps.csv", noise), of("metrics.csv", noise)))),
    fine("a torn last row in steps.csv", damaged(of("steps.csv", torn))),
    refused("resume=FILE of a file that would run code", resumed_from("x.ckpt", code), "x.ckpt"),
    refused("resume=FILE of a cut checkpoint", resumed_from("x.ckpt", cut), "x.ckpt"),
    evaluation("evaluate: checkpoints cut", all_checkpoints(cut)),
    evaluation("evaluate: checkpoints that would run code", all_checkpoints(code)),
    evaluation("evaluate: run.json of noise", of("run.json", noise)),
)
WORKER = (
    failed("a worker killed", trained("train_sample:40!:worker_sigkill", *WORKERS)),
    failed("a worker that leaves with 0", trained("train_sample:40!:worker_exit0", *WORKERS), "exit"),
    failed("a worker that leaves with 1", trained("train_sample:40!:worker_exit1", *WORKERS), "exit"),
    failed("a worker that crashes", trained("train_sample:40!:worker_sigsegv", *WORKERS), "SIGSEGV|egmentation"),
    failed("a worker that hangs", trained("train_sample:40!:worker_hang", *WORKERS), "timeout_s|5 s"),
    failed("a sample that raises in a worker", trained("train_sample:40!:raise", *WORKERS), "sample 40"),
    failed("a validation worker killed", trained("val_sample:5!:worker_sigkill", *WORKERS)),
    failed("a validation worker that hangs", trained("val_sample:5!:worker_hang", *WORKERS), "timeout_s|5 s"),
)
DATA = (
    failed("a sample that raises", trained("train_sample:40!:raise"), "sample 40"),
    failed("an I/O error of a sample", trained("train_sample:40!:oserror"), "sample 40"),
    failed("NaN in one sample", trained("train_sample:40!:nan"), "sample 40"),
    failed("a sample of another shape", trained("train_sample:40!:shape"), r"shape|size|\[3\]"),
    failed("a class that the model lacks", trained("train_sample:40!:class"), "7"),
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
    failed("a loss that becomes NaN", trained("loss:12:nan"), "(?i)nan"),
    failed("a loss that becomes infinite", trained("loss:12:inf"), "(?i)inf|nan"),  # the mean with later steps
    fine("a loss that becomes NaN, skipped", trained("loss:12:nan", "trainer.on_nan=skip")),
    failed("a learning rate that blows up", trained("", "workload.optimizer.lr=1e30"), "(?i)nan|inf", resumes=False),
)
FILES = (
    data("an image cut in half", IMAGES, of("3.png", cut), "3.png"),
    data("an image of noise", IMAGES, of("3.png", noise), "3.png"),
    data("a named pipe in place of an image", IMAGES, of("3.png", pipe_instead), "3.png"),
    data("a recording cut in half", SOUNDS, of("yes/s1_nohash_0.wav", cut), "s1_nohash_0.wav"),
    data("a recording of noise", SOUNDS, of("yes/s1_nohash_0.wav", noise), "s1_nohash_0.wav"),
    data("a shard cut in half", SOUNDS.as_shards(), of("0000.tar", cut), "0000.tar"),
    data("a shard of noise", SOUNDS.as_shards(), of("0000.tar", noise), "0000.tar", is_refused=True),
    data("a table of noise", SERIES, of("table.csv", noise), "table.csv", is_refused=True),
    data("a torn last row in a table", SERIES, of("table.csv", torn), "bad row"),
    data("an array that would run code", SCENES, of("scene.npy", code), "scene.npy", is_refused=True),
    data("an array cut in half", SCENES, of("scene.npy", cut), "scene.npy", is_refused=True),
    data("ratings of noise", RATINGS, of("u.data", noise), "u.data", is_refused=True),
    Fault("prepared files in the cache with flipped bits", SOUNDS.with_damaged_cache(flipped),
          Expected((0,), ("ok",)), workload="speech"),
    Fault("prepared files in the cache cut", SOUNDS.with_damaged_cache(cut),
          Expected((0,), ("ok",)), workload="speech"),
    Fault("all of the cache of noise", IMAGES.with_damaged_cache(noise), Expected((0,), ("ok",)),
          workload="restoration"),
    Fault("a cache that can't be written", SOUNDS.with_cache("/proc/none"),
          Expected((2,), (), "paths.cache_dir", resumes=False), workload="speech"),
)  # fmt: skip
CODE = (
    failed("a step that raises", trained("loss:12:raise"), "planted failure"),
    failed("a callback that raises between steps", trained("step:12:raise"), "planted failure"),
    failed("a callback that raises at an epoch's end", trained("epoch:2:raise"), "planted failure"),
    failed("evaluation that raises", trained("validation:2:raise"), "planted failure"),
    failed("a test that raises", trained("test:1:raise"), "planted failure"),
    failed("a collate function that raises", trained("collate:12:raise"), "planted failure"),
    failed("a hook of saving that raises", trained("save:2:raise"), "planted failure"),
    failed("sys.exit(7) in a step", trained("step:12:sysexit"), codes=(1, 7)),
    Fault("os._exit(0) in a step", trained("step:12:exit0"), Expected((0,), ("killed",))),
    failed("endless recursion", trained("step:12:recursion"), "recursion"),
    failed("a key that the batch lacks", trained("loss:1:key"), "labels", resumes=False),
    failed("a loss that is a vector", trained("loss:*:vector"), "shape", resumes=False, codes=(1, 2)),
)
READERS = (
    read("runs: run.json cut", "runs", of("run.json", cut)),
    read("runs: run.json of wrong types", "runs", changed(throughput=[], steps=None)),
    read("runs: a named pipe in place of run.json", "runs", of("run.json", pipe_instead)),
    read("report: run.json of wrong types", "report", changed(findings=3, time="x", gpus=[])),
    read("report: tables of noise", "report", of("telemetry.csv", noise)),
    read("diagnose: tables of noise", "diagnose", of("steps.csv", noise)),
    read("diagnose: named pipes in place of tables", "diagnose",
         both(*(of(f"{name}.csv", pipe_instead) for name in ("steps", "metrics", "telemetry")))),
    read(
        "diagnose: infinite figures", "diagnose", changed(throughput={"samples_per_s": "inf", "ci95": 1, "steps": -3})
    ),
    Fault("sweep: a torn row in the ledger", swept(cut), Expected((0,), (), resumes=False)),
    Fault("sweep: a ledger of noise", swept(noise), Expected((0,), (), resumes=False)),
    Fault("sweep: sweep.json of zeros", swept(zeros, damages="sweep.json"), Expected((0, 2), (), "", resumes=False)),
)  # fmt: skip
LOGGERS = (
    fine("wandb's service killed", trained("step:12:wandb", *WANDB)),
    fine("wandb's folder can't be written", trained("", *WANDB, WANDB_DIR="/proc/none")),
    fine("wandb's server does not answer", trained(
        "", "logger=wandb", "logger.mode=online", WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="x" * 40)),
    fine("a file in place of the CSV logger's folder", with_callback(
        "on_train_start", "[(one / 'csv').write_text('') for one in RUNS]")),
)  # fmt: skip
DRIVER = (
    fine("the driver is not loaded", driven(Scenario(init_error=DRIVER_NOT_LOADED))),
    fine("a card is lost", driven(Scenario([card(Lost(1.0))]))),
    fine("a card is lost and comes back", driven(Scenario([card(Lost(1.0, 2.0, needs_init=True))]))),
    fine("the driver hangs in a call",
         driven(Scenario([card()], hangs=[Hang("nvmlDeviceGetMemoryInfo_v2", 600.0, 1.0)]))),
    fine("the driver hangs at its start", driven(Scenario([card()], hangs=[Hang("nvmlInit_v2", 20.0)]))),
    fine("the driver shows stale and impossible figures",
         driven(Scenario([card(stale_samples=True, temp_c=-1, sm_clock_mhz=-5, used_gib=10_000)]))),
    fine("every third call of the driver fails", driven(Scenario([card()], fail_every=3))),
    fine("every call of the driver takes 0.3 s", driven(Scenario([card()], slow_ms=300))),
    failed("the card that computes is lost", on_card("", lost_after=1200), codes=(1, 3), resumes=False),
)  # fmt: skip
CLOCK = (
    fine("the clock is set back a year", trained("step:12:clock-31536000", "telemetry=default")),
    fine("the clock is set ahead a day", trained("step:12:clock86400", "telemetry=default")),
    fine("the clock is set back in validation", trained("validation:1:clock-3600", *WORKERS, "telemetry=default")),
)
RANKS = (
    failed("two ranks: one is killed in a step", with_ranks("step:12:rank1_sigkill", *KEEPS_TWO),
           codes=(1, -9), statuses=("failed", "killed")),
    failed("two ranks: one is killed at its start", with_ranks("model:1:rank1_sigkill"),
           codes=(1, 2, -9), statuses=("failed", "killed")),
    failed("two ranks: one is killed in validation", with_ranks("validation:2:rank1_sigkill", *KEEPS_TWO),
           codes=(1, -9), statuses=("failed", "killed")),
    failed("two ranks: one is killed while saving", with_ranks("save:2:rank1_sigkill", *KEEPS_TWO),
           codes=(1, -9), statuses=("failed", "killed")),
    Fault("two ranks: the first is killed", with_ranks("loss:12:rank0_sigkill", *KEEPS_TWO),
          Expected((-9,), ("failed", "killed"), keeps=6)),  # the other rank completes the record
    failed("two ranks: a step raises", with_ranks("loss:12:raise"), "planted failure"),
    failed("two ranks: a step of the other raises", with_ranks("loss:12:rank1_raise"), "planted failure"),
    stopped("two ranks: SIGTERM", with_ranks("step:12:sigterm")),
)  # fmt: skip
TWO_AT_ONCE = (
    full("disk full while a worker dies", trained("step:3:full; train_sample:40!:then_worker_sigkill", *WORKERS)),
    full("a step raises on a full disk", trained("step:10:full; step:12:raise")),
    full("NaN on a full disk", trained("step:10:full; loss:12:nan"), "(?i)nan"),
    Fault("SIGTERM while a checkpoint fails", trained("save:2:full; loss:14:sigterm", *KEEPS_TWO),
          Expected((1, 143), ("failed", "interrupted", "killed"), LAST_SAVED, resumes=False)),
    fine("last.ckpt cut, and tables of noise",
         damaged(both(last(cut), of("steps.csv", noise), of("metrics.csv", noise)))),
    unresumable("last.ckpt cut, and run.json cut", both(last(cut), of("run.json", cut))),
    Fault("SIGTERM while a worker hangs",
          trained("train_sample:40!:worker_hang; loss:4:sigterm", *WORKERS),
          Expected((1, 143), ("failed", "interrupted"))),
    fine("the card is lost to the driver, and the clock is set back",
         driven(Scenario([card(Lost(1.0))]), "trainer.checkpoint_every_steps=6")),
    killed("power cut right after a kill was resumed", killed_twice("powercut"), 12),
)  # fmt: skip
FAULTS: Sequence[Fault] = (
    *(*SIGNALS, *POWER, *DISK, *MEMORY, *RESUMED, *WORKER, *DATA, *FILES, *CODE),
    *(*READERS, *LOGGERS, *DRIVER, *CLOCK, *RANKS, *TWO_AT_ONCE),
)


def tried(number: int, root: str) -> Case:
    """Plants one fault in a folder of its own."""
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

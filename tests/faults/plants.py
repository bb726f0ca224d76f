"""Ways to plant a fault: each returns a function that runs the training of a box with the fault in it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.fake_cuda.marker import simulated_machine
from tests.fake_nvml.driver import FakeDriver, FakeGpu, Lost, Scenario
from tests.faults.damages import Change
from tests.faults.harness import Box, quoted
from tests.kit.required_tools import find_tool

Plant = Callable[[Box], None]
"""Plants a fault. The box's latest command is the one that is checked."""
KEEPS_TWO = ("trainer.checkpoint_every_steps=6", "trainer.keep_last=2")


@cache
def may_mount() -> bool:
    """Returns whether this process may have a mount namespace of its own."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=16k tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def trained(plant: str, *overrides: str, around: str = "", **more: str) -> Plant:
    """Returns one command with this plant.

    Args:
        around: a shell line with the command as ``"$@"``.
        more: variables; ``{box}`` in a value is the box's folder.
    """
    if ":full" in plant:
        around = 'exec "$@"'  # output goes through pipes, not to a file on the full disk

    def plant_it(box: Box) -> None:
        given = {key: value.format(box=box.folder) for key, value in more.items()}
        box.train(*overrides, plant=plant, around=around.replace("{box}", str(box.folder)), **given)

    return plant_it


def mounted(place: str, options: str, *overrides: str, plant: str = "", **more: str) -> Plant:
    """Returns one command that has a small file system of its own at ``place``, whose files are copied back at the end.

    Args:
        options: mount options, such as ``size=64k``; with ``ro`` nothing can be written from the start.
    """

    def plant_it(box: Box) -> None:
        where, back = Path(place.format(box=box.folder)), box.folder / "copied"
        where.mkdir(parents=True, exist_ok=True)
        text = (
            f'mount -t tmpfs -o {options} tmpfs {quoted(where)} || exit 99; "$@"; code=$?; '
            f"cp -a {quoted(where)} {quoted(back)}; exit $code"
        )
        shell = f'exec unshare -m bash -c {quoted(Path(text))} bash "$@"'
        given = {key: value.format(box=box.folder) for key, value in more.items()}
        box.train(*overrides, plant=plant, around=shell, **given)
        if where.is_relative_to(box.folder):
            shutil.rmtree(where)
            back.rename(where)

    return plant_it


def damaged(change: Change) -> Plant:
    """Returns a run killed at step 20, with checkpoints of steps 12 and 18, that is changed and resumed."""

    def plant_it(box: Box) -> None:
        box.train(*KEEPS_TWO, plant="step:20:sigkill")
        change(box.run)
        box.train("resume=auto", is_resumed=True)
        if (box.folder / "ran").exists():
            raise AssertionError("code of a file was run")

    return plant_it


def resumed_from(name: str, change: Change) -> Plant:
    """Returns ``resume=<file>`` of a checkpoint that is changed."""

    def plant_it(box: Box) -> None:
        box.train(*KEEPS_TWO, plant="step:20:sigkill")
        checkpoint = box.folder / name
        shutil.copy(box.last, checkpoint)
        change(checkpoint)
        shutil.rmtree(box.folder / "logs")
        box.train(f"resume={checkpoint}")
        if (box.folder / "ran").exists():
            raise AssertionError("code of a file was run")

    return plant_it


def read_by(command: str, change: Change) -> Plant:
    """Returns a command that reads a damaged run beside a good one, which ``runs`` must list."""

    def plant_it(box: Box) -> None:
        box.train("telemetry=default")
        good = box.run
        shutil.copytree(good, good.with_name("2099-01-01_00-00-00_dead"))
        change(box.run)
        done = box.command(command, *([] if command == "runs" else [str(box.run)]))
        if command == "runs" and good.name not in done.out:
            raise AssertionError(f"the good run is not listed: {done.text}")
        shutil.rmtree(box.run)

    return plant_it


def evaluated(change: Change) -> Plant:
    """Returns an evaluation of a run whose folder was changed. The run itself stays ok."""

    def plant_it(box: Box) -> None:
        box.train()
        whole = box.folder / "whole"
        shutil.copytree(box.run, whole)
        change(box.run)
        run = box.run
        box.script("evaluate.py", f"checkpoint={run}")
        shutil.rmtree(run)
        whole.rename(run)

    return plant_it


def with_ranks(plant: str, *overrides: str) -> Plant:
    """Returns one command that trains with two processes."""
    return trained(plant, "trainer.devices=2", "trainer.strategy=ddp", *overrides)


def driven(scenario: Scenario, *overrides: str) -> Plant:
    """Returns one command of four seconds whose NVIDIA driver plays a scenario, with telemetry ten times a second."""

    def plant_it(box: Box) -> None:
        build = box.folder / "driver"
        build.mkdir()
        found = FakeDriver(find_tool("cc", ""), build).environment(scenario)
        variables = {name: found[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO")}
        telemetry = ("telemetry=default", "telemetry.interval_s=0.1")
        box.train(*telemetry, *overrides, plant="loss:*:pause", **variables)

    return plant_it


def card(lost: Lost | None = None, **more: Any) -> FakeGpu:
    """Returns a card of the fake driver."""
    return FakeGpu("GPU-aaaa1111-0000-0000-0000-000000000001", "NVIDIA H200", 141.0, util=90.0, lost=lost, **more)


def on_card(plant: str, *overrides: str, mib: int = 512, lost_after: int | str = "") -> Plant:
    """Returns one command on a simulated card.

    Args:
        lost_after: launches of kernels after which the card is lost.
    """

    def plant_it(box: Box) -> None:
        variables = simulated_machine().environment(mib=mib, lost_after=lost_after)
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(box.folder)])
        box.train(*overrides, plant=plant, **variables)

    return plant_it


def swept(change: Change, *, damages: str = "ledger.jsonl") -> Plant:
    """Returns a sweep of two points whose file is changed, and the same command again. It must show both points."""

    def plant_it(box: Box) -> None:
        words = ("-m", "sweep=quick", "sweep.trial_steps=10", "loader=baseline", "workload.optimizer.lr=0.01,0.02")
        first = box.train(*words)
        if first.code != 0:
            raise AssertionError(f"the sweep itself fails: {first.text[-300:]}")
        (folder,) = (box.folder / "logs" / "planted" / "sweeps").glob("*")
        change(folder / damages)
        again = box.train(*words)
        if again.code == 0:
            rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text("utf-8", "ignore").splitlines()
                    if line.startswith("{") and line.endswith("}")]  # fmt: skip
            found = {row["point"] for row in rows if row["status"] == "ok"}
            if len(found) != 2:
                raise AssertionError(f"{len(found)} of 2 points are in the ledger")
        shutil.rmtree(box.folder / "logs")

    return plant_it


def with_callback(hook: str, line: str) -> Plant:
    """Returns one command with a user's callback that has this line in this hook."""

    def plant_it(box: Box) -> None:
        (box.folder / "own.py").write_text(
            "import shutil\nfrom pathlib import Path\nimport lightning.pytorch as pl\n"
            f"class Own(pl.Callback):\n    def {hook}(self, trainer, module):\n"
            f"        RUNS = list(Path('logs').glob('*/runs/*'))\n        {line}\n"
        )
        box.train("+callbacks.own._target_=own.Own", "config.allow_targets=[planted,torch,own]")

    return plant_it


def restarted_container(box: Box) -> None:
    """Kills process 1 of a container; the next container's is 1 again."""
    shell = 'exec unshare -p -f --mount-proc "$@"'
    box.train(*KEEPS_TWO, plant="step:20:sigkill", around=shell)
    box.train("resume=auto", around=shell, is_resumed=True)


def killed_twice(action: str) -> Plant:
    """Returns a run that is killed, resumed, and ended at step 15 by another action."""

    def plant_it(box: Box) -> None:
        box.train(*KEEPS_TWO, plant="step:9:sigkill")
        box.train("resume=auto", plant=f"step:9:sigkill; step:15:{action}", is_resumed=True)

    return plant_it


def without_logs(box: Box) -> None:
    """Puts a file in the place of the folder of all runs."""
    (box.folder / "logs").write_text("")
    box.train(TMPDIR=str(box.folder))

"""``python -m wellfed doctor``: what this machine is, which profile it maps to, and what is missing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from wellfed.errors import EXIT_OK, Fault
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import MachineFacts
from wellfed.hardware.profiles import Budget, resolve_budget, resolve_precision
from wellfed.hardware.torch_cuda import IMPORT_FAILED, torch_cuda
from wellfed.nvml.session import unofficial_pynvml
from wellfed.tracking.wandb_sink import is_logged_in
from wellfed.units import show_bytes

SMALL_SHM_GIB = 1.0
"""Worker processes pass batches through /dev/shm. Docker's default is 64 MB:
https://docs.docker.com/reference/cli/docker/container/run/ (--shm-size)."""
_HIDES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Missing:
    """One thing that this machine lacks or that is in the way."""

    what: str
    problem: str
    way_out: str


@dataclass(frozen=True)
class Surroundings:
    """What doctor looks at beside the hardware."""

    has_wandb_login: bool
    has_compiler: bool
    unofficial_pynvml: str | None


@dataclass(frozen=True)
class Examination:
    """What doctor says."""

    machine: MachineFacts
    profile: Budget
    precision: str
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """The content of ``doctor --json``: machine, profile, missing."""
        profile = {"name": self.profile.profile, **asdict(self.profile), "precision": self.precision}
        del profile["profile"]
        return {
            "machine": self.machine.to_dict(),
            "profile": {**profile, "warnings": list(self.profile.warnings)},
            "missing": [asdict(entry) for entry in self.missing],
        }


def main(argv: Sequence[str]) -> int:
    """Prints the examination of this machine; exit code 0 whatever is missing. Takes seconds, for importing torch."""
    parser = argparse.ArgumentParser(
        prog="python -m wellfed doctor", description="The machine, the profile it maps to, what is missing."
    )
    parser.add_argument("--json", action="store_true", help="print {machine, profile, missing} as JSON")
    asked = parser.parse_args(argv)
    examination = examine(machine(torch_cuda()), surroundings(os.environ, Path.home()))
    if asked.json:
        print(json.dumps(examination.to_dict(), indent=2))
    else:
        show(examination, sys.stdout)
    return EXIT_OK


def examine(facts: MachineFacts, around: Surroundings) -> Examination:
    """What follows from the facts; asks nothing of the machine."""
    profile = resolve_budget("auto", None, None, facts)
    precision = resolve_precision("auto", facts.training_gpus[0] if facts.training_gpus else None)
    assert not isinstance(precision, Fault)  # auto is never refused
    return Examination(facts, profile, precision.precision, (*_missing_hardware(facts), *_missing_software(around)))


def surroundings(environ: Mapping[str, str], home: Path) -> Surroundings:
    """Looks at the login, the compiler and the installed distributions."""
    compilers = [environ["CXX"]] if environ.get("CXX") else ["g++", "clang++", "cl"]
    return Surroundings(
        has_wandb_login=is_logged_in(environ, home),
        has_compiler=any(shutil.which(name, path=environ.get("PATH")) for name in compilers),
        unofficial_pynvml=unofficial_pynvml(),
    )


def show(examination: Examination, stream: IO[str]) -> None:
    """Prints the examination for people: first what keeps torch from the card, then the tables."""
    from rich.console import Console
    from rich.table import Table

    # soft_wrap: a command to copy must not be broken into lines; markup off: messages hold brackets.
    console = Console(file=stream, soft_wrap=True, markup=False, highlight=False)
    first = [entry for entry in examination.missing if entry.what == "torch"]
    rest = [entry for entry in examination.missing if entry.what != "torch"]
    for entry in first:
        console.print(f"{entry.problem} {entry.way_out}\n", style="bold red")
    table = Table("", "", show_header=False, title="Machine", title_justify="left")
    for name, value in [*_machine_rows(examination.machine), *_profile_rows(examination)]:
        table.add_row(name, value)
    console.print(table, soft_wrap=False)
    console.print("Nothing is missing." if not examination.missing else "Missing:" if rest else "", style="bold")
    for entry in rest:
        console.print(f"  {entry.what}: {' '.join(filter(None, [entry.problem, entry.way_out]))}")


def _missing_hardware(facts: MachineFacts) -> list[Missing]:
    found = []
    # Without a card it does not matter that torch can't use one, unless there is no torch at all.
    if facts.torch_problem is not None and (facts.gpus or facts.torch_problem.startswith(IMPORT_FAILED)):
        seen = f"torch can't use {facts.gpus[0].describe()}" if facts.gpus else "torch can't be used"
        found.append(
            Missing(
                "torch",
                f"{seen}: {facts.torch_problem}. Training would run on the CPU.",
                "Install the build for this driver: https://pytorch.org/get-started/locally",
            )
        )
    if not facts.gpus:
        why = f"NVML: {facts.nvml_problem}"
        if _HIDES in (facts.torch_problem or "") and _HIDES not in why:
            why += f"; {facts.torch_problem}"
        found.append(Missing("gpu", f"no NVIDIA GPU here ({why}); training runs on the CPU.", _way_to_gpu(why)))
    found += [Missing("warning", warning, "") for warning in facts.warnings]
    if facts.shm_gib is not None and facts.shm_gib < SMALL_SHM_GIB:
        found.append(
            Missing(
                "shm",
                f"/dev/shm has {show_bytes(facts.shm_gib * 2**30)}, and worker processes pass batches through it.",
                "Run the container with --ipc=host or --shm-size=8g, or set loader.backend=threads.",
            )
        )
    return found


def _way_to_gpu(why: str) -> str:
    if _HIDES in why:
        return f"Run: unset {_HIDES}"
    if "reboot" in why or "nvidia-ml-py" in why:
        return ""  # the problem names its own way out
    return "With a card in this machine: install its driver, or start the container with --gpus all. Else gpu=cpu."


def _missing_software(around: Surroundings) -> list[Missing]:
    found = []
    if around.unofficial_pynvml is not None:
        found.append(Missing("pynvml", around.unofficial_pynvml, ""))
    if not around.has_wandb_login:
        found.append(
            Missing("wandb", "not logged in, so runs are recorded offline.", "Run: wandb login; or set logger=none.")
        )
    if not around.has_compiler:
        found.append(
            Missing(
                "compiler",
                "no C++ compiler, which torch.compile needs.",
                "Run: apt-get install g++; or keep gpu.compile=none.",
            )
        )
    return found


def _machine_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    rows = [
        ("host", f"{facts.host}, {facts.os}"),
        ("cpu", f"{facts.cpu}, {facts.cpu_quota_cores:g} cores for this process"),
        ("ram", f"{facts.ram_gib:.1f} GiB, {facts.ram_available_gib:.1f} available"),
    ]
    if facts.shm_gib is not None and facts.shm_free_gib is not None:
        rows.append(("/dev/shm", f"{facts.shm_gib:.1f} GiB, {facts.shm_free_gib:.1f} free"))
    for gpu in facts.gpus:
        free = "" if gpu.free_gib is None else f", {gpu.free_gib:.1f} free"
        capability = "" if gpu.capability is None else f", capability {gpu.capability}"
        rows.append((f"gpu {gpu.index}", f"{gpu.describe()}{free}{capability}, {gpu.uuid or 'no UUID'}"))
        if gpu.holders:
            rows.append(("", f"held by {gpu.held_by()}"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())))
    return rows


def _profile_rows(examination: Examination) -> list[tuple[str, str]]:
    profile = examination.profile
    budget = "" if profile.budget_gib is None else f": {profile.budget_gib:.1f} GiB to plan with"
    return [
        ("profile", f"gpu={profile.profile}{budget}, {examination.precision}"),
        ("because", profile.because),
        *(("warning", warning) for warning in profile.warnings),
    ]

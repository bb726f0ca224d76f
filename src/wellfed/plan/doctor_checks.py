"""Finds what this machine lacks for training (``wellfed doctor``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from wellfed.errors import Fault
from wellfed.observe.hardware.profiles import Budget, resolve_budget, resolve_precision
from wellfed.observe.hardware.torch_cuda import IMPORT_FAILED
from wellfed.observe.machine_facts import MachineFacts
from wellfed.units import show_bytes

SMALL_SHM_GIB = 1.0
"""Size of /dev/shm below which worker processes may fail, since they pass batches through it. Docker's default is 64
MB: https://docs.docker.com/reference/cli/docker/container/run/ (--shm-size)."""
_HIDES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Missing:
    """One missing or obstructing thing."""

    what: str
    problem: str
    way_out: str


@dataclass(frozen=True)
class Surroundings:
    """Facts about the machine's software and environment, for doctor."""

    has_wandb_login: bool
    has_compiler: bool
    """Whether a C++ compiler is there, for torch.compile."""


@dataclass(frozen=True)
class Examination:
    """The result of doctor."""

    machine: MachineFacts
    profile: Budget
    precision: str
    missing: tuple[Missing, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``doctor --json``: machine, profile, missing."""
        profile = asdict(self.profile)
        name, warnings = profile.pop("profile"), list(profile.pop("warnings"))
        return {
            "machine": asdict(self.machine),
            "profile": {"name": name, **profile, "precision": self.precision, "warnings": warnings},
            "missing": [asdict(entry) for entry in self.missing],
        }


def examine(facts: MachineFacts, around: Surroundings) -> Examination:
    """Returns conclusions from the facts; reads nothing from the machine."""
    profile = resolve_budget("auto", None, None, facts)
    precision = resolve_precision("auto", facts.training_gpus[0] if facts.training_gpus else None)
    assert not isinstance(precision, Fault)  # auto is always possible
    return Examination(facts, profile, precision.precision, (*_missing_hardware(facts), *_missing_software(around)))


def _missing_hardware(facts: MachineFacts) -> list[Missing]:
    found = []
    # Without a card, torch only needs to import.
    if facts.torch_problem is not None and (facts.gpus or facts.torch_problem.startswith(IMPORT_FAILED)):
        seen = f"torch can't use {facts.gpus[0].describe()}" if facts.gpus else "torch can't be used"
        problem = f"{seen}: {facts.torch_problem}. Training would run on the CPU."
        way_out = "Install the build for this driver: https://pytorch.org/get-started/locally"
        found.append(Missing("torch", problem, way_out))
    if not facts.gpus:
        why = f"NVML: {facts.nvml_problem}"
        way_out = (
            "With a card in this machine: install its driver, or start the container with --gpus all. Else gpu=cpu."
        )
        if _HIDES in f"{why}{facts.torch_problem}":
            why = why if _HIDES in why else f"{why}; {facts.torch_problem}"
            way_out = f"Run: unset {_HIDES}"
        elif "reboot" in why or "nvidia-ml-py" in why:
            way_out = ""  # the problem includes it
        found.append(Missing("gpu", f"no NVIDIA GPU here ({why}); training runs on the CPU.", way_out))
    found += [Missing("warning", warning, "") for warning in facts.warnings]
    if facts.shm_gib is not None and facts.shm_gib < SMALL_SHM_GIB:
        problem = f"/dev/shm has {show_bytes(facts.shm_gib * 2**30)}, and worker processes pass batches through it."
        way_out = "Run the container with --ipc=host or --shm-size=8g, or set loader.backend=threads."
        found.append(Missing("shm", problem, way_out))
    return found


def _missing_software(around: Surroundings) -> list[Missing]:
    wandb = Missing("wandb", "not logged in, so runs are recorded offline.", "Run: wandb login; or set logger=none.")
    problem = "no C++ compiler, which torch.compile needs."
    compiler = Missing("compiler", problem, "Run: apt-get install g++; or keep gpu.compile=none.")
    return [wandb] * (not around.has_wandb_login) + [compiler] * (not around.has_compiler)

"""What the processes of a sweep do: prepare data and model once, look at all points, run one of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What a trial needs is imported before the fork.
import wellfed.app.run  # noqa: F401
from wellfed.app import assemble
from wellfed.app.planner import Planner
from wellfed.app.train import train
from wellfed.config.check import check_imported
from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault, WellfedError
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import MachineFacts
from wellfed.hardware.torch_cuda import torch_cuda
from wellfed.lit.unimported import seed_everything
from wellfed.planning.device import plan_device
from wellfed.planning.planned import RunPlan


@dataclass(frozen=True)
class Shared:
    """What trials of the same data and model have in common."""

    parts: assemble.Parts
    num_threads: int
    """Of torch, before it was told to use one: threads do not survive a fork."""


@dataclass(frozen=True)
class Look:
    """Plan points without running any: a line of ``file`` for each, the first about the machine."""

    points: Sequence[tuple[str, Composed[RunConfig]]]
    """Id and configuration."""
    file: Path


def prepare(config: RunConfig) -> Shared:
    """Data and model, as a run's own process would make them.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seed_everything(config.seed)
    parts = assemble.make_parts(config)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        problem = "uses CUDA while it is made, and a process that has used CUDA can't be forked into trials."
        way_out = "Leave tensors on the CPU; the engine moves them. Or add hydra/launcher=basic: all in one process."
        raise ConfigError([Fault("workload.data or workload.model", problem, way_out)])
    return Shared(parts, num_threads)


def what_is_shared(config: RunConfig) -> str:
    """Equal for configurations whose data and model are the same."""
    workload = config.workload
    has_optimizer = workload.optimizer is not None
    return json.dumps([workload.data, workload.model, has_optimizer, config.seed], sort_keys=True, default=str)


def work(shared: Shared, task: Composed[RunConfig] | Look) -> int:
    """A trial, or a look at many; the exit code."""
    # A loader would otherwise start a server for its workers, which imports torch once more.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(shared.num_threads)
    if isinstance(task, Look):
        look(shared.parts, task)
        return 0
    return train(task, shared.parts)


def look(parts: assemble.Parts, task: Look) -> None:
    """Writes what the plan of each point says; a point whose planning ends this process leaves no line."""
    facts = machine(torch_cuda())
    with task.file.open("a", encoding="utf-8") as stream:
        print(json.dumps(_machine(facts)), file=stream, flush=True)
        for point, composed in task.points:
            print(json.dumps({"point": point, **_plan(parts, composed, facts)}), file=stream, flush=True)


def _machine(facts: MachineFacts) -> dict[str, Any]:
    cards = ", ".join(gpu.name for gpu in facts.training_gpus)
    words = f"{facts.cpu}, {facts.cpu_quota_cores:g} cores; {cards or 'no GPU'}"
    return {"machine": words, "num_gpus": len(facts.training_gpus)}


def _plan(parts: assemble.Parts, composed: Composed[RunConfig], facts: MachineFacts) -> dict[str, Any]:
    """``num_gpus`` and what is predicted, or ``problem``."""
    config, choices = composed.config, composed.choices
    try:
        device = plan_device(config, choices, facts)
        faults = check_imported(config)
        if isinstance(device, list) or faults:
            raise ConfigError([*(device if isinstance(device, list) else []), *faults])
        plan, _ = Planner(config, choices, facts, device, parts).without_running()
    except ConfigError as error:
        return {"problem": " ".join(map(str, error.faults))}
    except WellfedError as error:
        return {"problem": str(error)}
    return {
        "problem": None if plan.misfit is None else str(plan.misfit),
        "num_gpus": _num_gpus(plan),
        "predicted_peak_gib": plan.predicted_peak_gib,
        "device": plan.device_name,
    }


def _num_gpus(plan: RunPlan) -> int:
    return int(plan["trainer.devices"]) if plan["trainer.accelerator"] == "gpu" else 0

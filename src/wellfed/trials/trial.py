"""What the processes of a sweep do: prepare data and model once, look at all points, run one of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# What a trial needs is imported before the fork.
import wellfed.run.stages  # noqa: F401
from wellfed.config.compose import Composed
from wellfed.config.schema import Backend, RunConfig
from wellfed.errors import ConfigError, Fault, WellfedError
from wellfed.footprint.footprint import KnownFootprints
from wellfed.hardware.detect import machine
from wellfed.hardware.facts import MachineFacts
from wellfed.hardware.torch_cuda import torch_cuda
from wellfed.lit.unimported import seed_everything
from wellfed.loading.first_batches import FirstBatches
from wellfed.memory.features import all_rows
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.run.planner import Planner
from wellfed.run.train import train


@dataclass(frozen=True)
class Shared:
    """What trials of the same data and model have in common."""

    parts: assemble.Parts
    num_threads: int
    """Of torch, before it was told to use one: threads do not survive a fork."""


@dataclass(frozen=True)
class Task:
    """Run one point."""

    composed: Composed[RunConfig]
    seen: Mapping[str, Any] | None = None
    """What the look at the point has told of its batches and its memory."""
    rows: Path | None = None
    """Where `Rows` has left the features that it keeps."""


@dataclass(frozen=True)
class Look:
    """Plan points without running any: a line of ``file`` for each, the first about the machine."""

    points: Sequence[tuple[str, Composed[RunConfig]]]
    """Id and configuration."""
    file: Path


@dataclass(frozen=True)
class Rows:
    """Compute all feature rows on the CPU, for trials that would each do so."""

    file: Path
    """Not there unless all could be computed."""


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


def work(shared: Shared, task: Task | Look | Rows) -> int:
    """A trial, or what many need; the exit code."""
    # A loader would otherwise start a server for its workers, which imports torch once more.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(shared.num_threads)
    if isinstance(task, Look):
        look(shared.parts, task)
        return 0
    if isinstance(task, Rows):
        _compute(task, shared.parts)
        return 0
    return train(task.composed, _with_what_is_known(shared.parts, task))


def _with_what_is_known(parts: assemble.Parts, task: Task) -> assemble.Parts:
    if task.rows is not None:
        parts = replace(parts, feature_rows=torch.load(task.rows, weights_only=True))
    if task.seen is None:
        return parts
    first = task.seen["first_batches"]
    return replace(
        parts,
        first_batches=None if first is None else FirstBatches(**first),
        footprints=KnownFootprints.from_dict(task.seen["footprints"]),
    )


def _compute(task: Rows, parts: assemble.Parts) -> None:
    assert parts.features is not None
    cpu = torch.device("cpu")
    parts.model.eval()
    unfinished = task.file.with_suffix(".part")
    torch.save(all_rows(parts.features, cpu, cpu), unfinished)
    unfinished.rename(task.file)


def _keeps_rows(parts: assemble.Parts, plan: RunPlan) -> bool:
    """Whether a trial keeps the features that `Rows` computes.

    On a GPU it computes them there; of bf16-true Lightning makes the model bf16 as a whole, and with it the rows.
    """
    is_kept = parts.features is not None and plan.memory.features in ("cache", "cache_host")
    return is_kept and not plan.on_gpu and plan.device.precision != "bf16-true"


def look(parts: assemble.Parts, task: Look) -> None:
    """Writes what the plan of each point says; a point whose planning ends this process leaves no line."""
    facts, seen = machine(torch_cuda()), _Seen(parts)
    with task.file.open("a", encoding="utf-8") as stream:
        print(json.dumps(_machine(facts)), file=stream, flush=True)
        for point, composed in task.points:
            print(json.dumps({"point": point, **_plan(parts, composed, facts, seen)}), file=stream, flush=True)


class _Seen:
    """The first batches, built once for all points that share them."""

    def __init__(self, parts: assemble.Parts) -> None:
        self._parts = parts
        self._known: dict[str, FirstBatches | None] = {}

    def __call__(self, composed: Composed[RunConfig], plan: RunPlan) -> FirstBatches | None:
        """None where nothing depends on them, or they can't be built."""
        config = composed.config
        first = assemble.first_builder(config, composed.choices, plan, self._parts)
        if first is None:
            return None
        workload, loader, trainer = config.workload, config.loader, config.trainer
        batches = [workload.effective_batch_size, workload.drop_last, trainer.devices]
        limits = [trainer.limit_batches, trainer.overfit_batches, loader.skip_ids, loader.max_skipped]
        key = repr([first, batches, limits])  # data and seed are the stem's
        if key not in self._known:
            self._known[key] = assemble.look_at_first_batches(config, first, self._parts)
        return self._known[key]


def _machine(facts: MachineFacts) -> dict[str, Any]:
    cards = ", ".join(gpu.name for gpu in facts.training_gpus)
    words = f"{facts.cpu}, {facts.cpu_quota_cores:g} cores; {cards or 'no GPU'}"
    return {"machine": words, "num_gpus": len(facts.training_gpus)}


def _plan(parts: assemble.Parts, composed: Composed[RunConfig], facts: MachineFacts, seen: _Seen) -> dict[str, Any]:
    """``num_gpus``, what is predicted and what was seen, or ``problem``."""
    try:
        planner = Planner.start(composed, facts, parts)
        rough = planner.rough()
        estimate, first_batches = planner.estimate(rough), seen(composed, rough)
        # A backend that is still to be chosen is chosen by times, in the trial.
        plan = planner.estimated(estimate, None if composed.config.loader.backend is Backend.auto else first_batches)
    except ConfigError as error:
        return {"problem": " ".join(map(str, error.faults))}
    except WellfedError as error:
        return {"problem": str(error)}
    return {
        "problem": None if plan.misfit is None else str(plan.misfit),
        "num_gpus": _num_gpus(plan),
        "predicted_peak_gib": plan.predicted_peak_gib,
        "device": plan.device.name,
        "seen": {
            "first_batches": None if first_batches is None else asdict(first_batches),
            "footprints": estimate.known.to_dict(),
        },
        "keeps_rows": _keeps_rows(parts, plan),
    }


def _num_gpus(plan: RunPlan) -> int:
    return plan.trainer.devices if plan.on_gpu else 0

"""RunPlan: the value of every knob for this run on this machine, each with its reason and where it comes from.

Two steps, because the second needs the data and the model: `plan_device` fails before anything is read, `plan_run`
decides the rest. What nobody measured is a rule of thumb and marked ``predicted``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from wellfed.config.schema import (
    Accelerator,
    Allocator,
    Backend,
    Compile,
    FeatureMode,
    OnOom,
    RunConfig,
    Strategy,
)
from wellfed.errors import Fault
from wellfed.hardware.facts import GpuFacts, MachineFacts
from wellfed.hardware.profiles import resolve_budget, resolve_precision
from wellfed.units import GIB, gib, show_bytes

Source = Literal["set", "predicted", "measured"]
_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Most producers of a loader option; others stop at 8."""
CACHE_SHARE = 0.5
"""Largest part of the budget, or of free host memory, that a feature table may take; activations need the rest."""


@dataclass(frozen=True)
class Planned:
    """One decided number."""

    value: Any
    because: str
    source: Source


@dataclass(frozen=True)
class DataFacts:
    """What the plan needs to know of the data."""

    num_train: int
    has_fetch: bool
    is_iterable: bool = False
    feature_rows: int = 0
    feature_bytes: int = 0
    features_trainable: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of the model; bytes on the device."""

    parameter_bytes: int
    trainable_bytes: int
    optimizer_state_bytes: int
    has_batch_norm: bool = False
    is_lightning_module: bool = False


@dataclass(frozen=True)
class RunPlan:
    """All decisions of a run; ``knobs`` is what goes into run.json."""

    knobs: Mapping[str, Planned]
    budget_gib: float | None
    cap: bool
    device_name: str
    warnings: tuple[str, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    """Known device memory by what needs it, bytes; activations are not among them."""

    def __getitem__(self, knob: str) -> Any:
        """The decided value of a dotted knob."""
        return self.knobs[knob].value

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """``{dotted knob: {value, because, source}}``."""
        return {knob: asdict(planned) for knob, planned in self.knobs.items()}


def plan_device(config: RunConfig, choices: Mapping[str, str], facts: MachineFacts) -> RunPlan | list[Fault]:
    """Where and in which precision the run computes, or everything that this machine can't do."""
    trainer, gpu, profile = config.trainer, config.gpu, choices.get("gpu", "auto")
    cards = facts.training_gpus
    accelerator, why = _accelerator(trainer.accelerator, profile, cards)
    faults = _device_faults(config, facts, accelerator)
    card = cards[0] if accelerator == "gpu" and cards else None
    precision = resolve_precision(gpu.precision.value, card)
    if isinstance(precision, Fault):
        faults.append(precision)
    if faults or isinstance(precision, Fault):
        return faults
    budget = resolve_budget(
        profile if accelerator == "gpu" or profile != "auto" else "cpu",
        gpu.memory_gib,
        gpu.enforce,
        facts,
        num_devices=trainer.devices,
    )
    strategy = trainer.strategy.value
    if trainer.strategy is Strategy.auto and trainer.devices > 1:
        strategy = "ddp"
    on_gpu = accelerator == "gpu"
    knobs = {
        "trainer.accelerator": _planned(accelerator, why, trainer.accelerator is not Accelerator.auto),
        "trainer.devices": Planned(trainer.devices, f"trainer.devices={trainer.devices}", "set"),
        "trainer.strategy": _planned(
            strategy,
            "several devices: one process each" if strategy == "ddp" else "one device" if strategy == "auto" else "set",
            trainer.strategy is not Strategy.auto,
        ),
        "gpu.memory_gib": _planned(budget.budget_gib, budget.because, gpu.memory_gib is not None),
        "gpu.precision": _planned(precision.precision, precision.because, gpu.precision.value != "auto"),
        "gpu.tf32": Planned(gpu.tf32 and on_gpu, "as set" if on_gpu else "CUDA only", "set"),
        "gpu.compile": Planned(gpu.compile.value, "eager" if gpu.compile is Compile.none else "as set", "set"),
        "gpu.enforce": _planned(
            budget.cap,
            "holds a larger card to the budget" if budget.cap else "nothing to hold back",
            gpu.enforce is not None,
        ),
    }
    warnings = list(facts.warnings) + list(budget.warnings)
    if gpu.allocator is Allocator.expandable and not on_gpu:
        warnings.append("gpu.allocator=expandable has no effect on the CPU. Leave it at default there.")
    return RunPlan(knobs, budget.budget_gib, budget.cap, card.name if card else facts.cpu, tuple(warnings))


def _accelerator(asked: Accelerator, profile: str, cards: tuple[GpuFacts, ...]) -> tuple[str, str]:
    if asked is not Accelerator.auto:
        return asked.value, f"trainer.accelerator={asked.value}"
    if profile == "cpu":
        return "cpu", "gpu=cpu"
    if cards:
        return "gpu", f"{cards[0].describe()} is there"
    return "cpu", "no GPU that torch can use"


def _device_faults(config: RunConfig, facts: MachineFacts, accelerator: str) -> list[Fault]:
    devices, faults = config.trainer.devices, []
    num_cards = len(facts.training_gpus)
    if accelerator == "gpu" and num_cards == 0:
        why = facts.torch_problem or f"NVML: {facts.nvml_problem or 'no card'}"
        faults.append(
            Fault(
                "trainer.accelerator",
                f"gpu was asked for, and there is no GPU that torch can use ({why}).",
                "Set trainer.accelerator=auto to train on the CPU.",
            )
        )
    elif accelerator == "gpu" and devices > num_cards:
        faults.append(
            Fault(
                "trainer.devices",
                f"{devices} devices were asked for, and {num_cards} GPU(s) are visible.",
                f"Set trainer.devices={num_cards}, or make more visible with CUDA_VISIBLE_DEVICES.",
            )
        )
    cores = max(1, math.floor(facts.cpu_quota_cores))
    if accelerator == "cpu" and devices > cores:
        faults.append(
            Fault(
                "trainer.devices",
                f"{devices} processes were asked for, and this machine gives {facts.cpu_quota_cores:g} CPU cores.",
                f"Set trainer.devices={cores} or less.",
            )
        )
    if config.trainer.strategy is Strategy.fsdp and accelerator == "cpu":
        faults.append(
            Fault(
                "trainer.strategy",
                "fsdp shards over GPUs, and this run trains on the CPU.",
                "Set trainer.strategy=ddp, or trainer=default.",
            )
        )
    return faults


def plan_run(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    device: RunPlan,
    data: DataFacts,
    model: ModelFacts,
) -> RunPlan | list[Fault]:
    """The whole plan, or what is impossible now that data and model are known."""
    on_gpu = device["trainer.accelerator"] == "gpu"
    faults: list[Fault] = []
    warnings = list(device.warnings)
    knobs = dict(device.knobs)
    knobs.update(_plan_micro_batch(config, model, faults))
    knobs.update(_plan_features(config, facts, device, data, faults))
    knobs.update(_plan_loader(config, choices, facts, data, on_gpu, faults, warnings))
    if config.memory.on_oom is OnOom.retry and (model.is_lightning_module or device["trainer.devices"] > 1):
        why = "a LightningModule runs its own step" if model.is_lightning_module else "ranks must stay in step"
        knobs["memory.on_oom"] = Planned("fail", f"{why}: no retry inside a step", "predicted")
    else:
        knobs["memory.on_oom"] = Planned(
            config.memory.on_oom.value, f"memory.on_oom={config.memory.on_oom.value}", "set"
        )
    if faults:
        return faults
    parts = {
        "parameters": model.parameter_bytes,
        "gradients": model.trainable_bytes,
        "optimizer state": model.optimizer_state_bytes,
        "feature table": data.feature_bytes if knobs["memory.features"].value == "cache" else 0,
    }
    return RunPlan(knobs, device.budget_gib, device.cap, device.device_name, tuple(warnings), parts)


def _plan_micro_batch(config: RunConfig, model: ModelFacts, faults: list[Fault]) -> dict[str, Planned]:
    memory, effective, world = config.memory, config.workload.effective_batch_size, config.trainer.devices
    per_device = math.ceil(effective / world)
    if model.is_lightning_module:
        return _whole_batches(config, per_device, faults)
    share = f"{effective} samples a step" + (f" over {world} devices" if world > 1 else "")
    if memory.micro_batch is not None:
        micro = Planned(memory.micro_batch, f"memory.micro_batch={memory.micro_batch}", "set")
    elif memory.accumulate is not None:
        size = math.ceil(per_device / memory.accumulate)
        micro = Planned(size, f"{share} in memory.accumulate={memory.accumulate} parts", "set")
    elif memory.plateau_frac is not None and not model.has_batch_norm:
        size = max(1, per_device // 4)
        micro = Planned(size, f"a quarter of {share}: small first, no rate was measured", "predicted")
    else:
        micro = Planned(per_device, f"{share}, unsplit: out of memory would halve it", "predicted")
    num_micro = math.ceil(per_device / micro.value)
    if model.has_batch_norm and num_micro > 1:
        faults.append(
            Fault(
                "memory.micro_batch",
                f"{micro.value} would split {per_device} samples of a model with BatchNorm, whose statistics belong "
                "to the whole batch; the result would differ.",
                "Set memory.micro_batch=null and memory.accumulate=null, or replace BatchNorm by GroupNorm.",
            )
        )
    knobs = {
        "workload.effective_batch_size": Planned(effective, "the workload's; nothing else changes it", "set"),
        "memory.micro_batch": micro,
        "memory.accumulate": _planned(num_micro, f"ceil({per_device} / {micro.value})", memory.accumulate == num_micro),
        "memory.checkpoint_activations": _planned(
            bool(memory.checkpoint_activations),
            "as set" if memory.checkpoint_activations is not None else "not needed before memory runs out",
            memory.checkpoint_activations is not None,
        ),
    }
    return knobs


def _whole_batches(config: RunConfig, per_device: int, faults: list[Fault]) -> dict[str, Planned]:
    """A LightningModule runs its own step on what it is handed."""
    memory, why = config.memory, "a LightningModule runs its own step on whole batches"
    asked = {"micro_batch": memory.micro_batch, "accumulate": memory.accumulate}
    for name, value in asked.items():
        if value not in (None, per_device if name == "micro_batch" else 1):
            faults.append(
                Fault(
                    f"memory.{name}",
                    f"{value} would split a step, and {why}.",
                    f"Set memory.{name}=null, or bring a plain nn.Module with loss(batch).",
                )
            )
    return {
        "workload.effective_batch_size": Planned(config.workload.effective_batch_size, "the workload's", "set"),
        "memory.micro_batch": Planned(per_device, why, "predicted"),
        "memory.accumulate": Planned(1, why, "predicted"),
        "memory.checkpoint_activations": _planned(
            bool(memory.checkpoint_activations), "as set", memory.checkpoint_activations is not None
        ),
    }


def _plan_features(
    config: RunConfig, facts: MachineFacts, device: RunPlan, data: DataFacts, faults: list[Fault]
) -> dict[str, Planned]:
    asked = config.memory.features
    if data.feature_rows == 0:
        if asked is not None:
            return {
                "memory.features": Planned(None, f"memory.features={asked.value}: this workload has none", "predicted")
            }
        return {"memory.features": Planned(None, "this workload has none", "predicted")}
    size = f"{data.feature_rows:,} rows, {show_bytes(data.feature_bytes)}"
    if data.features_trainable:
        if asked not in (None, FeatureMode.dynamic):
            faults.append(
                Fault(
                    "memory.features",
                    f"{asked.value} would freeze features that are trained.",
                    "Set memory.features=dynamic, or train_encoder=false.",
                )
            )
        return {"memory.features": _planned("dynamic", "the encoder is trained", asked is not None)}
    if asked is not None:
        return {"memory.features": Planned(asked.value, f"memory.features={asked.value}; {size}", "set")}
    on_gpu = device["trainer.accelerator"] == "gpu"
    room = device.budget_gib if on_gpu and device.budget_gib is not None else facts.ram_available_gib
    where = "GPU budget" if on_gpu else "free memory"
    if gib(data.feature_bytes) <= CACHE_SHARE * room:
        because = f"frozen features, {size}: within {CACHE_SHARE:g} of {room:.1f} GiB {where}"
        return {"memory.features": Planned("cache", because, "predicted")}
    if on_gpu and gib(data.feature_bytes) <= CACHE_SHARE * facts.ram_available_gib:
        because = f"{size} is over {CACHE_SHARE:g} of the {room:.1f} GiB GPU budget; host memory holds it"
        return {"memory.features": Planned("cache_host", because, "predicted")}
    return {"memory.features": Planned("dynamic", f"{size} fits neither GPU budget nor host memory", "predicted")}


def _plan_loader(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    data: DataFacts,
    on_gpu: bool,
    faults: list[Fault],
    warnings: list[str],
) -> dict[str, Planned]:
    loader = config.loader
    cores = facts.cpu_quota_cores
    limit = _WORKER_LIMIT.get(choices.get("loader", ""), 8)
    per_rank = max(1, int(cores / config.trainer.devices) - 1)
    wants_ahead = bool(loader.num_workers) or (loader.num_workers is None and (loader.prefetch_factor or 0) > 0)
    backend = _backend(loader.backend, data, wants_ahead, loader.num_workers)
    if backend.value == "threads" and not data.has_fetch:
        faults.append(
            Fault(
                "loader.backend",
                "threads needs training data with fetch(indices, rng); this has only __getitem__.",
                "Set loader.backend=processes, or give the dataset fetch.",
            )
        )
    if backend.value == "inline" or data.is_iterable:
        num_workers = Planned(0, "built in the training process", "predicted")
    elif loader.num_workers is not None:
        num_workers = Planned(loader.num_workers, f"loader.num_workers={loader.num_workers}", "set")
    else:
        num_workers = Planned(
            min(limit, per_rank),
            f"max(1, {cores:g} cores / {config.trainer.devices} - 1), at most {limit}",
            "predicted",
        )
    if num_workers.value > cores:
        warnings.append(
            f"loader.num_workers={num_workers.value} is more than the {cores:g} CPU cores this process may use; "
            f"producers will take turns. loader.num_workers={per_rank} leaves one for the training process."
        )
    ahead = num_workers.value > 0
    prefetch = (
        _planned(
            loader.prefetch_factor or 2,
            "as set" if loader.prefetch_factor else "torch's default",
            loader.prefetch_factor is not None,
        )
        if ahead
        else Planned(None, "no producers", "predicted")
    )
    pin = loader.pin_memory if loader.pin_memory is not None else on_gpu
    if loader.device_prefetch and on_gpu:
        warnings.append(
            f"loader.device_prefetch={loader.device_prefetch} is not used: batches are copied on the compute stream."
        )
    return {
        "loader.backend": backend,
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": prefetch,
        "loader.persistent_workers": _planned(
            ahead and backend.value in ("torch", "processes") and loader.persistent_workers is not False,
            "worker processes live on between epochs" if ahead else "no worker processes",
            loader.persistent_workers is not None,
        ),
        "loader.pin_memory": _planned(
            pin and on_gpu,
            "copies to the GPU overlap" if pin and on_gpu else "nothing to copy to" if not on_gpu else "as set",
            loader.pin_memory is not None and on_gpu,
        ),
        "loader.device_prefetch": Planned(
            0, "copied on the compute stream" if on_gpu else "no device to copy to", "predicted"
        ),
        "loader.timeout_s": _planned(
            loader.timeout_s or 0, "as set" if loader.timeout_s else "waits for ever", loader.timeout_s is not None
        ),
        "loader.worker_threads": Planned(
            loader.worker_threads, "torch threads a producer" if loader.worker_threads else "torch's default", "set"
        ),
    }


def _backend(asked: Backend, data: DataFacts, wants_ahead: bool, num_workers: int | None) -> Planned:
    if asked is not Backend.auto:
        return Planned(asked.value, f"loader.backend={asked.value}", "set")
    if data.is_iterable:
        return Planned("inline", "the data is an iterable with its own batches", "predicted")
    if num_workers == 0:
        return Planned("inline" if data.has_fetch else "torch", "loader.num_workers=0", "predicted")
    if data.has_fetch:
        if wants_ahead:
            return Planned("threads", "whole batches by fetch, built ahead as asked", "predicted")
        return Planned("inline", "whole batches by fetch cost less than handing them over", "predicted")
    return Planned("processes", "samples one by one hold Python's lock: processes", "predicted")


def _planned(value: Any, because: str, is_set: bool) -> Planned:
    return Planned(value, because, "set" if is_set else "predicted")


def known_gib(plan: RunPlan) -> float:
    """GiB of device memory that the plan can account for; activations come on top."""
    return sum(plan.parts.values()) / GIB

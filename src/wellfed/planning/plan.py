"""RunPlan: the value of every knob for this run on this machine, each with its reason and where it comes from.

Two steps, because the second needs the data and the model: `plan_device` fails before anything is read, `plan_run`
decides the rest. What nobody measured is a rule of thumb and marked ``predicted``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from wellfed.config.schema import (
    Accelerator,
    Allocator,
    Backend,
    Compile,
    FeatureMode,
    LoaderConfig,
    OnOom,
    RunConfig,
    Strategy,
    TelemetryConfig,
)
from wellfed.errors import Fault
from wellfed.hardware.facts import GpuFacts, MachineFacts
from wellfed.hardware.profiles import Budget, resolve_budget, resolve_precision
from wellfed.units import gib, show_bytes

Source = Literal["set", "predicted", "measured"]
_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Most producers of a loader option."""
_MOST_WORKERS = 8
"""Most producers of the others."""
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
    on_gpu = accelerator == "gpu"
    faults = _device_faults(config, facts, accelerator, profile)
    card = cards[0] if on_gpu and cards else None
    precision = resolve_precision(gpu.precision.value, card)
    if isinstance(precision, Fault):
        faults.append(precision)
    if faults or isinstance(precision, Fault):
        return faults
    budget = _budget(config, profile, facts, on_gpu)
    knobs = {
        "trainer.accelerator": _planned(accelerator, why, trainer.accelerator is not Accelerator.auto),
        "trainer.devices": Planned(trainer.devices, f"trainer.devices={trainer.devices}", "set"),
        "trainer.strategy": _strategy(trainer.strategy, trainer.devices),
        "gpu.memory_gib": _planned(budget.budget_gib, budget.because, gpu.memory_gib is not None),
        "gpu.precision": _planned(precision.precision, precision.because, gpu.precision.value != "auto"),
        "gpu.tf32": _planned(
            gpu.tf32 and on_gpu,
            f"gpu.tf32={str(gpu.tf32).lower()}" if on_gpu else "trains on the CPU, and TF32 is CUDA's",
            on_gpu,
        ),
        "gpu.compile": Planned(
            gpu.compile.value,
            "gpu.compile=none: eager, no compile time"
            if gpu.compile is Compile.none
            else f"gpu.compile={gpu.compile.value}",
            "set",
        ),
        "gpu.enforce": _enforce(budget, gpu.enforce, on_gpu),
    }
    warnings = list(facts.warnings) + list(budget.warnings)
    if gpu.allocator is Allocator.expandable and not on_gpu:
        warnings.append("gpu.allocator=expandable has no effect on the CPU. Leave it at default there.")
    return RunPlan(knobs, budget.budget_gib, budget.cap, card.name if card else facts.cpu, tuple(warnings))


def _budget(config: RunConfig, profile: str, facts: MachineFacts, on_gpu: bool) -> Budget:
    """Training on the CPU beside a card caps nothing, but a card that was named is still planned for."""
    gpu, beside_a_card = config.gpu, not on_gpu and bool(facts.training_gpus)
    name = "cpu" if beside_a_card and profile == "auto" else profile
    budget = resolve_budget(name, gpu.memory_gib, gpu.enforce, facts, num_devices=config.trainer.devices)
    if not beside_a_card or name == "cpu":
        return budget
    warning = (
        f"gpu={profile}: trainer.accelerator=cpu trains on the CPU; the {budget.budget_gib:g} GiB budget is planned "
        "with and not enforced. trainer.accelerator=auto uses the card."
    )
    return replace(budget, cap=False, warnings=(warning,))


def _strategy(asked: Strategy, devices: int) -> Planned:
    if asked is not Strategy.auto:
        return Planned(asked.value, f"trainer.strategy={asked.value}", "set")
    if devices > 1:
        return Planned("ddp", f"{devices} devices: a process for each", "predicted")
    return Planned("auto", "one device: nothing to share out", "predicted")


def _enforce(budget: Budget, asked: bool | None, on_gpu: bool) -> Planned:
    if not on_gpu:
        because = "trains on the CPU: there is no GPU memory to hold back"
    elif asked is not None:
        because = f"gpu.enforce={str(asked).lower()}"
    elif budget.cap:
        because = "holds this card to the budget of the one that was named"
    else:
        because = "the budget is what this card has"
    return _planned(budget.cap, because, asked is not None and budget.cap == asked)


def _accelerator(asked: Accelerator, profile: str, cards: tuple[GpuFacts, ...]) -> tuple[str, str]:
    if asked is not Accelerator.auto:
        return asked.value, f"trainer.accelerator={asked.value}"
    if profile == "cpu":
        return "cpu", "gpu=cpu"
    if cards:
        return "gpu", f"{cards[0].describe()} is there"
    return "cpu", "no GPU that torch can use"


def _device_faults(config: RunConfig, facts: MachineFacts, accelerator: str, profile: str) -> list[Fault]:
    devices, faults = config.trainer.devices, []
    num_cards = len(facts.training_gpus)
    if accelerator == "gpu" and profile == "cpu":
        faults.append(
            Fault(
                "trainer.accelerator",
                "gpu was asked for, and gpu=cpu says to train on the CPU.",
                "Set gpu=auto, or trainer.accelerator=auto.",
            )
        )
    elif accelerator == "gpu" and num_cards == 0:
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
    warnings = [*device.warnings, *_not_used_yet(config)]
    knobs = dict(device.knobs)
    knobs.update(_plan_micro_batch(config, model, faults))
    knobs.update(_plan_features(config, facts, device=device, data=data, faults=faults, warnings=warnings))
    knobs.update(_plan_loader(config, choices, facts, data=data, on_gpu=on_gpu, faults=faults, warnings=warnings))
    knobs["memory.on_oom"] = _on_oom(config.memory.on_oom, device["trainer.devices"], model)
    parts = _known_parts(device["gpu.precision"], model, data, knobs["memory.features"].value)
    if on_gpu and device["trainer.strategy"] != "fsdp":
        faults += _parts_faults(parts, device.budget_gib)
    if faults:
        return faults
    return RunPlan(knobs, device.budget_gib, device.cap, device.device_name, tuple(warnings), parts)


def _not_used_yet(config: RunConfig) -> list[str]:
    """Knobs of the contract that nothing acts on so far, where they were set."""
    said = []
    if config.memory.stages:
        said.append("memory.stages is not used yet: the feature mode stays the same throughout. Set memory.features.")
    if config.loader.max_skipped:
        said.append(
            f"loader.max_skipped={config.loader.max_skipped} is not used yet: a sample that fails ends the run. "
            "loader.skip_ids leaves out known bad ones."
        )
    if config.telemetry.interval_s != TelemetryConfig.interval_s:
        said.append(
            f"telemetry.interval_s={config.telemetry.interval_s:g} is not used yet: nothing samples the machine."
        )
    return said


def _on_oom(asked: OnOom, devices: int, model: ModelFacts) -> Planned:
    """Whether a step that ran out of memory is done again in smaller parts."""
    why = None
    if model.is_lightning_module:
        why = "a LightningModule runs its own step"
    elif model.has_batch_norm:
        why = "BatchNorm's statistics belong to the whole batch, which is never split"
    elif devices > 1:
        why = "ranks must stay in step"
    if asked is OnOom.fail or why is None:
        return Planned(asked.value, f"memory.on_oom={asked.value}", "set")
    return Planned("fail", f"{why}: no retry inside a step", "predicted")


def _known_parts(precision: str, model: ModelFacts, data: DataFacts, features: str | None) -> dict[str, int]:
    """Bytes on the device by what needs them, activations aside."""
    halves = 2 if precision == "bf16-true" else 1  # Lightning turns the whole model into bf16 then
    return {
        "parameters": model.parameter_bytes // halves,
        "gradients": model.trainable_bytes // halves,
        "optimizer state": model.optimizer_state_bytes // halves,
        "feature table": data.feature_bytes if features == "cache" else 0,
    }


def _parts_faults(parts: Mapping[str, int], budget_gib: float | None) -> list[Fault]:
    if budget_gib is None or gib(sum(parts.values())) <= budget_gib:
        return []
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
    way_out = "memory.features=cache_host or dynamic" if parts["feature table"] else "gpu.precision=bf16-true"
    return [
        Fault(
            "gpu.memory_gib",
            f"the budget is {budget_gib:.1f} GiB, and before any activation there is need of "
            f"{show_bytes(sum(parts.values()))} ({listed}).",
            f"Set {way_out}, or take a smaller workload.model or a larger card.",
        )
    ]


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
        micro = Planned(size, f"a quarter of {share}: the rate at each size was not measured", "predicted")
    else:
        may_split = memory.on_oom is OnOom.retry and world == 1 and not model.has_batch_norm
        rest = "unsplit until memory runs out" if may_split else "unsplit"
        micro = Planned(per_device, f"{share}, {rest}", "predicted")
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
    return {
        "workload.effective_batch_size": Planned(effective, "the workload's; nothing else changes it", "set"),
        "memory.micro_batch": micro,
        "memory.accumulate": _accumulate(memory.accumulate, num_micro, per_device, micro.value),
        "memory.checkpoint_activations": _planned(
            bool(memory.checkpoint_activations),
            _as_set("memory.checkpoint_activations", memory.checkpoint_activations)
            or "off: it costs about a third more compute",
            memory.checkpoint_activations is not None,
        ),
    }


def _accumulate(asked: int | None, num_micro: int, per_device: int, micro: int) -> Planned:
    sums = f"{per_device} samples a device in micro-batches of {micro}"
    if asked is None or asked == num_micro:
        return _planned(num_micro, sums, asked is not None)
    return Planned(num_micro, f"{sums}: memory.accumulate={asked} has no equal parts here", "predicted")


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
            bool(memory.checkpoint_activations),
            _as_set("memory.checkpoint_activations", memory.checkpoint_activations) or "off: it costs compute",
            memory.checkpoint_activations is not None,
        ),
    }


def _plan_features(
    config: RunConfig,
    facts: MachineFacts,
    *,
    device: RunPlan,
    data: DataFacts,
    faults: list[Fault],
    warnings: list[str],
) -> dict[str, Planned]:
    asked = config.memory.features
    if data.feature_rows == 0:
        if asked is not None:
            warnings.append(
                f"memory.features={asked.value} has no effect: this workload offers no features. "
                "Set memory.features=null."
            )
        return {"memory.features": Planned(None, "this workload offers no features", "predicted")}
    size = f"{data.feature_rows:,} rows, {show_bytes(data.feature_bytes)}"
    if data.features_trainable:
        if asked not in (None, FeatureMode.dynamic):
            faults.append(
                Fault(
                    "memory.features",
                    f"{asked.value} would freeze features that are trained.",
                    "Set memory.features=dynamic, or workload.model.train_encoder=false.",
                )
            )
        return {"memory.features": _planned("dynamic", "the encoder is trained", asked is not None)}
    if asked is not None:
        return {"memory.features": Planned(asked.value, f"memory.features={asked.value}; {size}", "set")}
    on_gpu = device["trainer.accelerator"] == "gpu"
    table_gib, budget_gib, ram_gib = gib(data.feature_bytes), device.budget_gib, facts.ram_available_gib
    fits_host = table_gib <= CACHE_SHARE * ram_gib
    # On a CPU the table is in host memory either way; the budget of a card that was named decides all the same.
    if budget_gib is not None and table_gib > CACHE_SHARE * budget_gib:
        over = f"{size}, is more than {CACHE_SHARE:g} of the {budget_gib:.1f} GiB GPU budget"
        if fits_host:
            return {"memory.features": Planned("cache_host", f"{over}, and host memory holds it", "predicted")}
        return {"memory.features": Planned("dynamic", f"{over} and of {ram_gib:.1f} GiB free host memory", "predicted")}
    if not on_gpu and not fits_host:
        because = f"{size}, is more than {CACHE_SHARE:g} of {ram_gib:.1f} GiB free host memory"
        return {"memory.features": Planned("dynamic", because, "predicted")}
    room = f"{ram_gib:.1f} GiB free host memory" if budget_gib is None else f"the {budget_gib:.1f} GiB GPU budget"
    because = f"frozen features, {size}, within {CACHE_SHARE:g} of {room}"
    return {"memory.features": Planned("cache", because, "predicted")}


def _plan_loader(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    data: DataFacts,
    on_gpu: bool,
    faults: list[Fault],
    warnings: list[str],
) -> dict[str, Planned]:
    loader = config.loader
    backend = _backend(loader, data, warnings)
    if backend.value == "threads" and not data.has_fetch:
        faults.append(
            Fault(
                "loader.backend",
                "threads needs training data with fetch(indices, rng); this has only __getitem__.",
                "Set loader.backend=processes, or give the dataset fetch.",
            )
        )
    num_workers = _num_workers(config, choices, facts, backend=backend.value, data=data, warnings=warnings)
    builds_ahead = num_workers.value > 0
    has_processes = builds_ahead and backend.value in ("torch", "processes")
    if loader.device_prefetch and on_gpu:
        warnings.append(
            f"loader.device_prefetch={loader.device_prefetch} is not used: batches are copied on the compute stream."
        )
    return {
        "loader.backend": backend,
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": _planned(
            loader.prefetch_factor or 2,
            _as_set("loader.prefetch_factor", loader.prefetch_factor) or "torch's default",
            loader.prefetch_factor is not None,
        )
        if builds_ahead
        else Planned(None, "nobody builds ahead", "predicted"),
        "loader.persistent_workers": _persistent(loader.persistent_workers, has_processes),
        "loader.pin_memory": _pin(loader.pin_memory, on_gpu),
        "loader.device_prefetch": Planned(
            0, "copied on the compute stream" if on_gpu else "no device to copy to", "predicted"
        ),
        "loader.timeout_s": _planned(
            loader.timeout_s or 0,
            _as_set("loader.timeout_s", loader.timeout_s) or "waits for ever",
            loader.timeout_s is not None,
        )
        if builds_ahead
        else Planned(0, "built when asked for: there is no producer to wait for", "predicted"),
        "loader.worker_threads": _planned(
            loader.worker_threads,
            _as_set("loader.worker_threads", loader.worker_threads) or "torch's default: one in a worker process",
            loader.worker_threads is not None,
        )
        if has_processes
        else Planned(None, "no worker processes: the training process has one count of threads", "predicted"),
    }


def _backend(loader: LoaderConfig, data: DataFacts, warnings: list[str]) -> Planned:
    asked = loader.backend
    if data.is_iterable:
        if asked not in (Backend.auto, Backend.inline):
            warnings.append(
                f"loader.backend={asked.value} is not used: the training data is an iterable, which makes its own "
                "batches. Give it __getitem__ and __len__ for producers."
            )
        return Planned("inline", "the training data is an iterable with its own batches", "predicted")
    if asked is not Backend.auto:
        return Planned(asked.value, f"loader.backend={asked.value}", "set")
    if loader.num_workers == 0:
        name = "inline" if data.has_fetch else "torch"
        return Planned(name, "loader.num_workers=0: built in the training process", "predicted")
    if not data.has_fetch:
        return Planned("processes", "only __getitem__: Python's lock would let threads take turns", "predicted")
    if loader.num_workers or loader.prefetch_factor:
        ahead = _as_set("loader.num_workers", loader.num_workers) or f"loader.prefetch_factor={loader.prefetch_factor}"
        return Planned("threads", f"fetch gives whole batches, and {ahead} asks for some ahead", "predicted")
    return Planned("inline", "fetch gives whole batches: cheaper built than handed over", "predicted")


def _num_workers(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    backend: str,
    data: DataFacts,
    warnings: list[str],
) -> Planned:
    asked, devices, cores = config.loader.num_workers, config.trainer.devices, facts.cpu_quota_cores
    if data.is_iterable and asked:
        warnings.append(f"loader.num_workers={asked} is not used: the training data is an iterable.")
    if backend == "inline":
        return _planned(0, "built in the training process", asked == 0)
    own = max(1, int(cores / devices) - 1)
    if asked is None:
        limit = _WORKER_LIMIT.get(choices.get("loader", ""), _MOST_WORKERS)
        each = f"{cores:g} cores" if devices == 1 else f"{cores:g} cores / {devices} devices"
        return Planned(min(limit, own), f"{each} less one for training, at least 1, at most {limit}", "predicted")
    if asked * devices > cores and asked > own:
        each = "" if devices == 1 else f" on each of {devices} devices"
        warnings.append(
            f"loader.num_workers={asked}{each} is more than the {cores:g} CPU cores this process may use; "
            f"producers will take turns. loader.num_workers={own} leaves one for the training process."
        )
    return Planned(asked, f"loader.num_workers={asked}", "set")


def _persistent(asked: bool | None, has_processes: bool) -> Planned:
    if not has_processes:
        return Planned(False, "no worker processes", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.persistent_workers={str(asked).lower()}", "set")
    return Planned(True, "worker processes live on from epoch to epoch", "predicted")


def _pin(asked: bool | None, on_gpu: bool) -> Planned:
    if not on_gpu:
        return Planned(False, "no GPU to copy to", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.pin_memory={str(asked).lower()}", "set")
    return Planned(True, "copies from page-locked memory run beside the host", "predicted")


def _as_set(knob: str, value: Any) -> str:
    """``knob=value`` as typed; empty for a knob that was left to the plan."""
    return "" if value is None else f"{knob}={str(value).lower()}"


def _planned(value: Any, because: str, is_set: bool) -> Planned:
    return Planned(value, because, "set" if is_set else "predicted")

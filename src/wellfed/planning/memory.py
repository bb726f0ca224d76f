"""How memory is spent: micro-batches, feature tables, what is known to fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wellfed.config.schema import FeatureMode, OnOom, RunConfig, Strategy
from wellfed.errors import Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.planning.planned import DataFacts, ModelFacts, Planned, RunPlan, as_set, planned
from wellfed.units import gib, show_bytes

CACHE_SHARE = 0.5
"""Largest part of the budget, or of free host memory, that a feature table may take; activations need the rest."""


def plan_on_oom(asked: OnOom, strategy: str, model: ModelFacts) -> Planned:
    """Whether a step that ran out of memory is done again in smaller parts."""
    why = None
    if model.is_lightning_module:
        why = "a LightningModule runs its own step"
    elif model.has_batch_norm:
        why = "BatchNorm's statistics belong to the whole batch, which is never split"
    elif strategy == "fsdp":
        why = "a rank that fails within a sharded model's passes leaves the others waiting"
    elif strategy == "ddp" and model.has_sparse_gradients:
        why = "sparse gradients are summed by DDP itself, during the backward pass"
    if asked is OnOom.retry and strategy == "ddp" and why is None:
        because = "memory.on_oom=retry: gradients are summed after the backward pass; fail has DDP sum them during it"
        return Planned("retry", because, "set")
    if asked is OnOom.fail or why is None:
        return Planned(asked.value, f"memory.on_oom={asked.value}", "set")
    return Planned("fail", f"{why}: no retry inside a step", "predicted")


def known_parts(precision: str, model: ModelFacts, data: DataFacts, features: str | None) -> dict[str, int]:
    """Bytes on the device by what needs them, activations aside."""
    halves = 2 if precision == "bf16-true" else 1  # Lightning turns the whole model into bf16 then
    return {
        "parameters": model.parameter_bytes // halves,
        "gradients": model.trainable_bytes // halves,
        "optimizer state": model.optimizer_state_bytes // halves,
        "feature table": data.feature_bytes if features == "cache" else 0,
    }


def parts_faults(parts: Mapping[str, int], budget_gib: float | None, precision: str) -> list[Fault]:
    """The fault where what is known alone is more than the budget."""
    if budget_gib is None or gib(sum(parts.values())) <= budget_gib:
        return []
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
    way_out = _less_to_hold(parts, budget_gib, precision)
    return [
        Fault(
            "gpu.memory_gib",
            f"the budget is {budget_gib:.1f} GiB, and before any activation there is need of "
            f"{show_bytes(sum(parts.values()))} ({listed}).",
            f"Set {way_out}, or take a smaller workload.model or a larger card."
            if way_out
            else "Take a smaller workload.model or a larger card.",
        )
    ]


def _less_to_hold(parts: Mapping[str, int], budget_gib: float, precision: str) -> str:
    """Overrides with which what is known alone is within the budget; empty if there are none."""
    table = parts["feature table"]
    rest_gib = gib(sum(parts.values()) - table)
    typed = ["memory.features=cache_host or dynamic"] if table else []
    if rest_gib > budget_gib:
        if precision == "bf16-true" or rest_gib / 2 > budget_gib:
            return ""
        typed.append("gpu.precision=bf16-true")
    return " and ".join(typed)


def plan_micro_batch(config: RunConfig, model: ModelFacts, faults: list[Fault]) -> dict[str, Planned]:
    """How a step is split; what can't be goes into ``faults``."""
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
        may_split = memory.on_oom is OnOom.retry and config.trainer.strategy is not Strategy.fsdp
        may_split = may_split and not model.has_batch_norm
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
        "memory.checkpoint_activations": planned(
            bool(memory.checkpoint_activations),
            as_set("memory.checkpoint_activations", memory.checkpoint_activations)
            or "off: it costs about a third more compute",
            memory.checkpoint_activations is not None,
        ),
    }


def _accumulate(asked: int | None, num_micro: int, per_device: int, micro: int) -> Planned:
    sums = f"{per_device} samples a device in micro-batches of {micro}"
    if asked is None or asked == num_micro:
        return planned(num_micro, sums, asked is not None)
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
        "memory.checkpoint_activations": planned(
            bool(memory.checkpoint_activations),
            as_set("memory.checkpoint_activations", memory.checkpoint_activations) or "off: it costs compute",
            memory.checkpoint_activations is not None,
        ),
    }


def plan_features(
    config: RunConfig,
    facts: MachineFacts,
    *,
    device: RunPlan,
    data: DataFacts,
    faults: list[Fault],
    warnings: list[str],
) -> dict[str, Planned]:
    """Where features live; what can't be goes into ``faults``, what is ignored into ``warnings``."""
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
        return {"memory.features": planned("dynamic", "the encoder is trained", asked is not None)}
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

"""Decides all numbers of a run, once data and model are known.

`device.plan_device` runs earlier, before anything is read. Numbers that were not measured are rules of thumb, marked
``predicted``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from wellfed.config.schema import Compile, Precision, RunConfig, ScheduleConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError, Fault
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.budget import Estimate, by_known_bytes, within_budget
from wellfed.plan.loader import LoaderPlanner
from wellfed.plan.memory import BY_HAND, fits_host, may_lower, memory_faults, memory_warnings, plan_memory
from wellfed.plan.run_plan import DataFacts, Decided, DevicePlan, ModelFacts, RunPlan, WorkloadSection, by_rule

_COPIED = "Lightning's Trainer copies each batch when its step begins"


def plan_run(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    device: DevicePlan,
    data: DataFacts,
    model: ModelFacts,
    first: FirstBatches | None = None,
    estimate: Estimate | None = None,
) -> RunPlan:
    """Returns the whole plan.

    Args:
        first: measurements of the first batches; None = rules of thumb choose the loader.
        estimate: device memory of the model. None = only bytes known before the first step count. A plan that does not
            fit is returned with its ``misfit``.

    Raises:
        ConfigError: a setting is impossible with this data and model; DoesNotFit if the known bytes exceed a card.
    """
    if model.brings_step and config.gpu.precision is Precision.auto:
        precision = by_rule("32-true", "a LightningModule trains as under Lightning's defaults")
        device = replace(device, device=device.device.but(precision=precision))
    loading = LoaderPlanner(config, choices, facts, data, device.on_gpu, first)
    loader = loading.section()
    memory = plan_memory(config, facts, device, data, model)
    faults = [
        *memory_faults(config, choices, memory, data, model),
        *loading.faults(loader),
        *_lightning_module_faults(config, model),
    ]
    if faults:
        raise ConfigError(faults)
    warnings = [*device.warnings, *memory_warnings(config, data, model), *loading.warnings(loader)]
    if model.brings_step:
        warnings += _unused_by_lightning_module(config)
    if model.whole_steps and loader.device_prefetch:
        loader = loader.but(device_prefetch=by_rule(0, _COPIED))
    plan = RunPlan(
        device.trainer,
        device.device,
        tuple(warnings),
        WorkloadSection.of({"effective_batch_size": _effective(config.workload.samples_per_step, data)}),
        memory,
        loader,
        derived={knob: Decided(value, because, "data") for knob, (value, because) in data.derived.items()},
        callbacks=_callbacks(config),
        may_lower=may_lower(config, model),
        refused=_refused(model, data),
        feature_table_bytes=0 if data.features_trainable else data.feature_bytes,
    )
    is_within_host = fits_host(config, facts, data)
    if estimate is not None:
        profile = choices.get("gpu", "auto")
        plan = within_budget(plan, config, profile, data, model, estimate, fits_host=is_within_host)
    if plan.predicted_peak_gib is None:
        plan = by_known_bytes(plan, data, model, fits_host=is_within_host)
    return plan


def _callbacks(config: RunConfig) -> Decided[str] | None:
    names = [name for name, node in (config.callbacks or {}).items() if node is not None]
    return Decided(", ".join(names), "called where Lightning calls them", "set") if names else None


def _unused_by_lightning_module(config: RunConfig) -> Iterator[str]:
    if config.workload.optimizer is not None:
        yield "workload.optimizer is not used: a LightningModule configures its own. Set workload.optimizer=null."
    if config.workload.schedule != ScheduleConfig() or config.workload.schedule.target is not None:
        yield "workload.schedule is not used: a LightningModule configures its own schedulers."


def _effective(size: int, data: DataFacts) -> Decided[int]:
    own = None if data.own_loader is None else data.own_loader.batch_size
    if size == 0:
        because = "unknown before Lightning reads the loaders"
    elif own is None and data.own_loader is not None and data.own_loader.has_own_batches:
        because = "the samples of a step to plan with; its batch sampler decides them"
    elif own is None:
        because = "the workload's; nothing else changes it"
    elif own == size:
        because = "its DataLoader, as it came; nothing else changes it"
    else:
        because = f"workload.effective_batch_size={size}, in place of the DataLoader's {own}"
    return Decided(size, because, "set")


def _refused(model: ModelFacts, data: DataFacts) -> tuple[str, ...]:
    """Returns the knobs that this model or its data refuse or do not use."""
    own = data.own_loader
    refuses = {
        "gpu.compile": model.steps_by_hand,
        "trainer.gradient_clip": model.whole_steps and (model.steps_by_hand or model.has_sparse_gradients),
        "loader.device_prefetch": model.whole_steps,
        "loader.num_workers": own is not None and own.is_fixed,
        "workload.effective_batch_size": own is not None and (own.is_fixed or own.has_own_batches),
    }
    return tuple(knob for knob, is_refused in refuses.items() if is_refused)


def _lightning_module_faults(config: RunConfig, model: ModelFacts) -> Iterator[Fault]:
    if not model.whole_steps:
        return
    if config.trainer.on_nan.value == "skip":
        way_out = "Leave it out, and return None from training_step for a loss that is NaN or infinite."
        yield Fault("trainer.on_nan=skip", "Lightning makes the steps of this run.", way_out)
    clip = config.trainer.gradient_clip
    if model.steps_by_hand and config.gpu.compile is not Compile.none:
        way_out = "Set gpu.compile=none, and compile its networks in __init__: self.net = torch.compile(self.net)."
        yield Fault("gpu.compile", f"{config.gpu.compile.value} compiles training_step, and {BY_HAND}.", way_out)
    if clip is not None and model.steps_by_hand:
        way_out = "Set trainer.gradient_clip=null, and call self.clip_gradients in training_step."
        yield Fault("trainer.gradient_clip", f"{clip:g} clips before an optimizer step, and {BY_HAND}.", way_out)
    elif clip is not None and model.has_sparse_gradients:
        problem = f"{clip:g} can't limit the sparse gradients of a LightningModule."
        way_out = "Set trainer.gradient_clip=null, or leave out sparse=True of its layers."
        yield Fault("trainer.gradient_clip", problem, way_out)

"""RunPlan: the value of every knob for this run on this machine, each with its reason and where it comes from.

Two steps, because the second needs the data and the model: `device.plan_device` fails before anything is read,
`plan_run` decides the rest. What nobody measured is a rule of thumb and marked ``predicted``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wellfed.config.schema import RunConfig
from wellfed.errors import Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.loading.first_batches import FirstBatches
from wellfed.planning.budget import Fitted, within_budget
from wellfed.planning.evaluation import plan_eval_workers
from wellfed.planning.guest import guest_faults
from wellfed.planning.loader import plan_loader
from wellfed.planning.memory import known_parts, parts_faults, plan_features, plan_micro_batch, plan_on_oom
from wellfed.planning.memory_candidates import Estimate
from wellfed.planning.planned import DataFacts, ModelFacts, RunPlan


def plan_run(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    device: RunPlan,
    data: DataFacts,
    model: ModelFacts,
    first: FirstBatches | None = None,
    estimate: Estimate | None = None,
) -> RunPlan | list[Fault]:
    """The whole plan, or what is impossible now that data and model are known.

    Args:
        first: what the first batches showed; without it rules of thumb choose the loader.
        estimate: what the model needs of device memory; without it only what is known before the first step counts.
            A plan that does not fit then is still a plan, with its ``misfit``.
    """
    on_gpu = device["trainer.accelerator"] == "gpu"
    faults: list[Fault] = []
    warnings = [*device.warnings, *_not_used_yet(config)]
    knobs = dict(device.knobs)
    knobs.update(plan_micro_batch(config, model, faults))
    knobs.update(plan_features(config, facts, device=device, data=data, faults=faults, warnings=warnings))
    knobs.update(
        plan_loader(config, choices, facts, data=data, on_gpu=on_gpu, faults=faults, warnings=warnings, first=first)
    )
    faults += _skipping_faults(config, data, warnings)
    faults += guest_faults(config, model, warnings)
    knobs["memory.on_oom"] = plan_on_oom(config.memory.on_oom, device["trainer.strategy"], model)
    if faults:
        return faults
    fitted = Fitted()
    if estimate is not None:
        profile = choices.get("gpu", "auto")
        fitted = within_budget(
            config, knobs, device.budget_gib, profile, data, model, estimate, workspaces=device.workspaces
        )
        knobs.update(fitted.knobs)
        warnings += fitted.warnings
    eval_workers = plan_eval_workers(config, facts, knobs=knobs, data=data, warnings=warnings, first=first)
    plan = replace(device, knobs=knobs, warnings=tuple(warnings), eval_workers=eval_workers)
    if fitted.way is not None:
        peak = fitted.way.peak
        return replace(
            plan,
            parts=peak.parts,
            predicted_peak_gib=fitted.way.peak_gib,
            peak_moment=peak.moment,
            misfit=fitted.misfit,
            remedies=fitted.remedies,
        )
    precision = device["gpu.precision"]
    parts = known_parts(precision, model, data, knobs["memory.features"].value)
    if on_gpu and device["trainer.strategy"] != "fsdp":
        faults += parts_faults(parts, device.budget_gib, precision)
    if faults:
        return faults
    return replace(plan, parts=parts)


def _skipping_faults(config: RunConfig, data: DataFacts, warnings: list[str]) -> list[Fault]:
    most, devices = config.loader.max_skipped, config.trainer.devices
    if not most:
        return []
    if data.is_iterable:
        warnings.append(
            f"loader.max_skipped={most} is not used: the training data is an iterable, with its own errors."
        )
        return []
    if devices == 1:
        return []
    problem = f"{most} with trainer.devices={devices}: a rank does not know that another left out a sample of the step."
    return [Fault("loader.max_skipped", problem, "Set loader.max_skipped=0 and loader.skip_ids=[...], or one device.")]


def _not_used_yet(config: RunConfig) -> list[str]:
    """Knobs of the contract that nothing acts on so far, where they were set."""
    said = []
    if config.memory.stages:
        said.append("memory.stages is not used yet: the feature mode stays the same throughout. Set memory.features.")
    return said

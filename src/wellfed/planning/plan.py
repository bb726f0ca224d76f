"""RunPlan: the value of every knob for this run on this machine, each with its reason and where it comes from.

Two steps, because the second needs the data and the model: `device.plan_device` fails before anything is read,
`plan_run` decides the rest. What nobody measured is a rule of thumb and marked ``predicted``.
"""

from __future__ import annotations

from collections.abc import Mapping

from wellfed.config.schema import PathsConfig, RunConfig
from wellfed.errors import Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.planning.loader import plan_loader
from wellfed.planning.memory import known_parts, parts_faults, plan_features, plan_micro_batch, plan_on_oom
from wellfed.planning.planned import DataFacts, ModelFacts, RunPlan


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
    knobs.update(plan_micro_batch(config, model, faults))
    knobs.update(plan_features(config, facts, device=device, data=data, faults=faults, warnings=warnings))
    knobs.update(plan_loader(config, choices, facts, data=data, on_gpu=on_gpu, faults=faults, warnings=warnings))
    knobs["memory.on_oom"] = plan_on_oom(config.memory.on_oom, device["trainer.devices"], model)
    parts = known_parts(device["gpu.precision"], model, data, knobs["memory.features"].value)
    if on_gpu and device["trainer.strategy"] != "fsdp":
        faults += parts_faults(parts, device.budget_gib)
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
    if config.paths.cache_dir != PathsConfig.cache_dir:
        said.append(f"paths.cache_dir={config.paths.cache_dir} is not used yet: nothing is cached on disk.")
    return said

"""Decides the device and the precision of a run, before any data is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from wellfed.config.schema import Accelerator, Allocator, Compile, RunConfig, Strategy
from wellfed.errors import ConfigError, Fault
from wellfed.observe.hardware.profiles import (
    BUDGET_FRAC,
    PROFILES,
    Budget,
    least_capable,
    resolve_budget,
    resolve_precision,
)
from wellfed.observe.machine_facts import GpuFacts, MachineFacts
from wellfed.plan.run_plan import Decided, DevicePlan, DeviceSection, TrainerSection, by_rule
from wellfed.units import counted

LEAST_GIB = 0.5
"""Minimum memory of a card to train on; CUDA's own context takes that much."""


def plan_device(config: RunConfig, choices: Mapping[str, str], facts: MachineFacts) -> DevicePlan:
    """Returns device and precision of the run.

    Raises:
        ConfigError: all settings that are impossible on this machine.
    """
    trainer, gpu, profile = config.trainer, config.gpu, choices.get("gpu", "auto")
    cards = facts.training_gpus
    accelerator, why = _accelerator(trainer.accelerator, profile, cards)
    on_gpu = accelerator == "gpu"
    card = cards[0] if on_gpu and cards else None
    faults = [*_device_faults(config, facts, accelerator, profile), *_card_faults(config, profile, facts, on_gpu)]
    precision = resolve_precision(gpu.precision.value, least_capable(cards[: trainer.devices] if on_gpu else ()))
    if isinstance(precision, Fault) or faults:
        raise ConfigError([*faults, *([precision] if isinstance(precision, Fault) else [])])
    budget = _budget(config, profile, facts, on_gpu)
    because = "the budget is what this card has"
    if not on_gpu:
        because = "trains on the CPU: there is no GPU memory to hold back"
    elif gpu.enforce is not None:
        because = f"gpu.enforce={str(gpu.enforce).lower()}"
    elif budget.cap:
        because = "holds this card to the budget of the one that was named"
    tf32 = f"gpu.tf32={str(gpu.tf32).lower()}" if on_gpu else "trains on the CPU, and TF32 is CUDA's"
    eager = ": eager, no compile time" if gpu.compile is Compile.none else ""
    device = DeviceSection.of(
        {
            "memory_gib": by_rule(budget.budget_gib, budget.because, is_set=gpu.memory_gib is not None),
            "precision": by_rule(precision.precision, precision.because, is_set=gpu.precision.value != "auto"),
            "tf32": by_rule(gpu.tf32 and on_gpu, tf32, is_set=on_gpu),
            "compile": Decided(gpu.compile.value, f"gpu.compile={gpu.compile.value}{eager}", "set"),
            "enforce": by_rule(budget.cap, because, is_set=budget.cap == gpu.enforce),
        },
        name=card.name if card else facts.cpu,
    )
    strategy = by_rule("auto", "one device: nothing to share out")
    if trainer.strategy is not Strategy.auto:
        strategy = Decided(trainer.strategy.value, f"trainer.strategy={trainer.strategy.value}", "set")
    elif trainer.world_size > 1:
        strategy = by_rule("ddp", f"{trainer.world_size} devices: a process for each")
    nodes = Decided(
        trainer.num_nodes,
        f"trainer.num_nodes={trainer.num_nodes}: {trainer.num_nodes} nodes x {counted(trainer.devices, 'device')} "
        f"= {trainer.world_size} ranks",
        "set",
    )
    where = TrainerSection.of(
        {
            "accelerator": by_rule(accelerator, why, is_set=trainer.accelerator is not Accelerator.auto),
            "devices": Decided(trainer.devices, f"trainer.devices={trainer.devices}", "set"),
            **({} if trainer.num_nodes == 1 else {"num_nodes": nodes}),
            "strategy": strategy,
        }
    )
    warnings = [*facts.warnings, *budget.warnings]
    if gpu.allocator is Allocator.expandable and not on_gpu:
        warnings.append("gpu.allocator=expandable has no effect on the CPU. Leave it at default there.")
    if gpu.enforce and not on_gpu:
        warnings.append("gpu.enforce=true has no effect: the run trains on the CPU. Set gpu.enforce=null.")
    return DevicePlan(where, device, tuple(warnings))


def _budget(config: RunConfig, profile: str, facts: MachineFacts, on_gpu: bool) -> Budget:
    """Returns the budget. CPU training on a machine with a card has no limit, unless a card was named."""
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


def _card_faults(config: RunConfig, profile: str, facts: MachineFacts, on_gpu: bool) -> Iterator[Fault]:
    """Yields faults of cards that lack the typed memory, or have little free, with the processes that use it.

    A profile larger than the card is no fault: the run is planned for the card, with a warning.
    """
    named, asked = PROFILES.get(profile), config.gpu.memory_gib
    if named is not None and asked == named.budget_gib:
        asked = None
    for card in facts.training_gpus[: config.trainer.devices] if on_gpu else ():
        if card.memory_gib is None:
            continue
        left_gib = card.memory_gib - card.others_gib
        held = f"other processes hold {card.others_gib:.1f} GiB of {card.describe()}: {card.held_by()}"
        if asked is not None and asked > card.memory_gib:
            problem = f"{asked:g} GiB were asked for, and {card.describe()} does not have them."
            yield Fault("gpu.memory_gib", problem, "Set gpu.memory_gib=null for what the card has, or less than that.")
        elif asked is not None and asked > left_gib:
            problem = f"{asked:g} GiB were asked for, and {held}."
            yield Fault("gpu.memory_gib", problem, f"End them, or set gpu.memory_gib={0.9 * left_gib:.1f}.")
        elif card.others_gib and BUDGET_FRAC * left_gib < LEAST_GIB:
            problem = f"{held}; {left_gib:.1f} GiB are left."
            yield Fault("gpu", problem, "End them, or name another card: CUDA_VISIBLE_DEVICES=1.")


def _accelerator(asked: Accelerator, profile: str, cards: tuple[GpuFacts, ...]) -> tuple[str, str]:
    if asked is not Accelerator.auto:
        return asked.value, f"trainer.accelerator={asked.value}"
    if profile == "cpu":
        return "cpu", "gpu=cpu"
    if cards:
        return "gpu", f"{cards[0].describe()} is there"
    return "cpu", "no GPU that torch can use"


def _device_faults(config: RunConfig, facts: MachineFacts, accelerator: str, profile: str) -> Iterator[Fault]:
    devices, num_cards = config.trainer.devices, len(facts.training_gpus)
    if accelerator == "gpu" and profile == "cpu":
        problem = "gpu was asked for, and gpu=cpu says to train on the CPU."
        yield Fault("trainer.accelerator", problem, "Set gpu=auto, or trainer.accelerator=auto.")
    elif accelerator == "gpu" and num_cards == 0:
        why = facts.torch_problem or f"NVML: {facts.nvml_problem or 'no card'}"
        problem = f"gpu was asked for, and there is no GPU that torch can use ({why})."
        way_out = "Run: unset CUDA_VISIBLE_DEVICES. Or set" if "CUDA_VISIBLE_DEVICES" in why else "Set"
        yield Fault("trainer.accelerator", problem, f"{way_out} trainer.accelerator=auto to train on the CPU.")
    elif accelerator == "gpu" and devices > num_cards:
        problem = f"{devices} devices were asked for, and {num_cards} GPU(s) are visible."
        way_out = f"Set trainer.devices={num_cards}, or make more visible with CUDA_VISIBLE_DEVICES."
        yield Fault("trainer.devices", problem, way_out)
    cores = max(1, math.floor(facts.cpu_quota_cores))
    if accelerator == "cpu" and devices > cores:
        problem = f"{devices} processes were asked for, and this machine gives {facts.cpu_quota_cores:g} CPU cores."
        yield Fault("trainer.devices", problem, f"Set trainer.devices={cores} or less.")
    if config.trainer.strategy is Strategy.fsdp and accelerator == "cpu":
        problem = "fsdp shards over GPUs, and this run trains on the CPU."
        yield Fault("trainer.strategy", problem, "Set trainer.strategy=ddp, or trainer=default.")

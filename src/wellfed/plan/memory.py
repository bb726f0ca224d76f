"""Decides the use of device memory by rules of thumb: feature tables, checkpointing, reaction to out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wellfed.config.schema import FeatureMode, OnOom, RunConfig, Strategy
from wellfed.errors import Fault
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.micro_batch import in_parts, rule_of_thumb
from wellfed.plan.run_plan import (
    DataFacts,
    Decided,
    DevicePlan,
    MemorySection,
    ModelFacts,
    by_rule,
    unless_set,
)
from wellfed.ranks import largest_share
from wellfed.units import counted, gib, show_bytes

CACHE_SHARE = 0.5
"""Maximum share of the budget, or of free host memory, for a feature table; activations need the rest."""
_WHOLE = "Lightning's Trainer steps on whole batches"
_UNKNOWN = "the samples of a batch are unknown before Lightning reads the loaders"
_NO_BLOCKS = "the model has no nn.ModuleList or nn.Sequential with blocks to recompute"
BY_HAND = "this LightningModule steps by hand (automatic_optimization=False)"


def plan_memory(
    config: RunConfig, facts: MachineFacts, device: DevicePlan, data: DataFacts, model: ModelFacts
) -> MemorySection:
    """Returns ``memory.*`` by rules of thumb."""
    asked, per_device = config.memory, _per_device(config)
    if per_device == 0:
        micro = by_rule(0, _UNKNOWN)
        accumulate = unless_set("memory.accumulate", asked.accumulate, 1, _WHOLE)
    elif model.whole_steps and asked.micro_batch is None and asked.accumulate is None:
        micro, accumulate = by_rule(per_device, _WHOLE), by_rule(1, _WHOLE)
    else:
        micro = rule_of_thumb(config, model)
        num_micro, sums = in_parts(per_device, micro.value)
        if asked.accumulate not in (None, num_micro):
            sums += f": memory.accumulate={asked.accumulate} has no equal parts here"
        accumulate = by_rule(num_micro, sums, is_set=asked.accumulate == num_micro)
    return MemorySection.of(
        {
            "micro_batch": micro,
            "accumulate": accumulate,
            "checkpoint_activations": _checkpointing(asked.checkpoint_activations, model),
            "features": _features(config, facts, device, data),
            "on_oom": _on_oom(config, device.trainer.strategy, model),
        }
    )


def memory_faults(
    config: RunConfig, choices: Mapping[str, str], memory: MemorySection, data: DataFacts, model: ModelFacts
) -> Iterator[Fault]:
    """Yields faults of memory settings that are impossible."""
    asked, per_device = config.memory, _per_device(config)
    if asked.micro_batch is not None and per_device == 0:
        yield Fault(f"memory.micro_batch={asked.micro_batch}", f"{_UNKNOWN}.", "Set memory.accumulate instead.")
        return
    if data.feature_rows and config.trainer.strategy is Strategy.fsdp:
        problem = "fsdp shards the model that makes the features, and they take the whole of it."
        yield Fault("trainer.strategy", problem, "Set trainer.strategy=ddp.")
    parts = asked.accumulate or memory.accumulate
    is_exact = memory.micro_batch * parts * config.trainer.world_size == config.workload.samples_per_step
    if model.whole_steps and parts > 1 and not is_exact:
        knob = "accumulate" if asked.accumulate else "micro_batch"
        problem = f"does not cut the {per_device} samples of a device into equal parts, which Lightning adds up."
        way_out = "Set memory.accumulate to a number that divides them."
        yield Fault(f"memory.{knob}={getattr(asked, knob)}", problem, way_out)
        return
    whole = _why_whole(config, model)
    if whole:
        for knob, value in (("micro_batch", asked.micro_batch), ("accumulate", asked.accumulate)):
            if value is not None and memory.accumulate > 1:
                yield Fault(
                    f"memory.{knob}",
                    f"{value} would split a step, and {whole}.",
                    f"Set memory.{knob}=null, or bring a plain nn.Module with loss(batch).",
                )
    elif model.has_batch_norm and memory.accumulate > 1:
        yield Fault(
            "memory.micro_batch",
            f"{memory.micro_batch} would split {per_device} samples of a model with BatchNorm, whose statistics "
            "belong to the whole batch; the result would differ.",
            "Set memory.micro_batch=null and memory.accumulate=null, or replace BatchNorm by GroupNorm.",
        )
    # memory=tight is for all models; without blocks it has no effect.
    if asked.checkpoint_activations and not model.has_blocks and choices.get("memory") != "tight":
        yield Fault("memory.checkpoint_activations", f"true: {_NO_BLOCKS}.", "Set memory.checkpoint_activations=null.")
    if data.feature_rows and data.features_trainable and asked.features not in (None, FeatureMode.dynamic):
        yield Fault(
            "memory.features",
            f"{asked.features.value} would freeze features that are trained.",
            "Set memory.features=dynamic, or workload.model.train_encoder=false.",
        )


def may_lower(config: RunConfig, model: ModelFacts) -> tuple[str, ...]:
    """Returns the knobs that can lower the memory of this model's step."""
    splits = not model.has_batch_norm and not _why_whole(config, model)
    return ("memory.micro_batch",) * splits + ("memory.checkpoint_activations",) * model.has_blocks


def memory_warnings(config: RunConfig, data: DataFacts, model: ModelFacts) -> Iterator[str]:
    """Yields warnings about memory settings that are ignored."""
    asked = config.memory
    if asked.features is not None and data.feature_rows == 0:
        unused = f"memory.features={asked.features.value} has no effect"
        yield f"{unused}: this workload offers no features. Set memory.features=null."
    num_samples = data.num_train if data.own_loader is None else data.own_loader.num_samples
    if model.has_batch_norm and num_samples is not None:
        yield from _batches_of_one(config, num_samples)


def _batches_of_one(config: RunConfig, num_samples: int) -> Iterator[str]:
    """Yields a warning if a rank's share of a step of a model with BatchNorm is one sample, or none."""
    workload, trainer = config.workload, config.trainer
    size, world = workload.samples_per_step, trainer.world_size
    whole, last = divmod(num_samples - len(set(config.loader.skip_ids)), size)
    fails = "BatchNorm has no statistics of a single value, and training ends if a layer gets one for each channel."
    shares = "" if world == 1 else f" for {trainer.ranks}"
    if size // world <= 1:
        problem = f"workload.effective_batch_size={size} is {counted(size, 'sample')}{shares}: {fails}"
        yield f"{problem} Set workload.effective_batch_size={2 * world} or more."
        return
    limits = (trainer.limit_batches, trainer.overfit_batches, trainer.max_steps)
    is_reached = all(limit is None or limit > whole for limit in limits)
    if last and last // world <= 1 and is_reached and not workload.drop_last:
        problem = f"The last batch of each epoch has {counted(last, 'sample')}{shares}"
        yield f"{problem}: {fails} Set workload.drop_last=true."


def fits_host(config: RunConfig, facts: MachineFacts, data: DataFacts) -> bool:
    """Returns whether the host's free memory holds a feature table for each device: every process fills its own."""
    return gib(data.feature_bytes) <= CACHE_SHARE * facts.ram_available_gib / config.trainer.devices


def _per_device(config: RunConfig) -> int:
    return largest_share(config.workload.samples_per_step, config.trainer.world_size)


def _why_whole(config: RunConfig, model: ModelFacts) -> str:
    """Returns why the samples of a LightningModule's step can't be split; empty if they can."""
    if not model.whole_steps:
        return ""
    if model.steps_by_hand:
        return f"{BY_HAND}, so Lightning can't sum gradients for it"
    if config.trainer.strategy is Strategy.fsdp:
        return "summing them would take whole gradients of a sharded model"
    return ""


def _checkpointing(asked: bool | None, model: ModelFacts) -> Decided[bool]:
    if asked and not model.has_blocks:
        return by_rule(False, f"off: {_NO_BLOCKS}")
    return unless_set("memory.checkpoint_activations", asked, False, "off: it costs about a third more compute")


def _on_oom(config: RunConfig, strategy: str, model: ModelFacts) -> Decided[str]:
    asked, is_guest = config.memory.on_oom, model.whole_steps
    rules = (
        (model.has_batch_norm, "BatchNorm's statistics belong to the whole batch, which is never split"),
        (
            is_guest and config.trainer.world_size > 1,
            "a LightningModule's step can't be done again, and other ranks wait for one that starts anew",
        ),
        (is_guest, _why_whole(config, model)),
    )
    why = next((reason for holds, reason in rules if holds and reason), "")
    if asked is OnOom.fail or not why:
        more = ""
        if asked is OnOom.retry and is_guest:
            more = ": goes on from the last checkpoint with half the batch, twice as often"
        elif asked is OnOom.retry and strategy == "ddp":
            more = ": all ranks go on from the last checkpoint with less"
        return Decided(asked.value, f"memory.on_oom={asked.value}{more}", "set")
    return by_rule("fail", f"{why}: no retry inside a step")


def _features(config: RunConfig, facts: MachineFacts, device: DevicePlan, data: DataFacts) -> Decided[str | None]:
    asked = config.memory.features
    if data.feature_rows == 0:
        return by_rule(None, "this workload offers no features")
    size = f"{data.feature_rows:,} rows, {show_bytes(data.feature_bytes)}"
    if data.features_trainable:
        return by_rule("dynamic", "the encoder is trained", is_set=asked is not None)
    if asked is not None:
        return Decided(asked.value, f"memory.features={asked.value}; {size}", "set")
    table_gib, budget_gib, devices = gib(data.feature_bytes), device.device.memory_gib, config.trainer.devices
    host = f"{facts.ram_available_gib / devices:.1f} GiB free host memory{' per device' if devices > 1 else ''}"
    is_within_host = fits_host(config, facts, data)
    # On a CPU the table is in host memory in any case; the budget of a named card still decides.
    if budget_gib is not None and table_gib > CACHE_SHARE * budget_gib:
        over = f"{size}, is more than {CACHE_SHARE:g} of the {budget_gib:.1f} GiB GPU budget"
        if is_within_host:
            copies = "it" if devices == 1 else f"one for each of {devices} devices"
            return by_rule("cache_host", f"{over}, and host memory holds {copies}")
        return by_rule("dynamic", f"{over} and of {host}")
    if not device.on_gpu and not is_within_host:
        return by_rule("dynamic", f"{size}, is more than {CACHE_SHARE:g} of {host}")
    room = host if budget_gib is None else f"the {budget_gib:.1f} GiB GPU budget"
    return by_rule("cache", f"frozen features, {size}, within {CACHE_SHARE:g} of {room}")

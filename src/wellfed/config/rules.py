"""Checks rules between knobs, as pure functions of the configuration: no torch, no hardware.

Each fault names the value, the broken rule, and an override to type. Rules about the hardware are in the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import ceil
from operator import attrgetter
from typing import Any

from omegaconf import MISSING

from wellfed.config.knobs import entries
from wellfed.config.schema import (
    Accelerator,
    Backend,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    SearchPruner,
    SearchSampler,
    Strategy,
)
from wellfed.errors import Fault
from wellfed.ranks import largest_share

Rule = Callable[[RunConfig], Iterator[Fault]]

_FOLDER_NAME = re.compile(r"\w[\w.-]*")


def rule_faults(config: Any) -> list[Fault]:
    """Returns faults of values that are out of range, empty or contradictory."""
    alone = list(value_faults(config))
    if not isinstance(config, RunConfig):
        return alone
    # One fault is enough for a value that is out of range; it breaks other rules too.
    known = {fault.where.partition("=")[0] for fault in alone}
    between = [fault for rule in RULES for fault in rule(config)]
    return alone + [fault for fault in between if not any(name in str(fault) for name in known)]


def value_faults(config: Any) -> Iterator[Fault]:
    """Yields a fault for each number out of range, also inside lists, and each empty text."""
    for knob in entries(config.__class__).values():
        value, allowed = attrgetter(knob.name)(config), knob.range
        if isinstance(value, str) and not value.strip():
            default = f"<value>: {knob.text}" if knob.default == MISSING else knob.default
            way_out = "null" if knob.is_optional else default
            yield Fault(f"{knob.name}=", "must not be empty.", f"Set {knob.name}={way_out}.")
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if allowed is None or not (wrong := [number for number in numbers if not allowed.holds(number)]):
            continue
        legal: Any = allowed.legal_value(wrong[0])
        if isinstance(value, list):  # other entries are not changed: each may name a sample
            legal = [number for number in value if allowed.holds(number)] or knob.default
        yield Fault(f"{knob.name}={_shown(value)}", f"must be {allowed}.", f"Set {knob.name}={_shown(legal)}.")


def _shown(value: Any) -> str:
    return str(value).replace(" ", "")


def workers(config: RunConfig) -> Iterator[Fault]:
    """Checks num_workers against the backend that would run them."""
    backend, count = config.loader.backend, config.loader.num_workers
    if backend is Backend.inline and count:
        problem = "has no effect with loader.backend=inline, which builds batches in the training process."
        yield Fault(f"loader.num_workers={count}", problem, "Set loader.num_workers=0, or loader.backend=threads.")
    if backend in (Backend.threads, Backend.processes) and count == 0:
        problem = f"leaves loader.backend={backend.name} without workers."
        yield Fault("loader.num_workers=0", problem, "Set loader.num_workers=1 or more, or loader.backend=inline.")


def needs_workers(config: RunConfig) -> Iterator[Fault]:
    """Yields faults of knobs that need workers if there are none."""
    loader = config.loader
    if loader.backend is Backend.inline:
        without, way_out = "loader.backend=inline", "Set loader.backend=auto"
    elif loader.num_workers == 0:
        without, way_out = "loader.num_workers=0", "Set loader.num_workers>=1"
    else:
        return
    problem = f"has no effect without worker processes ({without})."
    for name in ("prefetch_factor", "persistent_workers"):
        if value := getattr(loader, name):
            yield Fault(f"loader.{name}={_shown(value).lower()}", problem, f"{way_out}, or loader.{name}=null.")


def batch_split(config: RunConfig) -> Iterator[Fault]:
    """Checks that effective_batch_size is micro-batches x ranks, exactly."""
    effective, trainer, world = config.workload.effective_batch_size, config.trainer, config.trainer.world_size
    micro, accumulate = config.memory.micro_batch, config.memory.accumulate
    if effective is None or min(effective, world, 1 if micro is None else micro) < 1:
        return  # checked again with the DataLoader's batch size; the ranges report 0
    if effective < world:
        problem = f"is less than one sample for each of {trainer.ranks}."
        way_out = (
            f"Set {trainer.with_ranks(effective)}; a larger workload.effective_batch_size changes what is learned."
        )
        yield Fault(f"workload.effective_batch_size={effective}", problem, way_out)
        return
    share = largest_share(effective, world)
    of_what = f"the {share} samples of a device (workload.effective_batch_size={effective}, {trainer.ranks})"
    if micro is not None and micro > share:
        way_out = f"Set memory.micro_batch={share} or less, or memory.micro_batch=null."
        yield Fault(f"memory.micro_batch={micro}", f"is more than {of_what}.", way_out)
    elif accumulate is not None and accumulate > share:
        way_out = f"Set memory.accumulate={share} or less, or memory.accumulate=null."
        yield Fault(f"memory.accumulate={accumulate}", f"would split {of_what} into empty parts.", way_out)
    elif micro and accumulate is not None and accumulate != (needed := ceil(effective / (world * micro))):
        problem = f"contradicts memory.micro_batch={micro}, which needs {needed} of {of_what}."
        way_out = "Set one of them: memory.accumulate=null, or memory.micro_batch=null."
        yield Fault(f"memory.accumulate={accumulate}", problem, way_out)


def length(config: RunConfig) -> Iterator[Fault]:
    """Checks that a run has an end, which a falling learning rate needs."""
    trainer, name = config.trainer, config.workload.schedule.name
    has_last_step = trainer.max_epochs is not None or trainer.max_steps is not None
    if not has_last_step and trainer.max_time_s is None:
        problem = "leaves the run without an end: trainer.max_steps and trainer.max_time_s are null too."
        yield Fault("trainer.max_epochs=null", problem, "Set trainer.max_epochs=10.")
    elif not has_last_step and name is not ScheduleName.constant:
        problem = "needs the number of the last step, and trainer.max_time_s alone does not give it."
        way_out = "Set trainer.max_steps=1000 or trainer.max_epochs=10, or workload.schedule.name=constant."
        yield Fault(f"workload.schedule.name={name}", problem, way_out)


def schedule(config: RunConfig) -> Iterator[Fault]:
    """Checks that a schedule is given either by its name or by a `_target_`."""
    chosen, by_default = config.workload.schedule, ScheduleConfig()
    target = (chosen.target or {}).get("_target_")
    knobs = ("interval", "monitor") if target is None else ("name", "warmup_steps", "min_lr_frac")
    problem = "is about a scheduler that workload.schedule._target_ names, and it names none."
    if target is not None:
        problem = f"has no effect beside workload.schedule._target_={target}."
    for knob in knobs:
        if (value := getattr(chosen, knob)) != (without := getattr(by_default, knob)):
            where, way_out = f"workload.schedule.{knob}", "null" if without is None else without
            yield Fault(f"{where}={value}", problem, f"Set {where}={way_out}.")
    if str(target).endswith("ReduceLROnPlateau") and chosen.monitor is None:
        problem = f"{target} goes by a figure, and none is named."
        yield Fault("workload.schedule.monitor=null", problem, "Set workload.schedule.monitor=val/loss.")


def callback_names(config: RunConfig) -> Iterator[Fault]:
    """Checks that callbacks is a mapping from names to callbacks."""
    if config.callbacks is not None and not isinstance(config.callbacks, dict):
        way_out = "Write callbacks: {my_name: {_target_: my_package.MyCallback}}."
        yield Fault(f"callbacks={config.callbacks}", "gives its callbacks no names.", way_out)


def strategy(config: RunConfig) -> Iterator[Fault]:
    """Checks trainer.strategy against the devices."""
    trainer = config.trainer
    if trainer.strategy is Strategy.fsdp and trainer.accelerator is Accelerator.cpu:
        problem = "shards over CUDA devices only, and trainer.accelerator=cpu."
        yield Fault("trainer.strategy=fsdp", problem, "Set trainer.strategy=ddp, or trainer.accelerator=gpu.")
    if trainer.deterministic and config.gpu.cudnn_benchmark:
        problem = "picks kernels by the clock, which trainer.deterministic=true forbids."
        way_out = "Set gpu.cudnn_benchmark=false, or trainer.deterministic=false."
        yield Fault("gpu.cudnn_benchmark=true", problem, way_out)


def best(config: RunConfig) -> Iterator[Fault]:
    """Checks that a metric and its direction are given together."""
    metric, mode = config.trainer.best_metric, config.trainer.best_mode
    if metric is not None and mode is None:
        way_out = "Add trainer.best_mode=max or trainer.best_mode=min."
        yield Fault(f"trainer.best_metric={metric}", "does not say whether more is better.", way_out)
    if mode is not None and metric is None:
        way_out = "Add trainer.best_metric=<name>, or set trainer.best_mode=null."
        yield Fault(f"trainer.best_mode={mode.name}", "has no metric to apply to.", way_out)


def continuing(config: RunConfig) -> Iterator[Fault]:
    """Checks that resume and rerun are not both set."""
    if config.resume is not None and config.rerun is not None:
        problem = f"goes on with a run, rerun={config.rerun} starts one anew: not both."
        yield Fault(f"resume={config.resume}", problem, "Leave one of them out.")


def pruning(config: RunConfig) -> Iterator[Fault]:
    """Yields a fault if a grid is to prune trials, which only Optuna does."""
    search = config.search
    if search.sampler is SearchSampler.grid and search.pruner is not SearchPruner.none:
        where = f"search.pruner={search.pruner.name}"
        problem = "ends trials of a search by Optuna, and search.sampler=grid runs every combination to its end."
        yield Fault(where, problem, "Set search=optuna, or search.pruner=none.")


def folder_name(config: RunConfig) -> Iterator[Fault]:
    """Checks that the workload's name is valid as a folder name."""
    name = config.workload.name
    if not _FOLDER_NAME.fullmatch(name):
        problem = "becomes a folder: letters, digits, '_', '-' and '.', the first a letter, digit or '_'."
        better = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_") or "my_workload"
        yield Fault(f"workload.name={name}", problem, f"Set workload.name={better}.")


RULES: tuple[Rule, ...] = (
    workers, needs_workers, batch_split, length, schedule, callback_names, strategy, best,
    continuing, pruning, folder_name,
)  # fmt: skip

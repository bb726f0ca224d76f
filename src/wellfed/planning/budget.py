"""The memory knobs brought within the budget, with the predicted peak as the reason; or what would fit instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from wellfed.config.schema import RunConfig
from wellfed.contract import FEATURE_MODES
from wellfed.errors import Fault
from wellfed.footprint.footprint import StepShape
from wellfed.hardware.profiles import PROFILES
from wellfed.planning.memory_candidates import (
    PLANNED_FRAC,
    Choice,
    Estimate,
    Outcome,
    Way,
    cheapest,
    limit_bytes,
    remedies,
    show_parts,
)
from wellfed.planning.planned import DataFacts, ModelFacts, Planned
from wellfed.units import gib, show_gib

MOST_REMEDIES = 3


@dataclass(frozen=True)
class Fitted:
    """What the estimate says of a run."""

    knobs: Mapping[str, Planned] = field(default_factory=dict)
    """``memory.*``, decided anew."""
    way: Way | None = None
    """None: nothing could be estimated."""
    misfit: Fault | None = None
    """Why nothing that is allowed fits, and what would."""
    remedies: tuple[str, ...] = ()
    """Overrides, each of which makes it fit, cheapest first."""
    warnings: tuple[str, ...] = ()


def within_budget(
    config: RunConfig,
    knobs: Mapping[str, Planned],
    budget_gib: float | None,
    profile: str,
    data: DataFacts,
    model: ModelFacts,
    estimate: Estimate,
    *,
    workspaces: int = 0,
) -> Fitted:
    """The cheapest way of training that fits, of those that the configuration leaves open.

    Args:
        knobs: the plan so far, by rules of thumb.
        profile: the ``gpu=`` option.
        workspaces: bytes that libraries keep of the device's memory.
    """
    choice = _choice(config, knobs, data, model, step_shape(config, knobs, workspaces, model))
    outcome = cheapest(choice, estimate, budget_gib)
    if outcome.way is None:
        return Fitted(warnings=(f"The peak memory is not predicted: {str(outcome.no_estimate).rstrip('.')}.",))
    decided = _decided(config, knobs, choice, outcome, budget_gib)
    if outcome.fits or budget_gib is None:
        return Fitted(decided, outcome.way)
    instead = remedies(
        choice,
        estimate,
        budget_gib,
        has_features=data.feature_rows > 0 and not data.features_trainable,
        may_split=_may_split(model),
        has_blocks=model.has_blocks,
    )
    card = _larger_card(config, outcome.way, profile)
    changes: dict[str, Way] = {}
    for one in instead:
        changes.setdefault(_overrides(config, choice, one), one)
    return Fitted(decided, outcome.way, _misfit(outcome.way, changes, budget_gib, card), tuple(changes))


def step_shape(config: RunConfig, knobs: Mapping[str, Planned], workspaces: int, model: ModelFacts) -> StepShape:
    """What one device does in an optimizer step of this plan."""
    devices = knobs["trainer.devices"].value
    halves = 2 if knobs["gpu.precision"].value == "bf16-true" else 1  # the model itself is in bf16 then
    return StepShape(
        samples=math.ceil(config.workload.effective_batch_size / devices),
        batches_ahead=knobs["loader.device_prefetch"].value,
        world_size=devices,
        workspaces=workspaces,
        is_sharded=knobs["trainer.strategy"].value == "fsdp",
        gathered=model.gathered_bytes // halves,
    )


def _may_split(model: ModelFacts) -> bool:
    return not (model.has_batch_norm or model.is_lightning_module)


def _choice(
    config: RunConfig, knobs: Mapping[str, Planned], data: DataFacts, model: ModelFacts, step: StepShape
) -> Choice:
    memory, planned = config.memory, knobs["memory.features"].value
    is_open = memory.features is None and data.feature_rows > 0 and not data.features_trainable
    is_fixed = memory.micro_batch is not None or memory.accumulate is not None or not _may_split(model)
    by_rule = int(knobs["memory.micro_batch"].value)
    asked = memory.checkpoint_activations
    return Choice(
        features=FEATURE_MODES[FEATURE_MODES.index(planned) :] if is_open else (planned,),
        checkpointed=((False, True) if model.has_blocks else (False,)) if asked is None else (asked,),
        micro_batch=by_rule if is_fixed else None,
        at_most=by_rule,
        step=step,
    )


def _decided(
    config: RunConfig, knobs: Mapping[str, Planned], choice: Choice, outcome: Outcome, budget_gib: float | None
) -> dict[str, Planned]:
    way = outcome.way
    assert way is not None
    rule, memory = knobs["memory.micro_batch"], config.memory
    peak = f"predicted peak {way.peak_gib:.2f} GiB"
    if budget_gib is not None:
        peak += f" of {budget_gib * PLANNED_FRAC:.2f} ({PLANNED_FRAC:g} of the budget)"
    if way.micro_batch == rule.value or rule.source == "set":
        micro = Planned(rule.value, f"{rule.because}; {peak}", rule.source)
    else:
        because = f"the most of {choice.step.samples} samples a device that fit at a time; {peak}"
        micro = Planned(way.micro_batch, because, "predicted")
    num_micro = math.ceil(choice.step.samples / micro.value)
    decided = {"memory.micro_batch": micro}
    if num_micro != knobs["memory.accumulate"].value:
        sums = f"{choice.step.samples} samples a device in micro-batches of {micro.value}"
        decided["memory.accumulate"] = Planned(num_micro, sums, "predicted")
    if memory.checkpoint_activations is None and way.checkpointed:
        because = f"on: without it one sample at a time needs {_need(outcome, way.features, False)}"
        decided["memory.checkpoint_activations"] = Planned(True, because, "predicted")
    if way.features != knobs["memory.features"].value:
        faster = choice.features[0]
        because = f"{faster} would be faster, and one sample at a time needs {_need(outcome, faster, way.checkpointed)}"
        decided["memory.features"] = Planned(way.features, because, "predicted")
    return decided


def _need(outcome: Outcome, features: str | None, checkpointed: bool) -> str:
    ways = [way for way in outcome.passed_over if way.features == features]
    way = next((way for way in ways if way.checkpointed == checkpointed), ways[0])
    return f"{way.peak_gib:.2f} GiB"


def _misfit(way: Way, changes: Mapping[str, Way], budget_gib: float, card: str) -> Fault:
    what = "one sample at a time" if way.micro_batch == 1 else f"{way.micro_batch} samples at a time"
    problem = (
        f"the budget is {show_gib(budget_gib)}, of which {show_gib(budget_gib * PLANNED_FRAC)} are planned with, and "
        f"{what} need{'s' if way.micro_batch == 1 else ''} {show_gib(way.peak_gib)}: {show_parts(way)}."
    )
    ways_out = [f"set {change} ({show_gib(one.peak_gib)})" for change, one in list(changes.items())[:MOST_REMEDIES]]
    if card:
        ways_out.append(f"take a larger card ({card})")
    return Fault("gpu.memory_gib", problem, _sentence(ways_out or ["take a smaller workload.model"]))


def _larger_card(config: RunConfig, way: Way, profile: str) -> str:
    """The override for a card that the way fits; empty if there is none. A budget that was typed beats a profile."""
    asked, named = config.gpu.memory_gib, PROFILES.get(profile)
    if asked is not None and (named is None or asked != named.budget_gib):
        enough_gib = math.ceil(100 * gib(way.reserved_bytes) / PLANNED_FRAC + 0.01) / 100
        return f"gpu.memory_gib={enough_gib:g}"
    fitting = (name for name, each in PROFILES.items() if way.reserved_bytes <= limit_bytes(each.budget_gib))
    return next((f"gpu={name}" for name in fitting), "")


def _sentence(ways_out: list[str]) -> str:
    text = "; or ".join(ways_out)
    return f"{text[0].upper()}{text[1:]}."


def _overrides(config: RunConfig, choice: Choice, way: Way) -> str:
    """What to type for this way, no more than differs from what is there."""
    memory, typed = config.memory, []
    if way.features != choice.features[0] or way.features not in choice.features:
        typed.append(f"memory.features={way.features}")
    if way.checkpointed and not memory.checkpoint_activations:
        typed.append("memory.checkpoint_activations=true")
    if memory.micro_batch is not None and way.micro_batch != memory.micro_batch:
        typed.append(f"memory.micro_batch={way.micro_batch}")
        if memory.accumulate is not None:
            typed.append("memory.accumulate=null")  # it follows from the other, and would contradict it
    elif memory.accumulate is not None and math.ceil(choice.step.samples / way.micro_batch) != memory.accumulate:
        typed.append(f"memory.accumulate={math.ceil(choice.step.samples / way.micro_batch)}")
    return " ".join(typed) or "memory=auto"

"""Makes the plan of a run from its configuration, this machine, its data and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.parameter import is_lazy

from wellfed.config.compose import Composed
from wellfed.config.faults.target_faults import check_imported
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError, DoesNotFit, Fault
from wellfed.generators import seed_everything
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.hardware.profiles import with_cards
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.budget import step_shape
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.loader import LoaderPlanner
from wellfed.plan.memory import with_way_down
from wellfed.plan.predict.footprint import Footprint
from wellfed.plan.probing import as_remembered
from wellfed.plan.run_plan import DevicePlan, DryPlan, ModelFacts, PlannedStage, RunPlan
from wellfed.plan.ways_that_fit import RanOut, ways_that_fit
from wellfed.ranks import largest_share
from wellfed.run.micro_batch.footprints import Footprints
from wellfed.run.micro_batch.measured_fit import probed, with_plateau
from wellfed.run.objects import assemble, datasets, loaders, models
from wellfed.run.objects.feature_stages import of_stage, train_encoder
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory import remembered
from wellfed.train.memory.remembered import FOREACH
from wellfed.units import GIB

HOST_SHARE = 0.5
"""Of the free host memory that an estimate may take where a model must be run for real."""


@dataclass(frozen=True)
class Planner:
    """All that a plan is made of."""

    config: RunConfig
    """As composed, with what the data say of a step where it says nothing."""
    choices: Mapping[str, str]
    facts: MachineFacts
    device: DevicePlan
    parts: RunObjects
    from_epoch: int | None = None
    """Of ``memory.stages`` it plans the one that begins with this epoch; None: there are none."""

    @classmethod
    def start(cls, composed: Composed[RunConfig], facts: MachineFacts, parts: RunObjects | None = None) -> Self:
        """Decides the device, then reads the data and builds the model on the CPU, unless they are made already.

        Raises:
            ConfigError, DataError: the configuration, this machine or the input is at fault; tells all that is wrong
                with the first two before anything is read.
        """
        config, faults = composed.config, list[Fault]()
        try:
            device = plan_device(config, composed.choices, facts)
        except ConfigError as error:
            faults += error.faults
        faults += check_imported(config)
        if faults:
            raise ConfigError(faults)
        if parts is None:
            seed_everything(config.seed)
        config, parts = assemble.complete(config, parts)
        from_epoch = 0 if config.memory.stages else None
        return cls(config, composed.choices, facts, device, parts, from_epoch=from_epoch)

    def for_training(self, rank: int) -> RunPlan:
        """The plan of a run: the loader is timed, and memory is estimated where there is a budget to keep.

        Raises:
            ConfigError: what is asked for can't be done here; a DoesNotFit where it does not fit the card.
            DataError: the first batch can't be cut into the plan's micro-batches.
        """
        rough = self.rough()
        estimate = None if rough.device.memory_gib is None else self.estimate(rough)
        data, on_gpu = datasets.data_facts(self.parts), self.device.on_gpu
        loading = LoaderPlanner(self.config, self.choices, self.facts, data, on_gpu)
        # What a batch carries goes by where features are held, which an estimate may have moved.
        moves = self.parts.data.features is not None and estimate is not None
        held: str | None = (self._plan(estimate=estimate) if moves else rough).memory.features
        if self.config.memory.stages:  # there is one loader for all of them, whose batches carry most in the last
            held = self.config.memory.stages[-1].features.value
        parts = self.parts.for_features(held)
        first = loaders.try_loader(
            self.config, lambda built: replace(loading, first=built).to_time(), rough, parts, rank=rank
        )
        plan = self._fitted(estimate, first)
        loaders.check_split(self.config, plan, parts, first)
        return self._with_stages(plan, lambda later: later._fitted(later._estimate(), None))

    def _estimate(self) -> Footprints | None:
        """None where there is no budget to keep."""
        rough = self.rough()
        return None if rough.device.memory_gib is None else self.estimate(rough)

    def _fitted(self, estimate: Footprints | None, first: FirstBatches | None) -> RunPlan:
        """The plan by an estimate, what the first batches have shown, and real steps, where there are such."""
        plan = self._plan(first=first) if estimate is None else self.estimated(estimate, first)
        if plan.misfit is None:
            return with_way_down(self._measured(plan, estimate), self.config.memory.micro_batch_steps)
        if plan.on_gpu or plan.device.enforce:
            raise DoesNotFit([plan.misfit])
        plan = replace(plan, warnings=(*plan.warnings, f"On the card that was named this does not fit: {plan.misfit}"))
        return with_way_down(plan, self.config.memory.micro_batch_steps)

    def with_stages(self, plan: RunPlan) -> RunPlan:
        """The plan of the first of ``memory.stages`` with those of the others, by prediction alone."""
        return self._with_stages(plan, lambda later: later.estimated(later.estimate(later.rough())))

    def _with_stages(self, plan: RunPlan, planned: Callable[[Self], RunPlan]) -> RunPlan:
        """The plan with all stages; peak and misfit are those of the worst of them."""
        stages, plans = self.config.memory.stages or [], [plan]
        try:
            for stage in stages[1:]:
                config, parts = of_stage(self.config, self.parts, stage)
                parts = replace(parts, footprints=None)  # known are those of another one
                plans.append(planned(replace(self, config=config, parts=parts, from_epoch=stage.from_epoch)))
        finally:
            train_encoder(self.parts, is_trained=False)
        if not stages:
            return plan
        misfits = [each.misfit for each in plans if each.misfit is not None]
        is_known = all(each.predicted_peak_gib is not None for each in plans)
        # By what is held where the allocator would reserve the same.
        worst = max(plans, key=lambda each: (each.predicted_peak_gib or 0 if is_known else 0, sum(each.parts.values())))
        return replace(
            plan,
            parts=worst.parts,
            predicted_peak_gib=worst.predicted_peak_gib if is_known else None,
            peak_moment=worst.peak_moment if is_known else None,
            misfit=misfits[0] if misfits else None,
            remedies=next((each.remedies for each in plans if each.misfit is not None), ()),
            warnings=tuple(dict.fromkeys(warning for each in plans for warning in each.warnings)),
            stages=tuple(
                PlannedStage(stage.from_epoch, each.memory) for stage, each in zip(stages, plans, strict=True)
            ),
        )

    def _measured(self, plan: RunPlan, estimate: Footprints | None) -> RunPlan:
        """The plan with what real steps show of its micro-batch, where that is a prediction."""
        by_rates = self.config.memory.plateau_frac is not None and _is_predicted(plan)
        may_run_out, seeks_plateau = self._is_open(plan), by_rates and self.model_facts().may_split
        if not (may_run_out or seeks_plateau):
            return plan
        if untried := self._untried(plan):
            return _with_reason(plan, f"; not tried before training: {untried}")
        estimate = estimate or self.estimate(plan)
        card = torch.device("cuda", 0)
        if seeks_plateau:
            device = card if plan.on_gpu else torch.device("cpu")
            plan = with_plateau(self.config, plan, self.parts, estimate, device)
        return probed(self.config, plan, self.parts, estimate, card) if may_run_out else plan

    def _is_open(self, plan: RunPlan) -> bool:
        """Whether a GPU's micro-batch is a prediction."""
        return plan.on_gpu and _is_predicted(plan) and plan.predicted_peak_gib is not None

    def _untried(self, plan: RunPlan) -> str:
        """Why no step is run before training to measure what it takes; empty where one is."""
        if self.parts.is_lightning_module:
            return "a LightningModule runs its own step"
        if plan.trainer.world_size > 1:
            return "each rank would measure for itself, and all must take the same size"
        if plan.device.compile != "none":
            compiled = f"gpu.compile={plan.device.compile} would compile twice"
            return f"{compiled}; what it keeps for its graphs is not predicted"
        return ""

    def rough(self) -> RunPlan:
        """The plan by rules of thumb. Like all plans it raises a ConfigError for what can't be done."""
        return self._plan()

    def model_facts(self) -> ModelFacts:
        """What a plan knows of the model; a ConfigError where its sizes are not known yet."""
        model = self.parts.model
        lazy = [name for name, each in chain(model.named_parameters(), model.named_buffers()) if is_lazy(each)]
        if lazy:
            problem = f"has parameters without a shape until the first batch (Lazy*): {lazy[0]}."
            way_out = "Give their sizes (nn.Linear for nn.LazyLinear), or run a batch through it in its __init__."
            raise ConfigError.of("workload.model", problem, way_out)
        return models.model_facts(self.parts, self.config)

    def for_evaluation(self) -> RunPlan:
        """The plan of a pass over the test data alone."""
        # Nothing is trained: there are no gradients, and no optimizer.
        model = replace(self.model_facts(), trainable_bytes=0, optimizer_state_bytes=0)
        if not self.config.memory.stages:
            return self._plan(model=model)
        memory = replace(self.config.memory, features=self.config.memory.stages[-1].features)
        return replace(self, config=replace(self.config, memory=memory))._plan(model=model)

    def estimated(self, estimate: Footprints, first: FirstBatches | None = None) -> RunPlan:
        """The plan by an estimate of memory, and by what the first batches have shown."""
        plan = self._plan(first=first, estimate=estimate)
        if plan.predicted_peak_gib is not None and estimate.looked_at:
            plan = _with_reason(plan, f", {estimate.looked_at}")
        return self._as_remembered(replace(plan, footprints=estimate.known.found), estimate)

    def ways_that_fit(self, plan: RunPlan) -> Callable[[RanOut], list[str]]:
        """Asked when training has run out of memory, for what can be typed then: the model is not looked at again."""
        profile, model = self.choices.get("gpu", "auto"), self.model_facts()
        return partial(ways_that_fit, plan, self.config, profile, model)

    def _as_remembered(self, plan: RunPlan, estimate: Footprints) -> RunPlan:
        """The plan with what earlier runs of it had to lower; it knows where to keep what this one must."""
        file = self._remembered_in(plan, estimate) if self.config.memory.remember else None
        if file is None:
            return plan
        plan = replace(plan, remembered_in=file)
        try:
            found = remembered.recall(file)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            warning = f"{file}: {why}; planned as if it were not there. Delete it, or set memory.remember=false."
            return replace(plan, warnings=(*plan.warnings, warning))
        optimizer, model = self.config.workload.optimizer, self.model_facts()
        is_decided = optimizer is None or any(name in optimizer for name in ("foreach", "fused"))
        footprint = estimate(plan.memory.features, plan.memory.checkpoint_activations)
        return as_remembered(
            plan,
            {knob: lowered for knob, lowered in found.items() if not (knob == FOREACH and is_decided)},
            largest_share(plan.workload.effective_batch_size, plan.trainer.world_size),
            footprint if isinstance(footprint, Footprint) else None,
            step_shape(plan, model),
        )

    def _remembered_in(self, plan: RunPlan, estimate: Footprints) -> Path | None:
        """The file for all runs whose steps take the same memory but for the micro-batch; None: there is no budget to
        keep, it can't be told, or stages take different memory in one run."""
        device, trainer, budget_gib = plan.device, plan.trainer, plan.device.memory_gib
        if budget_gib is None or plan.misfit is not None or self.from_epoch is not None:
            return None
        digest = estimate.digest(plan.memory.features, plan.memory.checkpoint_activations)
        if digest is None:
            return None
        budget = f"{budget_gib:.2g}"  # of gpu=auto it varies with what other processes hold
        average = self.model_facts().average_bytes
        cache_dir = Path(self.config.paths.cache_dir)
        return remembered.file_for(
            cache_dir, digest, device.name, budget, trainer.accelerator, trainer.strategy, trainer.world_size, average
        )

    def estimate(self, plan: RunPlan) -> Footprints:
        """Footprints for the precision and loader of a plan, for as many samples as one device could be given."""
        samples, host_bytes = self.config.workload.samples_per_step, HOST_SHARE * self.facts.ram_available_gib * GIB
        return Footprints(self.config, plan, self.parts, samples=samples, host_bytes=int(host_bytes))

    def _plan(self, model: ModelFacts | None = None, **known: Any) -> RunPlan:
        data, model = datasets.data_facts(self.parts), model or self.model_facts()
        plan = plan_run(self.config, self.choices, self.facts, self.device, data, model, **known)
        if plan.misfit is None or self.from_epoch is None:
            return plan
        problem = f"in the stage of memory.stages from epoch {self.from_epoch} on {plan.misfit.problem}"
        return replace(plan, misfit=replace(plan.misfit, problem=problem))


def plan_without_running(composed: Composed[RunConfig]) -> DryPlan:
    """The plan by prediction alone, on the cards that are named where this machine lacks them; nothing is timed.

    Reads the data and builds the model, on the CPU.

    Raises:
        ConfigError, DataError: there is no such plan.
    """
    config, profile = composed.config, composed.choices.get("gpu", "auto")
    facts, imagined = machine(torch_cuda()), None
    if config.trainer.accelerator is not Accelerator.cpu:
        facts, imagined = with_cards(facts, profile, config.gpu.memory_gib, config.trainer.devices)
    planner = Planner.start(composed, facts)
    estimate = planner.estimate(planner.rough())
    by_devices: list[RunPlan] = []
    for devices in range(1, config.trainer.devices + 1) if config.trainer.devices > 1 else ():
        fewer = replace(config, trainer=replace(config.trainer, devices=devices))
        with suppress(ConfigError):
            on_fewer = replace(planner, config=fewer, device=plan_device(fewer, composed.choices, facts))
            by_devices.append(on_fewer.estimated(estimate))
    plan = with_way_down(planner.estimated(estimate), config.memory.micro_batch_steps)
    return DryPlan(planner.with_stages(plan), tuple(by_devices), imagined, config.workload.name)


def _is_predicted(plan: RunPlan) -> bool:
    return plan.memory.reasons["micro_batch"].source == "predicted"


def _with_reason(plan: RunPlan, more: str) -> RunPlan:
    """More on the micro-batch."""
    micro = plan.memory.decided("micro_batch")
    return replace(plan, memory=plan.memory.but(micro_batch=replace(micro, because=f"{micro.because}{more}")))

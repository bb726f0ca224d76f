"""Makes the plan of a run from its configuration, this machine, its data and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

from torch.nn.parameter import is_lazy

from wellfed.config.compose import Composed
from wellfed.config.faults.target_faults import check_imported
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.data.backend_benchmark import TrialStep
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError, DoesNotFit, Fault
from wellfed.generators import seed_everything
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.hardware.profiles import with_cards
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.budget import step_shape
from wellfed.plan.decide import over_stages, plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.loader import LoaderPlanner
from wellfed.plan.micro_batch import as_remembered, because_too, steps_to_run, why_untried, with_way_down
from wellfed.plan.predict.peak import Footprint
from wellfed.plan.run_plan import DataFacts, DevicePlan, DryPlan, ModelFacts, RunPlan
from wellfed.plan.ways_that_fit import RanOut, ways_that_fit
from wellfed.run.micro_batch.footprints import Footprints
from wellfed.run.micro_batch.real_steps import beside_steps, measured
from wellfed.run.objects import assemble, datasets, loaders, models
from wellfed.run.objects.feature_stages import of_stage, train_encoder
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory import remembered_sizes
from wellfed.train.memory.remembered_sizes import FOREACH
from wellfed.units import GIB

HOST_SHARE = 0.5
"""Share of the free host memory that steps before training may use."""


@dataclass(frozen=True)
class Planner:
    """Planner of one run. `plan.micro_batch` lists what decides the micro-batch, in order."""

    config: RunConfig
    """The composed configuration, with nulls replaced by values that the data define."""
    choices: Mapping[str, str]
    facts: MachineFacts
    device: DevicePlan
    parts: RunObjects
    from_epoch: int | None = None
    """First epoch of the planned stage of ``memory.stages``; None without stages."""

    @classmethod
    def start(cls, composed: Composed[RunConfig], facts: MachineFacts, parts: RunObjects | None = None) -> Self:
        """Decides the device, then reads the data and builds the model on the CPU, unless ``parts`` has them.

        Raises:
            ConfigError, DataError: the configuration, this machine or the input is at fault. All faults of the first
                two are in one error, raised before anything is read.
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

    @cached_property
    def data(self) -> DataFacts:
        """Facts about the data that the plan needs."""
        return datasets.data_facts(self.parts)

    @cached_property
    def model(self) -> ModelFacts:
        """Facts about the model that the plan needs. Raises a ConfigError if its sizes are still unknown."""
        model = self.parts.model
        lazy = [name for name, each in chain(model.named_parameters(), model.named_buffers()) if is_lazy(each)]
        if lazy:
            problem = f"has parameters without a shape until the first batch (Lazy*): {lazy[0]}."
            way_out = "Give their sizes (nn.Linear for nn.LazyLinear), or run a batch through it in its __init__."
            raise ConfigError.of("workload.model", problem, way_out)
        return models.model_facts(self.parts, self.config)

    def rough(self) -> RunPlan:
        """Returns the plan by rules of thumb. Like all plans it raises a ConfigError for impossible settings."""
        return self._plan()

    def for_evaluation(self) -> RunPlan:
        """Returns the plan of a pass over the test data alone."""
        # Without training there are no gradients and no optimizer.
        model = replace(self.model, trainable_bytes=0, optimizer_state_bytes=0)
        if not self.config.memory.stages:
            return self._plan(model=model)
        memory = replace(self.config.memory, features=self.config.memory.stages[-1].features)
        return replace(self, config=replace(self.config, memory=memory))._plan(model=model)

    def for_training(self, rank: int) -> RunPlan:
        """Returns the plan of a run. The loader is timed, and memory is estimated if there is a budget.

        Raises:
            ConfigError: the configuration is impossible here; a DoesNotFit if it exceeds the card.
            DataError: the first batch can't be cut into the plan's micro-batches.
        """
        rough = self.rough()
        estimate = self._budget_estimate(rough)
        parts = self._for_loader(rough, estimate)
        first = self._first_batches(loaders.LoaderTrial(self.config, rough, parts, rank))
        plan = self._fitted(estimate, first)
        loaders.check_split(self.config, plan, parts, first)
        return self._with_stages(plan, lambda later: later._fitted(later._budget_estimate(later.rough()), None))

    def _first_batches(self, trial: loaders.LoaderTrial) -> FirstBatches | None:
        """Returns the time to build a batch and, if the choice of a loader depends on them, of a step and of each
        loader beside steps."""
        loading = LoaderPlanner(self.config, self.choices, self.facts, self.data, self.device.on_gpu)
        found = trial.build()
        if found is None or not replace(loading, first=found).needs_step:
            return found

        def beside(step: TrialStep | None) -> FirstBatches:
            return trial.beside(step, found, lambda known: replace(loading, first=known).to_time())

        model_bytes = 3 * self.model.parameter_bytes + self.model.optimizer_state_bytes
        if model_bytes > HOST_SHARE * self.facts.ram_available_gib * GIB:
            return beside(None)
        return beside_steps(self.config, trial.plan, trial.objects, beside)

    def estimate(self, plan: RunPlan) -> Footprints:
        """Returns footprints for the precision and loader of a plan, up to the samples that one device could get."""
        samples, host_bytes = self.config.workload.samples_per_step, HOST_SHARE * self.facts.ram_available_gib * GIB
        return Footprints(self.config, plan, self.parts, samples=samples, host_bytes=int(host_bytes))

    def estimated(self, estimate: Footprints, first: FirstBatches | None = None) -> RunPlan:
        """Returns the plan by an estimate of memory, by the first batches, and by values that earlier runs lowered."""
        plan = self._plan(first=first, estimate=estimate)
        if plan.predicted_peak_gib is not None and estimate.looked_at:
            plan = because_too(plan, f", {estimate.looked_at}")
        return self._as_remembered(replace(plan, footprints=estimate.known.found), estimate)

    def with_stages(self, plan: RunPlan) -> RunPlan:
        """Returns the plan of the first of ``memory.stages`` with the others' plans, by prediction alone."""
        return self._with_stages(plan, lambda later: later.estimated(later.estimate(later.rough())))

    def ways_that_fit(self, plan: RunPlan) -> Callable[[RanOut], list[str]]:
        """Returns a function for overrides that help after training ran out of memory. It does not use the model."""
        return partial(ways_that_fit, plan, self.config, self.choices.get("gpu", "auto"), self.model)

    def _plan(self, model: ModelFacts | None = None, **known: Any) -> RunPlan:
        plan = plan_run(self.config, self.choices, self.facts, self.device, self.data, model or self.model, **known)
        if plan.misfit is None or self.from_epoch is None:
            return plan
        problem = f"in the stage of memory.stages from epoch {self.from_epoch} on {plan.misfit.problem}"
        return replace(plan, misfit=replace(plan.misfit, problem=problem))

    def _budget_estimate(self, rough: RunPlan) -> Footprints | None:
        return None if rough.device.memory_gib is None else self.estimate(rough)

    def _for_loader(self, rough: RunPlan, estimate: Footprints | None) -> RunObjects:
        """Returns the parts with data whose batches have the same content as in training."""
        if self.config.memory.stages:  # all stages share one loader, and the last stage needs the most
            held: str | None = self.config.memory.stages[-1].features.value
        elif self.parts.data.features is not None and estimate is not None:  # the estimate may have moved features
            held = self._plan(estimate=estimate).memory.features
        else:
            held = rough.memory.features
        return self.parts.for_features(held)

    def _fitted(self, estimate: Footprints | None, first: FirstBatches | None) -> RunPlan:
        """Returns the plan by an estimate, by the first batches, and by real steps if any can be run."""
        plan = self._plan(first=first) if estimate is None else self.estimated(estimate, first)
        if plan.misfit is None:
            plan = self._measured(plan, estimate)
        elif plan.on_gpu or plan.device.enforce:
            raise DoesNotFit([plan.misfit])
        else:
            warning = f"On the card that was named this does not fit: {plan.misfit}"
            plan = replace(plan, warnings=(*plan.warnings, warning))
        return with_way_down(plan, self.config.memory.micro_batch_steps)

    def _measured(self, plan: RunPlan, estimate: Footprints | None) -> RunPlan:
        """Returns the plan with a micro-batch measured by real steps, if it is only predicted so far."""
        asked = steps_to_run(plan, self.config.memory.plateau_frac, self.model)
        if not asked:
            return plan
        if why := why_untried(plan, self.model):
            return because_too(plan, f"; not tried before training: {why}")
        return measured(self.config, plan, self.parts, estimate or self.estimate(plan), asked)

    def _as_remembered(self, plan: RunPlan, estimate: Footprints) -> RunPlan:
        """Returns the plan with the values that earlier runs lowered, and with the file for this run's own."""
        file = self._remembered_in(plan, estimate) if self.config.memory.remember else None
        if file is None:
            return plan
        plan = replace(plan, remembered_in=file)
        try:
            found = remembered_sizes.recall(file)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            warning = f"{file}: {why}; planned as if it were not there. Delete it, or set memory.remember=false."
            return replace(plan, warnings=(*plan.warnings, warning))
        optimizer = self.config.workload.optimizer
        if optimizer is None or any(name in optimizer for name in ("foreach", "fused")):
            found.pop(FOREACH, None)  # the configuration has decided it
        footprint = estimate(plan.memory.features, plan.memory.checkpoint_activations)
        known = footprint if isinstance(footprint, Footprint) else None
        return as_remembered(plan, found, step_shape(plan, self.model), known)

    def _remembered_in(self, plan: RunPlan, estimate: Footprints) -> Path | None:
        """Returns the file of all runs whose steps take the same memory apart from the micro-batch. None without a
        budget or digest, and with stages, which take different memory in one run."""
        device, trainer, budget_gib = plan.device, plan.trainer, plan.device.memory_gib
        if budget_gib is None or plan.misfit is not None or self.from_epoch is not None:
            return None
        digest = estimate.digest(plan.memory.features, plan.memory.checkpoint_activations)
        if digest is None:
            return None
        budget = f"{budget_gib:.2g}"  # with gpu=auto it varies with the memory held by other processes
        decisive = digest, device.name, budget, trainer.accelerator, trainer.strategy, trainer.world_size
        return remembered_sizes.file_for(Path(self.config.paths.cache_dir), *decisive, self.model.average_bytes)

    def _with_stages(self, plan: RunPlan, planned: Callable[[Self], RunPlan]) -> RunPlan:
        """Returns the plan with all stages; ``planned`` makes the plan of a later one."""
        stages, plans = self.config.memory.stages or [], [plan]
        try:
            for stage in stages[1:]:
                config, parts = of_stage(self.config, self.parts, stage)
                parts = replace(parts, footprints=None)  # they belong to another stage
                plans.append(planned(replace(self, config=config, parts=parts, from_epoch=stage.from_epoch)))
        finally:
            train_encoder(self.parts, is_trained=False)
        return over_stages(stages, plans) if stages else plan


def plan_without_running(composed: Composed[RunConfig]) -> DryPlan:
    """Returns the plan by prediction alone, on the named cards if this machine lacks them. Nothing is timed.

    Reads the data and builds the model on the CPU.

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

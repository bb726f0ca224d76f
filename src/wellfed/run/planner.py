"""Makes the plan of a run from its configuration, this machine, its data and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

from torch.nn.parameter import is_lazy

from wellfed.config.compose import Composed
from wellfed.config.faults.target_faults import check_imported
from wellfed.config.schema import Accelerator, RunConfig
from wellfed.data.backend_benchmark import TrialStep, build_first_batches, time_backends, time_step
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.errors import ConfigError, DoesNotFit, Fault
from wellfed.generators import seed_everything
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.profiles import with_cards
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.loader import LoaderPlanner
from wellfed.plan.micro_batch import because_too, needs_probe, why_untried
from wellfed.plan.run_plan import DataFacts, DevicePlan, DryPlan, ModelFacts, RunPlan
from wellfed.run.micro_batch.footprints import Footprints
from wellfed.run.micro_batch.real_steps import beside_steps, measured
from wellfed.run.objects import assemble, datasets, guests, loaders, models
from wellfed.run.objects.run_objects import RunObjects
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
        return cls(config, composed.choices, facts, device, parts)

    @cached_property
    def data(self) -> DataFacts:
        """Facts about the data that the plan needs."""
        guest = self.parts.guest
        if guest is not None and guest.has("train"):
            return guests.data_facts(self.parts, guest, self.config)
        return datasets.data_facts(self.parts, self.config)

    @cached_property
    def model(self) -> ModelFacts:
        """Facts about the model that the plan needs. Raises a ConfigError if its sizes are still unknown."""
        model = self.parts.model
        lazy = [name for name, each in chain(model.named_parameters(), model.named_buffers()) if is_lazy(each)]
        if lazy and self.parts.guest is None:
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
        return self._plan(model=replace(self.model, trainable_bytes=0, optimizer_state_bytes=0))

    def for_training(self, rank: int) -> RunPlan:
        """Returns the plan of a run. The loader is timed, and memory is estimated if there is a budget.

        Raises:
            ConfigError: the configuration is impossible here; a DoesNotFit if it exceeds the card.
        """
        rough = self.rough()
        estimate = None if rough.device.memory_gib is None else self.estimate(rough)
        has_features = self.parts.data.features is not None
        plan = rough if estimate is None or not has_features else self._plan(estimate=estimate)  # it may move features
        return self._fitted(estimate, self._first_batches(rough, self.parts.for_features(plan.memory.features), rank))

    def _first_batches(self, rough: RunPlan, parts: RunObjects, rank: int) -> FirstBatches | None:
        """Returns the time to build a batch and, if the choice of a loader depends on them, of a step and of each
        loader beside steps. None if nothing depends on it, or if no batch can be built."""
        config, data, first = self.config, parts.data.train, loaders.first_builder(self.config, rough)
        if first is None:
            return None
        make = loaders.trial_loaders(config, parts, rank)
        found = parts.first_batches or build_first_batches(make, first, data)
        if found is None:
            return None
        if rank > 0:  # rank 0 checks host memory for all ranks, since free memory changes while the others start
            found = replace(found, batch_bytes=0)
        loading = LoaderPlanner(config, self.choices, self.facts, self.data, self.device.on_gpu)
        if not replace(loading, first=found).needs_step:
            return found

        def beside(step: TrialStep | None) -> FirstBatches:
            timed = found if step is None else time_step(make, first, found, step, data)
            candidates = replace(loading, first=timed).to_time()
            settings = [loaders.loader_settings(config, section) for section in candidates]
            return time_backends(make, settings, timed, step, data)

        model_bytes = 3 * self.model.parameter_bytes + self.model.optimizer_state_bytes
        if model_bytes > HOST_SHARE * self.facts.ram_available_gib * GIB:
            return beside(None)
        return beside_steps(config, rough, parts, beside)

    def estimate(self, plan: RunPlan) -> Footprints:
        """Returns footprints for the precision and loader of a plan, up to the samples that one device could get."""
        return Footprints(self.config, plan, self.parts, samples=self.config.workload.samples_per_step)

    def estimated(self, estimate: Footprints, first: FirstBatches | None = None) -> RunPlan:
        """Returns the plan by an estimate of memory and by the first batches."""
        return self._plan(first=first, estimate=estimate)

    def _plan(self, model: ModelFacts | None = None, **known: Any) -> RunPlan:
        return plan_run(self.config, self.choices, self.facts, self.device, self.data, model or self.model, **known)

    def _fitted(self, estimate: Footprints | None, first: FirstBatches | None) -> RunPlan:
        """Returns the plan by an estimate, by the first batches, and by real steps if any can be run."""
        plan = self._plan(first=first) if estimate is None else self.estimated(estimate, first)
        if plan.misfit is not None:
            if plan.on_gpu:
                raise DoesNotFit([plan.misfit])
            warning = f"On the card that was named this does not fit: {plan.misfit}"
            return replace(plan, warnings=(*plan.warnings, warning))
        if estimate is None or not needs_probe(plan):
            return plan
        if why := why_untried(plan, self.model):
            return because_too(plan, f"; not tried before training: {why}")
        return measured(self.config, plan, self.parts, estimate)


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
    return DryPlan(planner.estimated(estimate), imagined, config.workload.name)

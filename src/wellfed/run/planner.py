"""From the configuration, this machine, data and model to the plan: what training does, and what ``plan`` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch.nn.parameter import is_lazy

from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.loading.first_batches import FirstBatches
from wellfed.planning.device import plan_device
from wellfed.planning.memory_candidates import Estimate
from wellfed.planning.plan import plan_run
from wellfed.planning.planned import ModelFacts, RunPlan
from wellfed.run import assemble
from wellfed.run.footprints import Footprints
from wellfed.run.measured_fit import probed

HOST_SHARE = 0.5
"""Of the free host memory that an estimate may take where a model must be run for real."""


@dataclass(frozen=True)
class Planner:
    """All that a plan is made of."""

    config: RunConfig
    choices: Mapping[str, str]
    facts: MachineFacts
    device: RunPlan
    parts: assemble.Parts

    def for_training(self, rank: int) -> RunPlan:
        """The plan of a run: the loader is timed, and memory is estimated where there is a budget to keep.

        Raises:
            ConfigError: what is asked for can't be done here, or does not fit the card.
        """
        rough = self.rough()
        estimate = None if self.device.budget_gib is None else self.estimate(rough)
        first = assemble.try_loader(self.config, self.choices, self.facts, rough, self.parts, rank=rank)
        plan = _looked_at(self._plan(self.config, self.device, first=first, estimate=estimate), estimate)
        if plan.misfit is None:
            if estimate is None or not self._is_open(plan):
                return plan
            if untried := self._untried(plan):
                return _with_reason(plan, f"not tried before training: {untried}")
            return probed(self.config, plan, self.parts, estimate, torch.device("cuda", 0))
        if plan["trainer.accelerator"] == "gpu" or plan.cap:
            raise ConfigError([plan.misfit])
        return replace(plan, warnings=(*plan.warnings, f"On the card that was named this does not fit: {plan.misfit}"))

    def _is_open(self, plan: RunPlan) -> bool:
        """Whether a GPU's micro-batch is a prediction."""
        return (
            plan["trainer.accelerator"] == "gpu"
            and plan.knobs["memory.micro_batch"].source == "predicted"
            and plan.predicted_peak_gib is not None
        )

    def _untried(self, plan: RunPlan) -> str:
        """Why no step is run before training to measure what it takes; empty where one is."""
        if self.parts.is_lightning_module:
            return "a LightningModule runs its own step"
        if plan["trainer.devices"] > 1:
            return "each rank would measure for itself, and all must take the same size"
        if plan["gpu.compile"] != "none":
            return (
                f"gpu.compile={plan['gpu.compile']} would compile twice; what it keeps for its graphs is not predicted"
            )
        return ""

    def rough(self) -> RunPlan:
        """The plan by rules of thumb.

        Raises:
            ConfigError: what is asked for can't be done.
        """
        return self._plan(self.config, self.device)

    def model_facts(self) -> ModelFacts:
        """What a plan knows of the model.

        Raises:
            ConfigError: its sizes are not known yet.
        """
        model = self.parts.model
        lazy = [name for name, each in chain(model.named_parameters(), model.named_buffers()) if is_lazy(each)]
        if lazy:
            problem = f"has parameters without a shape until the first batch (Lazy*): {lazy[0]}."
            way_out = "Give their sizes (nn.Linear for nn.LazyLinear), or run a batch through it in its __init__."
            raise ConfigError([Fault("workload.model", problem, way_out)])
        return assemble.model_facts(self.parts, self.config)

    def without_running(self) -> tuple[RunPlan, list[RunPlan]]:
        """The plan by estimate alone, and for several devices that of each smaller number too; nothing is timed.

        Raises:
            ConfigError: what is asked for can't be done.
        """
        estimate = self.estimate(self.rough())
        plan = self.estimated(estimate)
        return plan, self._by_devices(estimate) if self.config.trainer.devices > 1 else []

    def estimated(self, estimate: Footprints, first: FirstBatches | None = None) -> RunPlan:
        """The plan by an estimate of memory, and by what the first batches have shown.

        Raises:
            ConfigError: what is asked for can't be done.
        """
        return _looked_at(self._plan(self.config, self.device, first=first, estimate=estimate), estimate)

    def _by_devices(self, estimate: Estimate) -> list[RunPlan]:
        plans = []
        for devices in range(1, self.config.trainer.devices + 1):
            config = replace(self.config, trainer=replace(self.config.trainer, devices=devices))
            device = plan_device(config, self.choices, self.facts)
            if isinstance(device, list):
                continue
            plan = self._run(config, device, estimate=estimate)
            if not isinstance(plan, list):
                plans.append(plan)
        return plans

    def estimate(self, plan: RunPlan) -> Footprints:
        """Footprints for the precision and loader of a plan, for as many samples as one device could be given."""
        return Footprints(
            self.config,
            plan,
            self.parts,
            samples=self.config.workload.effective_batch_size,
            host_bytes=int(HOST_SHARE * self.facts.ram_available_gib * 2**30),
        )

    def _plan(self, config: RunConfig, device: RunPlan, **known: object) -> RunPlan:
        found = self._run(config, device, **known)
        if isinstance(found, list):
            raise ConfigError(found)
        return found

    def _run(self, config: RunConfig, device: RunPlan, **known: object) -> RunPlan | list[Fault]:
        run: Callable[..., RunPlan | list[Fault]] = partial(plan_run, config, self.choices, self.facts, device)
        return run(assemble.data_facts(self.parts), self.model_facts(), **known)


def _with_reason(plan: RunPlan, more: str) -> RunPlan:
    """More on the micro-batch."""
    micro = plan.knobs["memory.micro_batch"]
    changed = replace(micro, because=f"{micro.because}; {more}")
    return replace(plan, knobs={**plan.knobs, "memory.micro_batch": changed})


def _looked_at(plan: RunPlan, estimate: Footprints | None) -> RunPlan:
    """The plan whose predicted peak says for which samples it was predicted, where they differ."""
    if estimate is None or plan.predicted_peak_gib is None or not estimate.looked_at:
        return plan
    micro = plan.knobs["memory.micro_batch"]
    said = replace(micro, because=f"{micro.because}, {estimate.looked_at}")
    return replace(plan, knobs={**plan.knobs, "memory.micro_batch": said})

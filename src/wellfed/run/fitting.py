"""Finds the micro-batch that fits this machine, by running steps of a few sizes (``wellfed fit``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, DataError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.plan.predict.peak import NoEstimate
from wellfed.plan.predict.size_fit import find_micro_batch
from wellfed.plan.predict.size_search import Fit, Probe
from wellfed.ranks import largest_share
from wellfed.run.micro_batch.real_steps import ConfiguredStep, with_steps
from wellfed.run.planner import Planner
from wellfed.train.memory.oom import cap_cuda
from wellfed.units import GIB

HOST_FRAC = 0.9
"""Share of the free host memory that is the budget if training runs on the CPU and no card was named."""


@dataclass(frozen=True)
class Fitting:
    """Result of a search for the micro-batch."""

    found: Fit
    budget_gib: float
    is_whole: bool
    """Whether the model's steps are never split."""


def fit(composed: Composed[RunConfig], on_probe: Callable[[Probe], None]) -> Fitting:
    """Runs steps of up to 6 sizes; ``on_probe`` is called after each.

    Raises:
        ConfigError, DataError: nothing can be run.
    """
    facts = machine(torch_cuda())
    planner = Planner.start(composed, facts)
    config = planner.config
    if planner.parts.guest is not None:
        problem = f"{planner.parts.why_guest}: Lightning steps on whole batches, and there is no micro-batch to find."
        raise ConfigError.of("workload.model", problem, "Bring a plain nn.Module with loss(batch).")
    for warning in planner.device.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    plan, is_whole = planner.rough(), planner.model.has_batch_norm
    make_batch = planner.estimate(plan).batches(plan.memory.features)
    if isinstance(make_batch, NoEstimate):
        raise DataError(f"{make_batch.reason.rstrip('.')}.")
    budget_gib = plan.device.memory_gib or HOST_FRAC * facts.ram_available_gib
    if plan.on_gpu and plan.device.enforce:
        cap_cuda(int(budget_gib * GIB))

    def find(step: ConfiguredStep) -> Fit:
        return find_micro_batch(
            step,
            lambda size: step.to_device(make_batch(size)),
            budget_gib=budget_gib,
            max_size=largest_share(plan.workload.effective_batch_size, plan.trainer.world_size),
            min_size=2 if is_whole else 1,
            meter=step.meter(),
            on_probe=on_probe,
        )

    return Fitting(with_steps(config, plan, planner.parts, find), budget_gib, is_whole)

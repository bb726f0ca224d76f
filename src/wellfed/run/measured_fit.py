"""Runs real steps of a copy of the model before training, to measure what memory they take and how fast they are."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from wellfed.config.schema import RunConfig
from wellfed.contract import Batch
from wellfed.footprint.footprint import Footprint, NoEstimate
from wellfed.footprint.size_fit import CudaMeter, Meter
from wellfed.loading.backend_benchmark import copied, without_side_effects
from wellfed.memory import oom
from wellfed.memory.features import blank
from wellfed.planning.budget import step_shape
from wellfed.planning.probing import at_plateau, with_probes
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.run.footprints import Footprints
from wellfed.run.training_step import ConfiguredStep

RATES_S = 20.0
"""Seconds after which the rate of no further size is measured."""
RATE_S, FEWEST_STEPS, MOST_STEPS = 0.5, 2, 20
"""How long one rate is measured."""
Figure = TypeVar("Figure", int, float)
_LOG = logging.getLogger(__name__)


def probed(
    config: RunConfig,
    plan: RunPlan,
    parts: assemble.Parts,
    footprints: Footprints,
    device: torch.device,
    make_meter: Callable[[ConfiguredStep], Meter] = lambda step: CudaMeter(step.device),
) -> RunPlan:
    """The plan with a measured micro-batch; as it is where no step can be run, of which training will tell.

    Model, data and random states stay as they are. A feature table is there in its size alone: to fill it twice may
    take minutes.

    Args:
        footprints: those that ``plan`` was made with.
    """
    footprint = footprints(plan.memory.features, plan.memory.checkpoint_activations)
    make_batch, facts = footprints.batches, assemble.model_facts(parts, config)
    if isinstance(footprint, NoEstimate) or isinstance(make_batch, NoEstimate):
        return plan

    def decide(step: ConfiguredStep) -> RunPlan:
        meter = make_meter(step)

        def probe(size: int) -> int | None:
            found = _unless_out_of_memory(lambda: _peak(step, make_batch(size), meter))
            meter.free()
            return found

        shape = step_shape(plan, facts)
        return with_probes(plan, footprint, shape, probe, meter.room, may_split=not facts.has_batch_norm)

    return _after_steps(config, plan, parts, device, decide)


def with_plateau(
    config: RunConfig, plan: RunPlan, parts: assemble.Parts, footprints: Footprints, device: torch.device
) -> RunPlan:
    """The plan with the smallest micro-batch that keeps ``memory.plateau_frac`` of the best rate, measured here.

    As `probed` in all else.
    """
    frac, make_batch = config.memory.plateau_frac, footprints.batches
    if frac is None or isinstance(make_batch, NoEstimate):
        return plan
    has_peak = plan.predicted_peak_gib is not None
    footprint = footprints(plan.memory.features, plan.memory.checkpoint_activations) if has_peak else None
    samples = math.ceil(plan.workload.effective_batch_size / plan.trainer.devices)
    until_s = time.monotonic() + RATES_S

    def decide(step: ConfiguredStep) -> RunPlan:
        def rate(size: int) -> float | None:
            if time.monotonic() > until_s:
                return None
            return _unless_out_of_memory(lambda: _rate(step, make_batch(size), size)) or 0.0

        return at_plateau(
            plan,
            frac,
            rate,
            samples=samples,
            footprint=footprint if isinstance(footprint, Footprint) else None,
            step=step_shape(plan, assemble.model_facts(parts, config)),
        )

    return _after_steps(config, plan, parts, device, decide)


def _after_steps(
    config: RunConfig,
    plan: RunPlan,
    parts: assemble.Parts,
    device: torch.device,
    decide: Callable[[ConfiguredStep], RunPlan],
) -> RunPlan:
    """What is decided with steps of a copy of the model; the plan as it is where none can be run."""
    try:
        with without_side_effects(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model = copy.deepcopy(parts.model)
            features = None if parts.features is None else model.features()  # type: ignore[operator]
            data = replace(parts.data, train=copied(parts.data.train))
            its_copy = replace(parts, model=model, features=features, data=data)
            return decide(ConfiguredStep(config, plan, its_copy, device, fill=blank))
    except Exception as error:  # noqa: BLE001  foreign code, and a probe must not end a run
        _LOG.info("no step could be tried before training: %r", error)
        return plan
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the peak in the record is that of training


def _unless_out_of_memory(measure: Callable[[], Figure]) -> Figure | None:
    try:
        return measure()
    except Exception as error:
        if oom.classify(error) is None:
            raise
        return None


def _peak(step: ConfiguredStep, batch: Batch, meter: Meter) -> int:
    """Bytes of the second step; the first makes the optimizer's state."""
    batch = step.place(batch)
    step(batch)
    return meter.peak(lambda: step(batch)).total


def _rate(step: ConfiguredStep, batch: Batch, size: int) -> float:
    """Samples/s of some steps after the first."""

    def wait() -> None:
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)

    batch = step.place(batch)
    step(batch)
    wait()
    began_s, num_steps = time.perf_counter(), 0
    while num_steps < FEWEST_STEPS or (num_steps < MOST_STEPS and time.perf_counter() - began_s < RATE_S):
        step(batch)
        num_steps += 1
    wait()
    return size * num_steps / (time.perf_counter() - began_s)

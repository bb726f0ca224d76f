"""Runs real steps of a copy of the model before training, to measure what memory they take and how fast they are."""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.contract import Batch, FeatureModeName, Features, FeatureSource
from wellfed.data.backend_benchmark import copied, without_side_effects
from wellfed.plan.budget import step_shape
from wellfed.plan.predict.footprint import Footprint, NoEstimate
from wellfed.plan.predict.size_fit import CudaMeter, Meter
from wellfed.plan.probing import at_plateau, with_probes
from wellfed.plan.run_plan import RunPlan
from wellfed.ranks import largest_share
from wellfed.run.micro_batch.footprints import Footprints
from wellfed.run.objects import models, optimizers
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory import oom
from wellfed.train.memory.checkpointing import checkpoint_blocks
from wellfed.train.memory.features import DeviceTable, blank, hold
from wellfed.train.memory.ladder import MicroBatches
from wellfed.train.step.compiled import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.train_step import TrainStep, parameter_groups

RATES_S = 20.0
"""Seconds after which the rate of no further size is measured."""
RATE_S, FEWEST_STEPS, MOST_STEPS = 0.5, 2, 20
"""How long one rate is measured."""
Figure = TypeVar("Figure", int, float)
_LOG = logging.getLogger(__name__)


class ConfiguredStep:
    """Makes optimizer steps of the configured model on one device, without a trainer.

    Moves the model to ``device``, fills the feature table, and steps; call it with a batch that `place` gave.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        parts: RunObjects,
        device: torch.device,
        fill: Callable[[Features, FeatureModeName, torch.device], FeatureSource] = hold,
    ) -> None:
        self.device, self._precision = device, Precision.for_training(plan.device.precision, device.type)
        self._model = model = self._precision.convert(parts.model.to(device))
        if plan.memory.checkpoint_activations:
            checkpoint_blocks(model)
        self._features: FeatureSource | None = None
        if parts.features is not None:
            model.eval()
            self._features = fill(parts.features, plan.memory.features or "dynamic", device)
        model.train()
        groups = parameter_groups(model)
        self._optimizer = optimizers.make_optimizer(config, plan, groups, sparse=parts.has_sparse_gradients)
        self._micro = MicroBatches(1)
        self._step = TrainStep(
            model,
            self._optimizer,
            loss=Loss(model, plan.device.compile, lambda message: None),
            prepare=Preparation(parts.data.train, config.seed, model),
            micro=self._micro,
            precision=self._precision,
            device=device,
            features=lambda: self._features,
            gradient_clip=config.trainer.gradient_clip,
        )
        self._batch: Batch | None = None

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, in the precision of the step; the one before is let go."""
        self._batch = None
        placed = batches.to_device(batch, self.device)
        self._batch = batches.map_tensors(placed, lambda each: each.to(self._precision.dtype_of(each)))
        return self._batch

    def resident(self) -> Iterator[Tensor]:
        """What lies in memory between steps."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if isinstance(self._features, DeviceTable):
            yield self._features.table
        if self._batch is not None:
            yield from batches.tensors(self._batch)

    def __call__(self, batch: Batch) -> None:
        """A step on the whole batch at once; the weights change."""
        self._micro.size = size = batches.batch_size(batch)
        self._step(Delivery(batch, epoch=0, index=0, total=size))


def probed(
    config: RunConfig,
    plan: RunPlan,
    parts: RunObjects,
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
    make_batch, facts = footprints.batches(plan.memory.features), models.model_facts(parts, config)
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
    config: RunConfig, plan: RunPlan, parts: RunObjects, footprints: Footprints, device: torch.device
) -> RunPlan:
    """The plan with the smallest micro-batch that keeps ``memory.plateau_frac`` of the best rate, measured here.

    As `probed` in all else.
    """
    frac, make_batch = config.memory.plateau_frac, footprints.batches(plan.memory.features)
    if frac is None or isinstance(make_batch, NoEstimate):
        return plan
    has_peak = plan.predicted_peak_gib is not None
    footprint = footprints(plan.memory.features, plan.memory.checkpoint_activations) if has_peak else None
    samples = largest_share(plan.workload.effective_batch_size, plan.trainer.world_size)
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
            step=step_shape(plan, models.model_facts(parts, config)),
        )

    return _after_steps(config, plan, parts, device, decide)


def _after_steps(
    config: RunConfig,
    plan: RunPlan,
    parts: RunObjects,
    device: torch.device,
    decide: Callable[[ConfiguredStep], RunPlan],
) -> RunPlan:
    """What is decided with steps of a copy of the model; the plan as it is where none can be run."""
    try:
        with without_side_effects(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model = copy.deepcopy(parts.model)
            parts = parts.for_features(plan.memory.features)
            features = models.features_of(parts.data, model)
            if features is not None and parts.features is not None:
                features = replace(features, trainable=parts.features.trainable)
            data = replace(parts.data, train=copied(parts.data.train))
            its_copy = replace(parts, model=model, features=features, data=data)
            return decide(ConfiguredStep(config, plan, its_copy, device, fill=blank))
    except Exception as error:  # noqa: BLE001  foreign code, and a probe must not end a run
        _LOG.info("no step could be tried before training: %r", error)
        failure = oom.classify(error)
        if failure is None:
            return plan
        micro = plan.memory.decided("micro_batch")
        because = f"{micro.because}; not tried before training, for which memory did not suffice: {failure.message}"
        return replace(plan, memory=plan.memory.but(micro_batch=replace(micro, because=because)))
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

"""Runs real steps of a copy of the configured model, to measure their memory and speed."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.contract import Batch, FeatureSource
from wellfed.data.backend_benchmark import TrialStep, copied, without_side_effects
from wellfed.plan.budget import step_shape
from wellfed.plan.micro_batch import why_untried, with_probes
from wellfed.plan.predict.peak import NoEstimate
from wellfed.plan.predict.size_fit import CudaMeter, Meter, Prober, TensorMeter
from wellfed.plan.run_plan import RunPlan
from wellfed.run.micro_batch.footprints import Footprints
from wellfed.run.objects import models, optimizers
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory.features import DeviceTable, hold, in_eval_mode
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import StepOptions, TrainStep, parameter_groups

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


class ConfiguredStep:
    """Optimizer steps of the configured model on one device, without a trainer. Moves the model to ``device`` and makes
    the feature table, or one of zeros if it is ``blank``. Call it with a batch from `to_device`."""

    def __init__(self, config: RunConfig, plan: RunPlan, parts: RunObjects, device: torch.device, blank: bool) -> None:
        self.device, self._precision = device, Precision.for_training(plan.device.precision, device.type)
        models.prepare_step(config, plan, parts.model)
        self._model = model = self._precision.convert(parts.model.to(device))
        self._features: FeatureSource | None = None
        if parts.features is not None:
            with in_eval_mode(model):
                self._features = hold(parts.features, plan.memory.features or "dynamic", device, blank=blank)
        groups = parameter_groups(model)
        self._optimizer = optimizers.make_optimizer(config, plan, groups, sparse=parts.has_sparse_gradients)
        self._micro, prepare = MicroBatches(1), Preparation(parts.data.train, config.seed, model)
        loss, source = Loss(model, plan.device.compile), self._features
        passes = Computation(model, loss, prepare, self._precision, device, features=lambda: source)
        options = StepOptions(gradient_clip=config.trainer.gradient_clip)
        self._step = TrainStep(passes, self._optimizer, Fallbacks(self._micro), options)
        self._batch: Batch | None = None

    def to_device(self, batch: Batch) -> Batch:
        """Returns the batch on the device, in the precision of the step. Frees the previous batch."""
        self._batch = None
        placed = batches.to_device(batch, self.device)
        self._batch = batches.map_tensors(placed, lambda each: each.to(self._precision.dtype_of(each)))
        return self._batch

    def resident(self) -> Iterator[Tensor]:
        """Yields the tensors that exist between steps."""
        yield from self._model.parameters()
        yield from self._model.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if isinstance(self._features, DeviceTable):
            yield self._features.table
        yield from batches.tensors(self._batch)

    def meter(self) -> Meter:
        """Returns the meter of its device's memory."""
        return CudaMeter(self.device) if self.device.type == "cuda" else TensorMeter(self.resident)

    def __call__(self, batch: Batch, most: int | None = None) -> None:
        """Steps on the whole batch at once, or in micro-batches of ``most`` samples. The weights change."""
        size = batches.batch_size(batch)
        self._micro.size = size if most is None else min(most, size)
        self._step(Delivery(batch, epoch=0, index=0, total=size))


def with_steps(
    config: RunConfig,
    plan: RunPlan,
    parts: RunObjects,
    use: Callable[[ConfiguredStep], Result],
    *,
    is_trial: bool = False,
) -> Result:
    """Returns the result of ``use`` for steps of the parts. Frees their device memory and restores random states.

    Args:
        is_trial: a copy of the parts steps, whose feature table is blank: filling it twice may take minutes.
    """
    device = torch.device("cuda:0" if plan.on_gpu else "cpu")
    try:
        with without_side_effects(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # No name of this frame may refer to the step, or to the copy, when its memory is freed.
            return use(ConfiguredStep(config, plan, _copy(parts, plan) if is_trial else parts, device, blank=is_trial))
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the recorded peak must be training's


def _copy(parts: RunObjects, plan: RunPlan) -> RunObjects:
    model, parts = copy.deepcopy(parts.model), parts.for_features(plan.memory.features)
    features = models.features_of(parts.data, model)
    if features is not None and parts.features is not None:
        features = replace(features, trainable=parts.features.trainable)
    return replace(parts, model=model, features=features, data=replace(parts.data, train=copied(parts.data.train)))


def beside_steps(
    config: RunConfig, plan: RunPlan, parts: RunObjects, use: Callable[[TrialStep | None], Result]
) -> Result:
    """Returns the result of ``use`` for steps of a copy of the model; for None if it can't step before training."""
    most = None if plan.memory.accumulate == 1 else plan.memory.micro_batch

    def with_step(step: ConfiguredStep) -> Result:
        return use(TrialStep(lambda batch: step(step.to_device(batch), most), step.meter().wait))

    why: object = why_untried(plan, models.model_facts(parts, config))
    if not why:
        try:
            return with_steps(config, plan, parts, with_step, is_trial=True)
        except Exception as error:  # noqa: BLE001  user code; training will report its error
            why = f"no step could be run: {error!r}"
    _LOG.info("loaders are timed beside stand-in steps: %s", why)
    return use(None)


def measured(
    config: RunConfig,
    plan: RunPlan,
    parts: RunObjects,
    footprints: Footprints,
    make_meter: Callable[[ConfiguredStep], Meter] = ConfiguredStep.meter,
) -> RunPlan:
    """Returns the plan with a measured micro-batch. Unchanged if no step can be run, which training will report.

    Args:
        plan: a plan with a predicted peak.
        footprints: the footprints that ``plan`` was made with.
    """
    memory, facts = plan.memory, models.model_facts(parts, config)
    make_batch = footprints.batches(memory.features)
    footprint = footprints(memory.features, memory.checkpoint_activations)
    if isinstance(make_batch, NoEstimate) or isinstance(footprint, NoEstimate):
        return plan

    def decide(step: ConfiguredStep) -> RunPlan:
        prober = Prober(step, lambda size: step.to_device(make_batch(size)), make_meter(step))

        def peak_bytes(size: int) -> int | None:
            peak = prober.peak(size)
            return None if peak is None else peak.total

        available, may_split = prober.meter.available_bytes, not facts.has_batch_norm
        return with_probes(plan, peak_bytes, available, step_shape(plan, facts), footprint, may_split=may_split)

    try:
        return with_steps(config, plan, parts, decide, is_trial=True)
    except Exception as error:  # noqa: BLE001  user code; a probe must not end a run
        _LOG.info("no step could be tried before training: %r", error)
        return plan

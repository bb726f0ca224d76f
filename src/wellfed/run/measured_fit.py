"""Real steps before training on a GPU, of a copy of the model: what the prediction of memory is measured against."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from wellfed.config.schema import RunConfig
from wellfed.contract import Batch
from wellfed.footprint.footprint import NoEstimate
from wellfed.footprint.size_fit import CudaMeter, Meter
from wellfed.loading.backend_benchmark import copied, without_side_effects
from wellfed.memory import oom
from wellfed.memory.features import blank
from wellfed.planning.budget import step_shape
from wellfed.planning.probing import with_probes
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.run.footprints import Footprints
from wellfed.run.training_step import ConfiguredStep

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
    make_batch = footprints.batches()
    if isinstance(footprint, NoEstimate) or isinstance(make_batch, NoEstimate):
        return plan
    try:
        with without_side_effects(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            step = ConfiguredStep(config, plan, _apart(parts), device, fill=blank)
            meter = make_meter(step)

            def probe(size: int) -> int | None:
                found = _peak(step, make_batch, size, meter)
                meter.free()
                return found

            facts = assemble.model_facts(parts, config)
            return with_probes(
                plan, footprint, step_shape(plan, facts), probe, meter.room, may_split=not facts.has_batch_norm
            )
    except Exception as error:  # noqa: BLE001  foreign code, and a probe must not end a run
        _LOG.info("no step could be tried before training: %r", error)
        return plan
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # the peak in the record is that of training


def _peak(step: ConfiguredStep, make_batch: Callable[[int], Batch], size: int, meter: Meter) -> int | None:
    """Bytes of the second step, the first makes the optimizer's state; None where they ran out."""
    try:
        batch = step.place(make_batch(size))
        step(batch)
        return meter.peak(lambda: step(batch)).total
    except Exception as error:
        if oom.classify(error) is None:
            raise
        return None


def _apart(parts: assemble.Parts) -> assemble.Parts:
    model = copy.deepcopy(parts.model)
    features = None if parts.features is None else model.features()  # type: ignore[operator]
    return replace(parts, model=model, features=features, data=replace(parts.data, train=copied(parts.data.train)))

"""Models of many kinds, their training for real, and the memory it took: what an estimate is held against."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.memory_models import (
    Attention,
    Conv,
    FrozenEncoder,
    FrozenMixture,
    GradientPenalty,
    LanguageModel,
    Lstm,
    Mlp,
    Neighbours,
    ResNet,
    SparseTable,
    TextOfItems,
    UNet,
    VisionTransformer,
    Volume,
)
from wellfed import batches
from wellfed.batches import Delivery
from wellfed.config.compose import compose
from wellfed.config.schema import RunConfig
from wellfed.contract import FEATURE_MODES, Batch, FeatureModeName, Features, FeatureSource
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.plan.predict.cuda_emulation import AsOnCuda, backward
from wellfed.plan.predict.peak import Footprint, NoEstimate
from wellfed.plan.predict.rehearsal import Task, measure
from wellfed.plan.run_plan import RunPlan
from wellfed.run.objects.assemble import make_objects
from wellfed.run.objects.optimizers import make_optimizer
from wellfed.run.objects.run_objects import RunObjects
from wellfed.train.memory.checkpointing import checkpoint_blocks
from wellfed.train.memory.features import hold
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import TrainStep, parameter_groups

CPU = torch.device("cpu")
STEPS = 4
"""The first makes the optimizer's state; what the allocator reserves settles after."""
CARDS_ALONE = ("embedding, sparse adam", "gradient penalty", "neighbours, gather")
"""Cases that torch's count of live tensors on a CPU can't follow (sparse tensors, gradients of gradients), or that it
changes itself (see `wellfed.plan.predict.memory_tracker`)."""


@dataclass(frozen=True)
class Case:
    """A model, its data, and how it is trained."""

    name: str
    model: nn.Module
    task: Task
    sizes: tuple[int, ...]
    """Micro-batches to look at."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameter_groups(model), lr=1e-3, momentum=0.9)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)


def cases() -> Iterator[Case]:
    """Our own models; workloads come by `workload_cases`."""
    label = torch.randint(10, (4,))
    pixels = torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.randint(1000, (4, 32))
    yield _case("mlp", Mlp(), {"x": torch.randn(4, 64), "label": label}, (16, 128, 512, 2048))
    yield _case("mlp, sgd", Mlp(), {"x": torch.randn(4, 64), "label": label}, (16, 128, 512, 2048), momentum)
    yield _case("conv", Conv(), {"x": pixels, "label": label}, (8, 16, 32, 64))
    yield _case("conv, checkpointed", Conv(), {"x": pixels, "label": label}, (8, 16, 32, 64), checkpointed=True)
    yield _case("lstm", Lstm(), {"x": torch.randn(4, 8, 8), "y": torch.randn(4)}, (16, 64, 128, 512))
    yield _case("attention", Attention(), {"x": tokens}, (8, 16, 32, 64))
    yield _case("attention, checkpointed", Attention(), {"x": tokens}, (8, 16, 32, 64), checkpointed=True)
    triple = {"user": torch.randint(5000, (4,)), "item": torch.randint(600, (4,)), "y": torch.rand(4)}
    for mode in FEATURE_MODES:
        yield _case(
            f"frozen encoder, {mode}",
            FrozenEncoder(),
            triple,
            (16, 128, 512, 2048),
            prepare=Preparation(TextOfItems(), 0),
            feature_mode=mode,
        )
    small = (4, 8, 16, 32)
    yield _case("resnet, batch norm, sgd", ResNet(), {"x": pixels, "label": label}, (16, 32, 64), momentum)
    yield _case("u-net", UNet(), {"x": pixels, "label": label}, (8, 16, 32, 64))
    vision = {"x": pixels, "label": label}
    yield _case("vision transformer", VisionTransformer(), vision, (8, 16, 32, 64))
    yield _case("vision transformer, checkpointed", VisionTransformer(), vision, (8, 16, 32, 64), checkpointed=True)
    yield _case("language model, low rank", LanguageModel(), {"x": torch.randint(2000, (4, 64))}, small)
    yield _case("conv3d", Volume(), {"x": torch.randn(4, 1, 16, 16, 16), "label": label}, small)
    ids = {"ids": torch.randint(100_000, (4096, 8)), "y": torch.randn(4096)}
    yield _case("embedding, adam", SparseTable(sparse=False), ids, (64, 512, 2048, 4096))
    yield _case("embedding, sparse adam", SparseTable(), ids, (64, 512, 2048, 4096), sparse_adam)
    points = {"points": torch.randn(4, 96, 3), "label": label}
    yield _case("neighbours, gather", Neighbours(), points, (2, 4, 8, 16))
    wide = {"x": torch.randn(4, 64), "label": label}
    yield _case("gradient penalty", GradientPenalty(), wide, (64, 512, 2048, 4096))
    yield _case("frozen mixture", FrozenMixture(), wide, (64, 512, 2048, 4096))


def _case(
    name: str,
    model: nn.Module,
    sample: Batch,
    sizes: tuple[int, ...],
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **more: Any,
) -> Case:
    return Case(name, model, Task(partial(batches.repeated, sample), make, **more), sizes)


def estimated(case: Case, samples: int, **more: Any) -> Footprint | NoEstimate:
    """What is predicted. The data that training goes on with keep no fake tensors of it."""
    task = replace(case.task, prepare=copy.deepcopy(case.task.prepare))
    return measure(case.model, task, samples, **more)


def workload_cases(configs: Path) -> Iterator[Case]:
    """Every workload there is in every feature mode, as its configuration has it; trained encoders where it may.

    Micro-batches of a thirty-second of its step, an eighth, a half, and the whole step.
    """
    for file in sorted((configs / "workload").glob("*.yaml")):
        config = compose([f"workload={file.stem}", "gpu=cpu", "logger=none"]).config
        parts, samples = make_objects(config), config.workload.samples_per_step
        sizes = tuple(max(1, samples // part) for part in (32, 8, 2, 1))
        modes: Iterable[FeatureModeName | None] = (None,) if parts.features is None else FEATURE_MODES
        for mode in modes:
            yield workload_case(config, parts, sizes, mode)


def workload_case(config: RunConfig, parts: RunObjects, sizes: tuple[int, ...], mode: FeatureModeName | None) -> Case:
    """Returns the case of a workload in a mode of features."""
    train = parts.for_features(mode).data.train
    loader = train_loader(train, batch_size=max(sizes), seed=0, settings=LoaderSettings(), collate=parts.data.collate)
    with closing(loader), closing(iter(loader)) as deliveries:
        sample = next(deliveries).batch
    features = None if parts.data.features is None else parts.features

    def make(model: nn.Module) -> torch.optim.Optimizer:
        plan = SimpleNamespace(device=SimpleNamespace(precision="32-true"))
        return make_optimizer(config, cast(RunPlan, plan), parameter_groups(model))

    name = config.workload.name + (f", {mode}" if mode else "")
    more = {"prepare": Preparation(train, config.seed), "features": features, "feature_mode": mode}
    return _case(name, parts.model, sample, sizes, make, **more)


def counted_peak(case: Case, micro_batch: int, samples: int) -> int:
    """Bytes of live tensors at the highest moment of a real run on the CPU, in kernels like CUDA's.

    A table in host memory is taken off: here it lies beside all else.
    """
    from benchmarks.memory_counter import Counter

    counter, peaks = Counter(), []
    features = _features(case, case.model) if case.task.feature_mode == "cache_host" else None
    on_host = features.bytes if features and features.store is None else 0
    with AsOnCuda():
        for moment in training(case, micro_batch, samples, CPU, counter.track_external):
            with counter:
                moment()
            peaks.append(counter.peak_bytes() - on_host)
    return max(peaks)


def cuda_peak(case: Case, micro_batch: int, samples: int) -> tuple[int, int]:
    """Bytes that tensors asked for, and bytes reserved, at the highest moment of a run on the GPU."""
    stats = torch.cuda.memory_stats
    gc.collect()  # else what goes during this run would be counted as there before it
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = stats()["requested_bytes.all.current"]
    for moment in training(case, micro_batch, samples, torch.device("cuda"), lambda *_: None):
        moment()
    return stats()["requested_bytes.all.peak"] - before, torch.cuda.max_memory_reserved()


def training(
    case: Case, micro_batch: int, samples: int, device: torch.device, count: Callable[..., None]
) -> Iterator[Callable[[], None]]:
    """Yields the parts of a run in the order of `wellfed.train.loop`: filling the feature table, some steps.

    Args:
        count: called with what was made outside the parts that are yielded.
    """
    task, precision = case.task, Precision(case.task.precision, device.type)
    model = precision.convert(copy.deepcopy(case.model).to(device))
    if task.checkpointed:
        checkpoint_blocks(model)
    count(model)
    features, mode = _features(case, model), task.feature_mode or "dynamic"
    source: list[FeatureSource | None] = [None]
    # Data that rows are cut from are made in host memory, and copied. On the CPU `hold` alone would copy nothing.
    on_host = features.store() if features and features.store and mode == "cache" else None

    def fill() -> None:
        model.eval()
        assert features is not None
        held = features if on_host is None else replace(features, store=lambda: on_host.to(device, copy=True))
        source[0] = hold(held, mode, device)

    if features is not None:
        yield fill
    model.train()
    optimizer = task.make_optimizer(model)
    for group in optimizer.param_groups:  # what None means on CUDA
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    loss = Loss(model)
    computation = Computation(
        model, loss, task.prepare, precision, device, ranks=_AsOnCuda(), features=lambda: source[0]
    )
    train_step = TrainStep(computation, optimizer, Fallbacks(MicroBatches(micro_batch)))
    batch = batches.map_tensors(task.make_batch(samples), lambda each: each.to(precision.dtype_of(each)))
    held: list[Batch] = []

    def step() -> None:
        held.clear()
        held.append(batches.map_tensors(batch, lambda each: each.to(device, copy=True)))
        train_step(Delivery(held[0], epoch=0, index=0, total=samples))

    for _ in range(STEPS):
        yield step


def _features(case: Case, model: nn.Module) -> Features | None:
    """Returns the features of the data, or of the model."""
    return case.task.features or (model.features() if hasattr(model, "features") else None)


class _AsOnCuda(Ranks):
    def backward(self, loss: Tensor) -> None:
        backward(loss)

"""Makes the objects that the configuration names: data, model, optimizer, loaders; and counts them for the plan."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from wellfed.batches import methods, why_uncut
from wellfed.config.build import build, built
from wellfed.config.rules import batch_split
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets, Features
from wellfed.data.backend_benchmark import copied, time_first_batches, without_side_effects
from wellfed.data.backends.first_batches import FirstBatches
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.loader_parts import LoaderParts, loader_of, without_loaders
from wellfed.data.settings import LoaderSettings
from wellfed.data.streams.stream import Stream, check_items, is_stream
from wellfed.data.streams.stream_loader import UNKNOWN_LENGTH, EvalStream, StreamLoader, StreamReading
from wellfed.data.train_loader import TrainLoader, train_loader
from wellfed.errors import ConfigError, DataError, first_line
from wellfed.plan.predict.footprint import KnownFootprints
from wellfed.plan.run_plan import DataFacts, LoaderSection, ModelFacts, OwnLoader, RunPlan, StreamFacts
from wellfed.ranks import largest_share
from wellfed.record import OnEvent, ignore_event
from wellfed.train.lightning.other_lightning import not_lightnings
from wellfed.train.lightning.scheduling import Scheduling
from wellfed.train.memory.checkpointing import blocks
from wellfed.train.memory.features import of_data
from wellfed.train.memory.fsdp_blocks import gathered_bytes
from wellfed.train.memory.optimizer_state import one_weight_at_a_time
from wellfed.train.memory.remembered import FOREACH
from wellfed.train.step.train_step import parameter_groups
from wellfed.units import counted

_LOG = logging.getLogger(__name__)
_USUAL_STATES = 2
"""Tensors of a parameter's size that Adam keeps for it."""


@dataclass(frozen=True)
class Parts:
    """What the configuration names, made."""

    data: Datasets
    model: nn.Module
    features: Features | None
    is_lightning_module: bool = False
    encoder: tuple[nn.Parameter, ...] = ()
    """Weights behind ``features`` that are trained from a later stage on, and frozen until then."""
    has_sparse_gradients: bool = False
    """As ``nn.Embedding(sparse=True)`` gives its weight."""
    feature_rows: Tensor | None = None
    """All rows of ``features``, where they have been computed on the CPU already, for training there."""
    first_batches: FirstBatches | None = None
    """What building them has shown, where that is known already."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """Those that the configuration names."""
    footprints: KnownFootprints | None = None
    """Those for the way in which it is trained, where some are known already."""
    data_module: Any = None
    """The LightningDataModule that the data come from, set up."""


def make_parts(config: RunConfig) -> Parts:
    """Read the data and build the model, on the CPU.

    Raises:
        ConfigError, DataError: the configuration or the input is at fault.
    """
    workload, data_module = config.workload, None
    if workload.data is None:
        model = build(workload.model, "workload.model")
        data = _of_module(model, workload.model.get("_target_"))
    else:
        data, data_module = _datasets(build(workload.data, "workload.data"), workload.data.get("_target_"))
        config, data = with_derived(config, data)
        workload = config.workload
        model = build(workload.model, "workload.model", **data.model_args)
    data = _described(without_loaders(data, config.seed))
    if callable(collating := getattr(model, "collating", None)):
        own = data.eval_collate
        if isinstance(own, Mapping):
            own = {split: None if each is None else collating(each) for split, each in own.items()}
        elif own is not None:
            own = collating(own)
        data = replace(data, collate=collating(data.collate), eval_collate=own)
    if loader := loader_of(data, "train"):
        data = replace(data, notes=(*data.notes, f"{loader.describe()}."))
    sparse = _has_sparse_gradients(model)
    if is_lightning_module(model):
        if workload.metrics is not None:
            problem = f"{workload.model.get('_target_')} is a LightningModule, which logs its own metrics."
            raise ConfigError.of("workload.metrics", problem, "Set workload.metrics=null, and log them in its steps.")
        if data_module is not None:
            from wellfed.train.lightning.data_module import use_hooks

            use_hooks(model, data_module)
        return Parts(data, model, None, is_lightning_module=True, has_sparse_gradients=sparse, data_module=data_module)
    make_metrics(config)  # their faults, before anything is planned
    _check_model(model, workload.model.get("_target_"))
    if workload.optimizer is None:
        problem = "null leaves nothing to train with; only a LightningModule brings its own."
        raise ConfigError.of("workload.optimizer", problem, "Set workload.optimizer._target_=torch.optim.AdamW.")
    if data_module is not None:
        _check_hooks(data_module)
    if sparse:
        _check_sparse(workload.optimizer, model)
    features = features_of(data, model)
    return Parts(data, model, features, has_sparse_gradients=sparse, data_module=data_module)


def _described(data: Datasets) -> Datasets:
    """With its streams told from data that have an index."""

    def described(split: str) -> Any:
        dataset, loader = getattr(data, split), loader_of(data, split)
        if not is_stream(dataset):
            return dataset
        if loader is None:
            return Stream.of(dataset)
        return Stream(dataset, gives_batches=loader.gives_batches or None, worker_init=loader.worker_init)

    return replace(data, train=described("train"), val=described("val"), test=described("test"))


def features_of(data: Datasets, model: nn.Module) -> Features | None:
    """Those of the model, or of the data."""
    offered = getattr(model, "features", None)
    features: Features | None = offered() if callable(offered) else None
    if data.features is None:
        return features
    if features is not None:
        problem = "offers features, and so does the data; a step has one source of them."
        raise ConfigError.of("workload.model", problem, "Leave out features() or Datasets.features.")
    return of_data(data.features)


def for_features(parts: Parts, mode: str | None) -> Parts:
    """With data whose batches carry what is lacking where features are held so; None: there are no features."""
    data = parts.data
    if data.features is None:
        return parts

    def told(split: Any) -> Any:
        tell = getattr(split, "for_features", None)
        return tell(mode) if callable(tell) else split

    return replace(parts, data=replace(data, train=told(data.train), val=told(data.val), test=told(data.test)))


def end(parts: Parts) -> None:
    """To be called when nothing is asked of the data any more."""
    if parts.data_module is not None:
        from wellfed.train.lightning.data_module import tear_down

        tear_down(parts.data_module)


def with_derived(config: RunConfig, data: Datasets) -> tuple[RunConfig, Datasets]:
    """Fills in values that follow from the data where the configuration has null.

    Returns:
        The configuration, and the data with those derived values that were filled in.

    Raises:
        ConfigError: the data derive a value for something else than a knob of the workload.
    """
    workload, used = config.workload, dict[str, tuple[Any, str]]()
    for knob, (value, because) in data.derived.items():
        *group, name = knob.split(".")
        if group not in (["workload", part] for part in ("data", "model", "optimizer")):
            problem = f"Datasets.derived names {knob}, and only entries of the workload can follow from its data."
            way_out = "Name workload.data.<name>, workload.model.<name> or workload.optimizer.<name>."
            raise ConfigError.of("workload.data", problem, way_out)
        part = group[1]
        node = getattr(workload, part)
        if node is not None and node.get(name) is None:
            filled: dict[str, Any] = {part: {**node, name: value}}
            workload = replace(workload, **filled)
            used[knob] = value, because
    return replace(config, workload=workload), replace(data, derived=used)


def with_loader(config: RunConfig, data: Datasets) -> RunConfig:
    """The configuration with what a DataLoader of the user's says of a step, where it says nothing itself.

    Raises:
        ConfigError: nobody says how many samples a step has, or two say different things.
    """
    workload, loader = config.workload, loader_of(data, "train")
    asked, own = workload.effective_batch_size, None if loader is None else loader.step_size()
    if asked is None and own is None:
        source = "there is no DataLoader" if loader is None else "the DataLoader does not say it"
        problem = f"is null, and {source}: how many samples has a step?"
        raise ConfigError.of("workload.effective_batch_size", problem, "Set workload.effective_batch_size=32.")
    if loader is not None and loader.has_own_batches and asked not in (None, own):
        problem = f"the batch sampler of the training data decides what a step is, up to {own} samples."
        way_out = "Set workload.effective_batch_size=null, or give the DataLoader batch_size and a sampler."
        raise ConfigError.of(f"workload.effective_batch_size={asked}", problem, way_out)
    drop_last = workload.drop_last or (loader is not None and loader.drop_last)
    size = own if asked is None else asked
    config = replace(config, workload=replace(workload, effective_batch_size=size, drop_last=drop_last))
    if faults := list(batch_split(config)):
        raise ConfigError(faults)
    return config


def _datasets(given: Any, target: str) -> tuple[Datasets, Any]:
    """What ``workload.data`` gives in any of its forms, and the LightningDataModule that it comes from, if one does."""

    def is_split(value: Any) -> bool:
        return value is None or isinstance(value, (Dataset, DataLoader))

    if isinstance(given, Datasets):
        return given, None
    if _is_of(given, "LightningDataModule"):
        from wellfed.train.lightning.data_module import datasets_of

        return datasets_of(given), given
    if isinstance(given, (Dataset, DataLoader)):
        return Datasets(given), None
    if isinstance(given, Mapping) and "train" in given and set(given) <= {"train", "val", "test"}:
        return Datasets(**given), None
    if isinstance(given, (tuple, list)) and 0 < len(given) < 4 and all(map(is_split, given)) and given[0] is not None:
        return Datasets(*given), None
    problem = (
        f"{target} returned {type(given).__name__}, and a workload's data is a wellfed.Datasets, a "
        "LightningDataModule, or torch datasets or DataLoaders for train, val and test."
    )
    raise ConfigError.of("workload.data", problem, "Return Datasets(train, val, test).")


def _of_module(model: Any, target: str) -> Datasets:
    """The loaders that a LightningModule brings itself."""
    if not is_lightning_module(model):
        problem = f"is null, and {target} is no LightningModule with a train_dataloader of its own."
        raise ConfigError.of("workload.data", problem, "Set workload.data._target_=<package>.<module>.<name>.")
    from wellfed.train.lightning.data_module import datasets_of

    return datasets_of(model)


def _check_hooks(data_module: Any) -> None:
    """Nothing is kept silently from a model that does not know them."""
    from wellfed.train.lightning.data_module import transfer_hooks

    if hooks := transfer_hooks(data_module):
        problem = (
            f"{type(data_module).__name__}.{hooks[0]} is for a LightningModule, and the model is a plain nn.Module."
        )
        way_out = "Do it in the data set's on_device(batch, rng), or in the model's loss."
        raise ConfigError.of("workload.data", problem, way_out)


def make_metrics(config: RunConfig) -> Any:
    """The metrics of torchmetrics that the configuration names; None where it names none."""
    node = config.workload.metrics
    if node is None:
        return None
    from torchmetrics import MetricCollection

    found = built(node, "workload.metrics")
    if isinstance(found, MetricCollection):
        return found
    try:
        return MetricCollection(found)
    except (ValueError, TypeError) as error:
        problem = f"can't be collected: {error}"
        way_out = "Name classes of torchmetrics: one, a list of them, or a mapping {accuracy: {_target_: ...}}."
        raise ConfigError.of("workload.metrics", problem, way_out) from error


def is_lightning_module(model: Any) -> bool:
    """Whether the user brings a finished LightningModule, which runs its own step; Lightning is not imported for it."""
    lightning = sys.modules.get("lightning.pytorch")  # who has made one has imported it
    return lightning is not None and isinstance(model, lightning.LightningModule)


def _is_of(value: Any, name: str) -> bool:
    """Whether it is an instance of a class of Lightning, under either of its names; imports neither."""
    bases = (getattr(sys.modules.get(library), name, None) for library in ("lightning.pytorch", "pytorch_lightning"))
    return any(base is not None and isinstance(value, base) for base in bases)


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(True for _ in _sparse_layers(model))


def _sparse_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers whose weights get sparse gradients, by name."""
    for name, module in model.named_modules():
        has_weights = any(weight.requires_grad for weight in module.parameters(False))
        if getattr(module, "sparse", False) is True and has_weights:
            yield name, module


def _check_sparse(optimizer: Mapping[str, Any], model: nn.Module) -> None:
    """Raises a ConfigError if the optimizer can't step with the gradients of the model's sparse layers.

    It takes one step on tiny parameters.
    """
    layers = dict(_sparse_layers(model))
    of_layers = {id(weight) for layer in layers.values() for weight in layer.parameters(False)}
    tiny = nn.Parameter(torch.zeros(2, 3))
    tiny.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 3), (2, 3), check_invariants=True)
    tried = [tiny]
    if any(weight.requires_grad and id(weight) not in of_layers for weight in model.parameters()):
        tried.append(nn.Parameter(torch.zeros(2, 3)))
        tried[1].grad = torch.ones(2, 3)
    made = build(optimizer, "workload.optimizer", tried)
    if type(made).__name__ == "LBFGS":  # it asks for gradients itself
        return
    try:
        made.step()
    except RuntimeError as error:
        where = f"workload.optimizer._target_={optimizer['_target_']}"
        names = " and ".join(name or type(layer).__name__ for name, layer in layers.items())
        problem = f"can't step with the sparse gradients of the model ({names}, sparse=True): {first_line(error)}."
        way_out = (
            "Leave out sparse=True, or set workload.optimizer._target_=torch.optim.SGD (without weight_decay). "
            "torch.optim.SparseAdam takes models whose gradients are all sparse."
        )
        raise ConfigError.of(where, problem, way_out) from error


def _check_model(model: Any, target: str) -> None:
    if found := not_lightnings(type(model), "LightningModule"):
        raise ConfigError.of("workload.model", *found)
    if not isinstance(model, nn.Module):
        problem, way_out = f"is a {type(model).__name__}, not an nn.Module.", "Name an nn.Module."
    elif not callable(getattr(model, "loss", None)):
        problem, way_out = "has no loss(batch).", "Add: def loss(self, batch) -> wellfed.LossOutput."
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        problem, way_out = "has no trainable parameter.", "Unfreeze some."
    else:
        return
    raise ConfigError.of("workload.model", f"{target} {problem}", way_out)


def data_facts(parts: Parts) -> DataFacts:
    """What the plan needs to know of the data."""
    data, features = parts.data, parts.features
    train, *others = map(_num_samples, (data.train, data.val, data.test))
    loaders = {split: loader for split in ("train", "val", "test") if (loader := loader_of(data, split))}
    return DataFacts(
        num_train=train,
        has_fetch=callable(getattr(data.train, "fetch", None)),
        stream=_stream_facts(data.train) if isinstance(data.train, Stream) else None,
        num_eval=max(others),
        eval_batch_size=max(of_split(data.eval_batch_size, split) or 0 for split in ("val", "test")) or None,
        feature_rows=features.num_rows if features else 0,
        feature_bytes=features.bytes if features else 0,
        features_trainable=features.trainable if features else False,
        derived=data.derived,
        own_loader=_numbers(loaders["train"]) if "train" in loaders else None,
        only_as_it_came=next((f"{split}: {one.problem}" for split, one in loaders.items() if one.problem), ""),
    )


def _numbers(parts: LoaderParts) -> OwnLoader:
    loader = parts.loader
    return OwnLoader(
        batch_size=parts.step_size(),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        timeout_s=loader.timeout,
    )


def _num_samples(split: Any) -> int:
    """Of a stream a number that there is always more of than of workers."""
    return UNKNOWN_LENGTH if isinstance(split, Stream) else len(split) if hasattr(split, "__len__") else 0


def _stream_facts(stream: Stream) -> StreamFacts:
    return StreamFacts(
        stream.name,
        has_length=stream.length is not None,
        gives_batches=stream.gives_batches,
        shared_by=stream.shared_by,
        shares_ranks_itself=stream.shares_ranks_itself,
        num_shards=stream.num_shards,
    )


def model_facts(parts: Parts, config: RunConfig) -> ModelFacts:
    """What the plan needs to know of the model."""
    model, optimizer = parts.model, config.workload.optimizer

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(each.numel() * each.element_size() for each in tensors)  # nbytes knows no sparse ones

    trainable_bytes = size(weight for weight in model.parameters() if weight.requires_grad)
    return ModelFacts(
        parameter_bytes=size(chain(model.parameters(), model.buffers())),
        trainable_bytes=trainable_bytes,
        optimizer_state_bytes=0 if optimizer is None else _states_per_parameter(optimizer) * trainable_bytes,
        gathered_bytes=gathered_bytes(model),
        has_batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()),
        is_lightning_module=parts.is_lightning_module,
        steps_by_hand=parts.is_lightning_module and not model.automatic_optimization,
        has_sparse_gradients=parts.has_sparse_gradients,
        has_blocks=next(blocks(model), None) is not None,
        average_bytes=_average_bytes(parts),
        listeners=listeners(parts),
    )


def _average_bytes(parts: Parts) -> int:
    if not parts.callbacks:
        return 0
    from wellfed.train.lightning.callbacks.users import is_average_beside_model

    copies = sum(map(is_average_beside_model, parts.callbacks.values()))
    return copies * sum(each.nbytes for each in chain(parts.model.parameters(), parts.model.buffers()))


def listeners(parts: Parts) -> tuple[str, ...]:
    """The callbacks that listen within a step, each with its hooks."""
    if not parts.callbacks:
        return ()
    from wellfed.train.lightning.in_step import IN_STEP, hooks_of

    heard = {name: hooks_of(callback, IN_STEP) for name, callback in parts.callbacks.items()}
    return tuple(f"{name} ({', '.join(hooks)})" for name, hooks in heard.items() if hooks)


def _states_per_parameter(optimizer: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it; found by one step on a tiny one."""
    probe = nn.Parameter(torch.zeros(2, 3))
    probe.grad = torch.zeros(2, 3)
    made = build(optimizer, "workload.optimizer", [probe])
    if type(made).__name__ == "LBFGS":
        return 2 * int(made.defaults["history_size"])
    try:
        takes_closure = "closure" in inspect.signature(made.step).parameters
        made.step(lambda: torch.zeros(())) if takes_closure else made.step()
        state = made.state[probe].values()
    except Exception as error:  # noqa: BLE001  an optimizer of the user's own, which training will meet
        _LOG.info(
            "workload.optimizer: a step on a tiny parameter failed (%r); %d states assumed.", error, _USUAL_STATES
        )
        return _USUAL_STATES
    return sum(value.shape == probe.shape for value in state if isinstance(value, torch.Tensor))


def make_schedule(config: RunConfig, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that ``workload.schedule._target_`` names; those within it step the same optimizer."""

    def made(node: Mapping[str, Any], where: str) -> Any:
        inner = node.get("schedulers")
        inside = {} if inner is None else {"schedulers": [made(each, f"{where}.schedulers") for each in inner]}
        return build(node, where, optimizer=optimizer, **inside)

    return made(config.workload.schedule.target or {}, "workload.schedule")


def try_schedule(config: RunConfig, parts: Parts) -> None:
    """Raise the ConfigError that making the scheduler of a plain model would."""
    scheduling = make_scheduling(config)
    if scheduling is not None and not parts.is_lightning_module:
        groups = [dict(group) for group in parameter_groups(parts.model)]
        scheduling.of(build(config.workload.optimizer, "workload.optimizer", groups))


def make_scheduling(config: RunConfig) -> Scheduling | None:
    """When the scheduler that ``workload.schedule._target_`` names steps; None where it names none."""
    schedule = config.workload.schedule
    if schedule.target is None:
        return None
    interval: Any = None if schedule.interval is None else schedule.interval.value
    return Scheduling(lambda optimizer: make_schedule(config, optimizer), interval, schedule.monitor)


def make_optimizer(
    config: RunConfig, plan: RunPlan, groups: list[dict[str, Any]], *, sparse: bool = False, is_heard: bool = False
) -> torch.optim.Optimizer:
    """The workload's optimizer; fused where torch offers it and nothing forbids it, else as an earlier run had to step.

    Args:
        sparse: a parameter has sparse gradients, which fused optimizers refuse in their first step.
        is_heard: a callback looks at the gradients before the step.
    """
    node = dict(config.workload.optimizer)

    def made(**more: Any) -> torch.optim.Optimizer:
        return build({**node, **more}, "workload.optimizer", [dict(group) for group in groups])  # type: ignore[no-any-return]

    plain = made()
    is_decided = "fused" not in plain.defaults or "fused" in node or node.get("foreach") or node.get("capturable")
    is_dense_real = not sparse and all(weight.is_floating_point() for group in groups for weight in group["params"])
    # Lightning refuses a fused optimizer where it must unscale gradients itself to clip them.
    unscales = plan.device.precision == "16-mixed" and (is_heard or config.trainer.gradient_clip is not None)
    if not (is_decided or unscales) and is_dense_real:
        with suppress(ConfigError, RuntimeError):  # not for this dtype or device
            return made(fused=True)
    if FOREACH in plan.remembered:
        one_weight_at_a_time(plain)
    return plain


def loader_settings(config: RunConfig, planned: LoaderSection) -> LoaderSettings:
    """How training data is loaded: what was planned, and what is not planned but set."""
    return replace(
        inline_settings(config),
        backend=planned.backend,
        num_workers=planned.num_workers,
        prefetch_factor=planned.prefetch_factor,
        persistent_workers=planned.persistent_workers,
        pin_memory=planned.pin_memory,
        timeout_s=planned.timeout_s,
        worker_threads=planned.worker_threads,
    )


def inline_settings(config: RunConfig) -> LoaderSettings:
    """The same batches, built in this process."""
    asked = config.loader
    return LoaderSettings(
        skip_ids=tuple(asked.skip_ids), max_skipped=asked.max_skipped, shuffle_buffer=asked.shuffle_buffer
    )


def one_off_settings(config: RunConfig, plan: RunPlan) -> LoaderSettings:
    """For a look at a few batches: one worker where the plan has processes or a timeout, else none."""
    if plan.loader.backend == "own":
        return inline_settings(config)
    asked = loader_settings(config, plan.loader)
    is_watched = asked.num_workers > 0 and (asked.backend != "threads" or asked.timeout_s > 0)
    return _one_worker(asked) if is_watched else inline_settings(config)


def _one_worker(settings: LoaderSettings) -> LoaderSettings:
    return replace(settings, num_workers=1, prefetch_factor=1, persistent_workers=False, pin_memory=False)


def make_train_loader(
    config: RunConfig,
    settings: LoaderSettings,
    data: Datasets,
    *,
    rank: int = 0,
    batch_size: int | None = None,
    on_event: OnEvent = ignore_event,
) -> TrainLoader | StreamLoader:
    """The steps of training for one rank.

    Args:
        batch_size: for one device, instead of that of a step.
        on_event: gets the samples that fail and are left out.
    """
    trainer, effective, loader = config.trainer, config.workload.samples_per_step, loader_of(data, "train")
    limit = trainer.limit_batches if trainer.overfit_batches is None else trainer.overfit_batches
    if limit is not None and batch_size is not None and not getattr(data.train, "gives_batches", False):
        limit *= math.ceil(effective / batch_size)  # the same samples are more of smaller batches
    if loader is not None and settings.backend == "own":
        own = Stream(loader.loader)
        return train_loader(
            own, LoaderSettings(), batch_size=effective, seed=config.seed, limit_batches=limit, on_event=on_event
        )
    is_read_in_order = isinstance(data.train, Stream)
    has_own_order = loader is not None and loader.sampled is None and not (loader.shuffle or is_read_in_order)
    return train_loader(
        data.train,
        settings,
        batch_size=None if loader and loader.has_own_batches and batch_size is None else batch_size or effective,
        seed=config.seed,
        rank=rank,
        world_size=1 if batch_size is not None else trainer.world_size,
        drop_last=config.workload.drop_last,
        collate=data.collate,
        limit_batches=limit,
        shuffle=trainer.overfit_batches is None and not has_own_order,
        sampled=loader.sampled if loader else None,
        worker_init=loader.worker_init if loader else None,
        on_event=on_event,
    )


def try_loader(
    config: RunConfig,
    to_time: Callable[[FirstBatches], list[LoaderSection]],
    plan: RunPlan,
    parts: Parts,
    *,
    rank: int = 0,
) -> FirstBatches | None:
    """What the first batches show, for the plan; None where nothing depends on it, or no batch can be built.

    Args:
        to_time: who else is to be timed, now that building one batch has been.
        plan: as it is without.
    """
    first = first_builder(config, plan)
    if first is None:
        return None
    found = time_first_batches(
        _loaders_of_a_trial(config, parts, rank),
        lambda built: [loader_settings(config, section) for section in to_time(built)],
        first,
        on_gpu=plan.on_gpu,
        known=parts.first_batches,
        data=parts.data.train,
    )
    # Host memory is checked once, by rank 0 for all of them: what a rank finds free changes while others start. Those
    # that it starts load as it has decided then (`other_ranks.RankZero`).
    return found if found is None or rank == 0 else replace(found, batch_bytes=0)


def first_builder(config: RunConfig, plan: RunPlan) -> LoaderSettings | None:
    """Who builds the first batches that are looked at before training; None where nothing depends on them."""
    names = plan.loader.candidates
    if (plan.loader.num_workers == 0 and len(names) < 2) or plan.loader.backend == "own":
        return None
    # Workers that were asked for build the first batch too: a sample may end the process that loads it, or hang.
    asked = loader_settings(config, plan.loader)
    return inline_settings(config) if "inline" in names and not asked.timeout_s else _one_worker(asked)


def look_at_first_batches(config: RunConfig, first: LoaderSettings, parts: Parts) -> FirstBatches | None:
    """How long building one takes, and its size; None if it can't be built."""
    make, train = _loaders_of_a_trial(config, parts), parts.data.train
    return time_first_batches(make, lambda _: (), first, on_gpu=False, data=train)


def check_split(config: RunConfig, plan: RunPlan, parts: Parts, first: FirstBatches | None) -> None:
    """Raises a DataError if a step of the plan is cut, or may come to be, and the first batch can't be.

    Builds that batch unless ``first`` has seen one, and draws from no generator of the dataset for it. Not for streams
    and loaders of the user's own, which may give each batch once: there the first step raises the error.
    """
    memory, train = plan.memory, parts.data.train
    is_own = plan.loader.backend == "own"
    is_cut = memory.accumulate > 1 or memory.micro_batch < largest_share(
        config.workload.samples_per_step, plan.trainer.world_size
    )
    may_be_cut = memory.on_oom == "retry" and memory.micro_batch > 1 and not parts.is_lightning_module
    if not (is_cut or may_be_cut) or "split" in methods(train):
        return
    uncut = first.uncut if first is not None else None
    # With a builder the batch was asked for already, and could not be built.
    if first is None and first_builder(config, plan) is None and not isinstance(train, Stream) and not is_own:
        loader = _loaders_of_a_trial(config, parts)(inline_settings(config))
        with without_side_effects(train), suppress(Exception), closing(loader):  # training asks again, and raises
            uncut = why_uncut(next(iter(loader)).batch)
    if uncut is not None:
        raise DataError(uncut)


def _loaders_of_a_trial(
    config: RunConfig, parts: Parts, rank: int = 0
) -> Callable[[LoaderSettings], TrainLoader | StreamLoader]:
    data = replace(parts.data, train=copied(parts.data.train))
    return lambda settings: make_train_loader(config, settings, data, rank=rank)


def make_eval_loader(
    config: RunConfig,
    plan: RunPlan,
    data: Datasets,
    split: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    few: int | None = None,
) -> EvalLoader | EvalStream:
    """A pass over ``val`` or ``test``, which the workload has, in micro-batches, or in those of its DataLoader.

    Args:
        rank: of ``world_size`` that share the batches; 0 of 1 where each has all.
        few: batches of a look, at most.

    Raises:
        DataError: the split gives no samples, or can't be sent to worker processes.
    """
    dataset, loader = getattr(data, split), loader_of(data, split)
    limit = min((each for each in (config.trainer.limit_batches, few) if each is not None), default=None)
    size = config.workload.eval_batch_size or of_split(data.eval_batch_size, split) or plan.least_micro_batch
    more: dict[str, Any] = {
        "seed": config.seed,
        "collate": of_split(data.eval_collate, split) or data.collate,
        "drop_last": loader.drop_last if loader else False,
    }
    if loader is not None and plan.loader.backend == "own":
        dataset, settings = Stream(loader.loader), LoaderSettings()
    else:
        settings = _eval_settings(config, plan, dataset)
    if is_stream(dataset):
        reading = StreamReading(Stream.of(dataset), settings, batch_size=size, purpose="evaluation", **more)
        return EvalStream(reading, limit_batches=limit)
    check_items(dataset, by_item=False)
    made = EvalLoader(
        dataset,
        size,
        settings=settings,
        rank=rank,
        world_size=world_size,
        limit_batches=limit,
        sampled=loader.sampled if loader else None,
        worker_init=loader.worker_init if loader else None,
        **more,
    )
    if len(made) == 0:
        name, way_out = type(dataset).__name__, f"Check workload.data, or leave {split} out of Datasets."
        raise DataError(f"{name} makes no {split} batch of its {counted(len(dataset), 'sample')}. {way_out}")
    return made


def of_split(given: Any, split: str) -> Any:
    """What `Datasets` gives for all of evaluation, or by the names of the splits."""
    return given.get(split) if isinstance(given, Mapping) else given


def _eval_settings(config: RunConfig, plan: RunPlan, dataset: Any) -> LoaderSettings:
    """As training is built, with as many workers as there is room for."""
    asked = replace(loader_settings(config, plan.loader), num_workers=plan.loader.eval_workers)
    if asked.num_workers == 0:
        return LoaderSettings(pin_memory=asked.pin_memory)
    if asked.backend == "threads" and not callable(getattr(dataset, "fetch", None)):
        return replace(asked, backend="processes")  # samples of their own may draw from the process's generators
    return asked


def eval_device_prefetch(plan: RunPlan, dataset: Any) -> int:
    """Batches of an evaluation that are copied ahead; the thread that copies builds them too where nobody else does,
    and the process's generators are not for it."""
    is_built_elsewhere = plan.loader.eval_workers > 0 or callable(getattr(dataset, "fetch", None))
    return plan.loader.device_prefetch if is_built_elsewhere else 0

"""Builds the data of a run from ``workload.data``, in any of the forms that users return there."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from wellfed import generators
from wellfed.config.build import build
from wellfed.config.rules import batch_split
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.data.own_loader import (
    UNKNOWN_LENGTH,
    BareStream,
    LoadedDatasets,
    has_own_batches,
    is_stream,
    loader_of,
    step_size,
)
from wellfed.data.rank_batches import is_read_by_each, shared_out
from wellfed.data.remade_loader import LOADER_KNOBS, remade, typed_changes, why_fixed
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import DataFacts, OwnLoader

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects

_SPLITS = ("train", "val", "test")


def read_data(config: RunConfig) -> tuple[Datasets, Any]:
    """Returns the data of ``workload.data``, or nothing but the LightningDataModule that has them."""
    target = config.workload.data.get("_target_")
    given = build(config.workload.data, "workload.data")

    def is_split(value: Any) -> bool:
        return value is None or isinstance(value, (Dataset, DataLoader))

    if isinstance(given, Datasets):
        return given, None
    if is_of_lightning(given, "LightningDataModule", "pytorch_lightning"):
        return Datasets(None), given
    if isinstance(given, (Dataset, DataLoader)):
        return Datasets(given), None
    if isinstance(given, Mapping) and "train" in given and set(given) <= set(_SPLITS):
        return Datasets(**given), None
    if isinstance(given, (tuple, list)) and 0 < len(given) < 4 and all(map(is_split, given)) and given[0] is not None:
        return Datasets(*given), None
    problem = (
        f"{target} returned {type(given).__name__}, and a workload's data is a wellfed.Datasets, a "
        "LightningDataModule, or torch datasets or DataLoaders for train, val and test."
    )
    raise ConfigError.of("workload.data", problem, "Return Datasets(train, val, test).")


def is_of_lightning(value: Any, name: str, *libraries: str) -> bool:
    """Returns whether a value is of that class of Lightning, which is imported already if there is an instance.

    Args:
        libraries: other names of Lightning that count, too.
    """
    bases = (getattr(sys.modules.get(library), name, None) for library in ("lightning.pytorch", *libraries))
    return any(base is not None and isinstance(value, base) for base in bases)


def prepared_data(data: Datasets, model: Any, batch_size: int | None) -> Datasets:
    """Returns the data with the loaders that came set apart, streams in loaders, and the model's own collate function.

    Args:
        batch_size: samples of a step, for a stream that came without a DataLoader.
    """
    data = _with_loaders(data, batch_size)
    data = replace(data, notes=(*data.notes, *_notes_on_hidden(data, model)))
    if callable(collating := getattr(model, "collating", None)):
        own = data.eval_collate
        if isinstance(own, Mapping):
            own = {split: None if each is None else collating(each) for split, each in own.items()}
        elif own is not None:
            own = collating(own)
        data = replace(data, collate=collating(data.collate), eval_collate=own)
    return data


def _with_loaders(data: Datasets, batch_size: int | None) -> Datasets:
    """Returns the same data with the dataset in place of each loader, beside the loaders.

    Raises:
        ConfigError: there is nothing to train on, or there are several loaders for one split.
    """
    splits = {split: _alone(getattr(data, split), split) for split in _SPLITS}
    if splits["train"] is None:
        raise ConfigError.of("workload.data", "gives nothing to train on.", "Return a data set or a DataLoader.")
    found: dict[str, Any] = {}
    for split, one in splits.items():
        if isinstance(one, IterableDataset):
            collate = data.collate if split == "train" else of_split(data.eval_collate, split) or data.collate
            found[split] = BareStream(one, batch_size=batch_size or 1, collate_fn=collate)
        elif isinstance(one, DataLoader) or is_stream(one):
            found[split] = one
    splits |= {split: getattr(one, "dataset", one) for split, one in found.items()}
    if data.features is not None and any(callable(getattr(splits[one], "for_features", None)) for one in found):
        problem = "gives features, and a DataLoader whose dataset has for_features: its batches stay as they came."
        raise ConfigError.of("workload.data", problem, "Hand over the dataset instead: Datasets(dataset, ...).")
    if not found:
        return replace(data, **splits)
    values = {name: getattr(data, name) for name in Datasets.__dataclass_fields__}
    values["collate"] = data.collate or getattr(found.get("train"), "collate_fn", None)
    return LoadedDatasets(**{**values, **splits}, loaders=found)


def _alone(given: Any, split: str) -> Any:
    """Returns the only loader in a list or mapping, None if it is empty; other values unchanged."""
    several = list(given.values()) if isinstance(given, Mapping) else given
    if not isinstance(several, (list, tuple)) or not all(isinstance(one, DataLoader) for one in several):
        return given
    if len(several) > 1:
        problem = f"gives {len(several)} loaders for {split}, and a split is one."
        way_out = "Return one, e.g. a DataLoader over torch.utils.data.ConcatDataset([...])."
        raise ConfigError.of("workload.data", problem, way_out)
    return several[0] if several else None


def _notes_on_hidden(data: Datasets, model: Any) -> Iterator[str]:
    """Yields a note for each ``fetch`` or ``split`` that torch's Subset or ConcatDataset hides.

    Raises:
        ConfigError: they hide a method that decides what a plain model learns.
    """
    for split in _SPLITS:
        dataset = getattr(data, split)
        for inner, name in product(_inside(dataset), ("fetch", "split", "weight", "on_device", "for_features")):
            is_hidden = callable(getattr(inner, name, None)) and not callable(getattr(dataset, name, None))
            if not is_hidden or (name == "for_features" and data.features is None):
                continue
            owner = type(inner).__name__
            problem = f"{split}: {type(dataset).__name__} hides {name} of {owner}, which is not called."
            way_out = f"Select the samples inside {owner}."
            if name in ("fetch", "split"):  # a split may be a method of another meaning
                yield f"{problem} {way_out}"
            elif not is_of_lightning(model, "LightningModule"):  # which gets batches as they are
                raise ConfigError.of("workload.data", problem, way_out)


def _inside(dataset: Any) -> list[Any]:
    """Returns the datasets that Subset and ConcatDataset are made of, at any depth."""
    if isinstance(dataset, Subset):
        return _inside(dataset.dataset)
    return (
        [one for each in dataset.datasets for one in _inside(each)] if isinstance(dataset, ConcatDataset) else [dataset]
    )


def with_derived(config: RunConfig, data: Datasets) -> tuple[RunConfig, Datasets]:
    """Fills in values derived from the data where the configuration has null.

    Returns:
        The configuration, and the data with the derived values that were used.

    Raises:
        ConfigError: the data derive a value for something other than a knob of the workload.
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
    """Fills in the step's size and ``drop_last`` from the user's DataLoader where the configuration has none.

    Raises:
        ConfigError: the number of samples per step is unknown, or the two contradict each other.
    """
    workload, loader = config.workload, loader_of(data, "train")
    asked, own = workload.effective_batch_size, step_size(loader)
    size = planned_size(loader) if asked is None else asked
    if size is None:
        is_bare = loader is None or isinstance(loader, BareStream)
        source = "there is no DataLoader" if is_bare else "the DataLoader does not say it"
        problem = f"is null, and {source}: how many samples has a step?"
        raise ConfigError.of("workload.effective_batch_size", problem, "Set workload.effective_batch_size=32.")
    if has_own_batches(loader) and asked is not None and own not in (None, asked):
        problem = f"the {type(loader.batch_sampler).__name__} of the DataLoader decides what a step is: {own} samples."
        way_out = "Set workload.effective_batch_size=null, or give the DataLoader batch_size and a sampler."
        raise ConfigError.of(f"workload.effective_batch_size={asked}", problem, way_out)
    drop_last = workload.drop_last or bool(getattr(loader, "drop_last", False))
    config = replace(config, workload=replace(workload, effective_batch_size=size, drop_last=drop_last))
    if faults := list(batch_split(config)):
        raise ConfigError(faults)
    return config


def planned_size(loader: Any) -> int | None:
    """Returns the samples of a loader's batch; those of its first list if a batch sampler does not show them."""
    if step_size(loader) is None and has_own_batches(loader):
        with suppress(Exception), generators.kept(loader.batch_sampler):  # of the user's code
            return len(next(iter(copy.copy(loader.batch_sampler))))
    return step_size(loader)


def of_split(given: Any, split: str) -> Any:
    """Returns a value of `Datasets` that is given for all evaluation, or by the name of the split."""
    return given.get(split) if isinstance(given, Mapping) else given


def data_facts(objects: RunObjects, config: RunConfig) -> DataFacts:
    """Returns the facts of the data that the plan uses.

    Raises:
        ConfigError: a loader of the user can't be as it is configured.
    """
    data, features = objects.data, objects.features
    for split in ("val", "test"):
        if (loader := loader_of(data, split)) is not None:
            remade(loader, typed_changes(config, split), split)
    own, changes = loader_of(data, "train"), typed_changes(config)
    if own is not None:
        shared_out(remade(own, changes), 0, config.trainer.world_size)  # raises what can't be shared
    return DataFacts(
        num_train=_num_samples(data.train),
        has_fetch=callable(getattr(data.train, "fetch", None)),
        feature_rows=features.num_rows if features else 0,
        feature_bytes=features.bytes if features else 0,
        features_trainable=features.trainable if features else False,
        derived=data.derived,
        own_loader=None if own is None else facts_of(own, changes),
    )


def facts_of(loader: Any, changes: Mapping[str, Any]) -> OwnLoader:
    """Returns the facts of the user's loader of training, as the run will read it with some changes."""
    made, dataset = remade(loader, changes), getattr(loader, "dataset", loader)
    is_torchs, is_read_in_order = isinstance(loader, DataLoader), is_read_by_each(loader)
    kind = "DataLoader" if isinstance(loader, BareStream) else type(loader).__name__
    held = generators.held_by([dataset, getattr(loader, "collate_fn", None)])
    return OwnLoader(
        name=f"{kind} over {type(dataset).__name__}" if is_torchs else kind,
        batch_size=step_size(loader),
        num_samples=_num_drawn(loader),
        has_own_batches=has_own_batches(loader),
        has_length=_has_length(made),
        is_fixed=bool(why_fixed(loader)),
        values={knob: getattr(made, name, default) for name, (knob, default) in LOADER_KNOBS.items()},
        typed=frozenset(LOADER_KNOBS[name][0] for name in changes.keys() & LOADER_KNOBS.keys()),
        shares_workers=not is_read_in_order or _names(dataset, "worker_info"),
        shares_ranks=not is_read_in_order or _names(dataset, "rank", "world_size", "num_replicas", "split_by_node"),
        has_worker_init=getattr(loader, "worker_init_fn", None) is not None,
        generators=tuple(sorted({f"{type(one).__module__.partition('.')[0]}.{type(one).__name__}" for one in held})),
    )


def _num_drawn(loader: Any) -> int | None:
    """Returns the samples of an epoch; None if batches are not made of samples that a sampler gives."""
    sampler: Any = getattr(loader, "sampler", None)
    if is_read_by_each(loader) or loader.batch_size is None or not hasattr(sampler, "__len__"):
        return None
    return len(sampler)


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) > 0
    except (TypeError, NotImplementedError):
        return False


def _names(dataset: Any, *texts: str) -> bool:
    """Returns whether the modules of a dataset's classes contain one of these texts. True if they can't be read."""
    modules = [cls.__module__ for cls in type(dataset).__mro__ if cls.__module__ not in ("builtins", "typing")]
    own = [sys.modules.get(name) for name in modules if not name.startswith("torch.")]
    try:
        sources = [inspect.getsource(module) for module in own if module is not None]
    except (OSError, TypeError):
        return True
    return not sources or any(text in source for source in sources for text in texts)


def _num_samples(split: Any) -> int:
    """Returns the length; a number larger than any count of workers if it is read in order."""
    return UNKNOWN_LENGTH if is_stream(split) else len(split) if hasattr(split, "__len__") else 0

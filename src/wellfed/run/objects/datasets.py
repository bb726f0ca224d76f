"""Builds the data of a run from ``workload.data``, in any of the forms that users return there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from wellfed import batches
from wellfed.config.build import build
from wellfed.config.rules import batch_split
from wellfed.config.schema import RunConfig
from wellfed.contract import Datasets
from wellfed.data.loader_parts import loader_of, without_loaders
from wellfed.data.streams.stream import Stream, is_stream
from wellfed.data.streams.stream_loader import UNKNOWN_LENGTH
from wellfed.errors import ConfigError
from wellfed.plan.run_plan import DataFacts, OwnLoader, StreamFacts

if TYPE_CHECKING:
    from wellfed.run.objects.run_objects import RunObjects

_SPLITS = ("train", "val", "test")


def read_data(config: RunConfig) -> tuple[Datasets, Any]:
    """Returns the data of ``workload.data``, and the LightningDataModule that they come from, if any."""
    target = config.workload.data.get("_target_")
    given = build(config.workload.data, "workload.data")

    def is_split(value: Any) -> bool:
        return value is None or isinstance(value, (Dataset, DataLoader))

    if isinstance(given, Datasets):
        return given, None
    if _is_of(given, "LightningDataModule"):
        return _from_lightning(given), given
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


def data_of_module(model: Any, target: str) -> Datasets:
    """Returns the data of a LightningModule that has its own loaders."""
    if not is_lightning_module(model):
        problem = f"is null, and {target} is no LightningModule with a train_dataloader of its own."
        raise ConfigError.of("workload.data", problem, "Set workload.data._target_=<package>.<module>.<name>.")
    return _from_lightning(model)


def _from_lightning(owner: Any) -> Datasets:
    from wellfed.train.lightning.user_module.data_module import datasets_of

    return datasets_of(owner)


def is_lightning_module(model: Any) -> bool:
    """Returns whether the model is a LightningModule. Does not import Lightning."""
    lightning = sys.modules.get("lightning.pytorch")  # imported already if there is an instance
    return lightning is not None and isinstance(model, lightning.LightningModule)


def _is_of(value: Any, name: str) -> bool:
    """Returns whether a value is of that class of Lightning, under either name of the library. Imports neither."""
    bases = (getattr(sys.modules.get(library), name, None) for library in ("lightning.pytorch", "pytorch_lightning"))
    return any(base is not None and isinstance(value, base) for base in bases)


def prepared_data(data: Datasets, model: Any, seed: int) -> Datasets:
    """Returns the data with DataLoaders taken apart, streams wrapped, and the model's own collate function."""
    data = without_loaders(data, seed)
    data = replace(data, **{split: _as_stream(data, split) for split in _SPLITS})
    data = replace(data, notes=(*data.notes, *_notes_on_hidden(data, model)))
    if callable(collating := getattr(model, "collating", None)):
        own = data.eval_collate
        if isinstance(own, Mapping):
            own = {split: None if each is None else collating(each) for split, each in own.items()}
        elif own is not None:
            own = collating(own)
        data = replace(data, collate=collating(data.collate), eval_collate=own)
    if loader := loader_of(data, "train"):
        data = replace(data, notes=(*data.notes, f"{loader.describe()}."))
    return data


def _notes_on_hidden(data: Datasets, model: Any) -> Iterator[str]:
    """Yields a note for each ``fetch`` or ``split`` that torch's Subset or ConcatDataset hides.

    Raises:
        ConfigError: they hide a method that decides what a plain model learns.
    """
    for split in _SPLITS:
        dataset = getattr(data, split)
        for name, owner in _hidden_methods(dataset).items():
            if name == "for_features" and data.features is None:
                continue
            problem = f"{split}: {type(dataset).__name__} hides {name} of {owner}, which is not called."
            way_out = f"Select the samples inside {owner}."
            if name in ("fetch", "split"):  # a split may be a method of another meaning
                yield f"{problem} {way_out}"
            elif not is_lightning_module(model):  # which gets batches as they are
                raise ConfigError.of("workload.data", problem, way_out)


def _hidden_methods(dataset: Any) -> dict[str, str]:
    """Returns the methods for batches that Subset and ConcatDataset hide, at any depth, with the classes that have
    them."""
    found: dict[str, str] = {}
    inside = dataset.datasets if isinstance(dataset, ConcatDataset) else []
    for inner in [dataset.dataset] if isinstance(dataset, Subset) else inside:
        more = [name for name in ("for_features", "fetch") if callable(getattr(inner, name, None))]
        found |= _hidden_methods(inner) | dict.fromkeys([*batches.methods(inner), *more], type(inner).__name__)
    return {name: owner for name, owner in found.items() if not callable(getattr(dataset, name, None))}


def _as_stream(data: Datasets, split: str) -> Any:
    dataset, loader = getattr(data, split), loader_of(data, split)
    if not is_stream(dataset):
        return dataset
    if loader is None:
        return Stream.of(dataset)
    return Stream(dataset, gives_batches=loader.gives_batches or None, worker_init=loader.worker_init)


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


def of_split(given: Any, split: str) -> Any:
    """Returns a value of `Datasets` that is given for all evaluation, or by the name of the split."""
    return given.get(split) if isinstance(given, Mapping) else given


def data_facts(objects: RunObjects) -> DataFacts:
    """Returns the facts of the data that the plan uses."""
    data, features = objects.data, objects.features
    loaders = {split: loader for split in _SPLITS if (loader := loader_of(data, split))}
    own, stream = loaders.get("train"), data.train if isinstance(data.train, Stream) else None
    return DataFacts(
        num_train=_num_samples(data.train),
        has_fetch=callable(getattr(data.train, "fetch", None)),
        stream=None
        if stream is None
        else StreamFacts(stream.name, stream.length is not None, stream.shared_by, stream.num_shards),
        feature_rows=features.num_rows if features else 0,
        feature_bytes=features.bytes if features else 0,
        features_trainable=features.trainable if features else False,
        derived=data.derived,
        own_loader=None
        if own is None
        else OwnLoader(
            own.step_size(),
            own.loader.num_workers,
            own.loader.prefetch_factor,
            own.loader.persistent_workers,
            own.loader.pin_memory,
            own.loader.timeout,
        ),
        only_as_it_came=next((f"{split}: {one.problem}" for split, one in loaders.items() if one.problem), ""),
        has_own_batches=own is not None and own.has_own_batches,
    )


def _num_samples(split: Any) -> int:
    """Returns the length; for a stream a number larger than any count of workers."""
    return UNKNOWN_LENGTH if isinstance(split, Stream) else len(split) if hasattr(split, "__len__") else 0

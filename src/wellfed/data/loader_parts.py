"""Takes a user's DataLoader apart, so that the engine's backends can build its batches.

Kept are its dataset, batch size, ``drop_last``, ``collate_fn``, ``worker_init_fn`` and the samples that its sampler
selects. The plan decides workers, prefetching, pinned memory and timeout. Torch's SequentialSampler, RandomSampler and
DistributedSampler are replaced by the engine's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from wellfed.contract import Batch, Datasets
from wellfed.data.sampled_epochs import SampledEpochs
from wellfed.errors import ConfigError


@dataclass(frozen=True)
class LoaderParts:
    """A DataLoader and everything that determines its batches."""

    loader: Any
    dataset: Any
    batch_size: int | None
    """None = unknown before its batches are built."""
    drop_last: bool = False
    collate: Callable[[list[Any]], Batch] | None = None
    worker_init: Callable[[int], None] | None = None
    shuffle: bool = False
    sampled: SampledEpochs | None = None
    """Samples of each epoch; None = all samples."""
    gives_batches: bool = False
    """Whether the dataset yields batches."""
    problem: str = ""
    """Reason why the DataLoader must be used unchanged; empty if a backend can build its batches."""

    @property
    def has_own_batches(self) -> bool:
        """Whether a batch sampler selects the samples of a step."""
        return self.sampled is not None and self.sampled.in_batches

    @property
    def generators(self) -> list[Generator]:
        """Generators of the DataLoader, which draw an order at each pass."""
        places = [self.loader, *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler"))]
        found = [getattr(place, "generator", None) for place in places]
        return [one for one in found if isinstance(one, Generator)]

    def step_size(self) -> int | None:
        """Returns the samples of a step, or of the largest batch if batches differ."""
        if self.batch_size is None and self.sampled is not None:
            return max(len(batch) for batch in self.sampled.batches(0))
        return self.batch_size

    def describe(self) -> str:
        """Returns a line about the training data for the screen."""
        what = f"a DataLoader over {type(self.dataset).__name__} gives the training samples"
        if self.problem:
            return f"{what}, read as it came: {self.problem}"
        if isinstance(self.dataset, IterableDataset):
            order = "read in its own order"
        elif self.sampled is not None:
            order = f"its {self.sampled.name} kept"
        else:
            order = "shuffled anew in each epoch" if self.shuffle else "in its own order"
        return f"{what}, {order}"


@dataclass(frozen=True)
class LoadedDatasets(Datasets):
    """Datasets that came in DataLoaders, and the parts of the DataLoaders."""

    loaders: Mapping[str, LoaderParts] = field(default_factory=dict)
    """DataLoaders by split."""


def loader_of(data: Datasets, split: str) -> LoaderParts | None:
    """Returns the DataLoader that a split came in, or None."""
    return data.loaders.get(split) if isinstance(data, LoadedDatasets) else None


def sampled_orders(data: Datasets) -> dict[str, tuple[str, int]]:
    """Returns, by split, the class of its DataLoader's sampler and a checksum of the first epoch's indices."""
    loaders = data.loaders if isinstance(data, LoadedDatasets) else {}
    sampled = {split: one.sampled for split, one in loaders.items() if one.sampled is not None}
    return {split: (one.name, one.checksum(0)) for split, one in sampled.items()}


def without_loaders(data: Datasets, seed: int) -> Datasets:
    """Returns the same data with the dataset in place of each DataLoader.

    Raises:
        ConfigError: there are several loaders for one split, or a sampler distributes samples to ranks itself.
    """
    splits = {split: _alone(getattr(data, split), split) for split in ("train", "val", "test")}
    if splits["train"] is None:
        raise ConfigError.of("workload.data", "gives nothing to train on.", "Return a data set or a DataLoader.")
    found = {split: take_apart(one, split, seed) for split, one in splits.items() if isinstance(one, DataLoader)}
    if not found:
        return replace(data, **splits)
    values = {name: getattr(data, name) for name in Datasets.__dataclass_fields__}
    values |= splits | {split: one.dataset for split, one in found.items()}
    if "train" in found:
        values["collate"] = found["train"].collate
    for name in ("collate", "batch_size"):
        given = values[f"eval_{name}"]
        by_split = dict(given) if isinstance(given, Mapping) else dict.fromkeys(("val", "test"), given)
        own = {split: getattr(one, name) for split, one in found.items() if split != "train"}
        values[f"eval_{name}"] = {**by_split, **own}
    return LoadedDatasets(**values, loaders=found)


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


def take_apart(loader: DataLoader[Any], split: str, seed: int) -> LoaderParts:
    """Returns everything that determines a DataLoader's batches.

    Raises:
        ConfigError: its sampler distributes samples to ranks by its own rule.
    """
    cls, dataset = type(loader), loader.dataset
    if cls.__iter__ is not DataLoader.__iter__:
        return LoaderParts(loader, loader, loader.batch_size, problem=f"{cls.__name__} has an __iter__ of its own")
    common: dict[str, Any] = {
        "drop_last": loader.drop_last,
        "collate": loader.collate_fn,
        "worker_init": loader.worker_init_fn,
    }
    if isinstance(dataset, IterableDataset):
        gives_batches = loader.batch_size is None
        return LoaderParts(loader, dataset, loader.batch_size, gives_batches=gives_batches, **common)
    if loader.batch_sampler is None:
        problem = "batch_size=None leaves the batches to the data set, whose items then can't be counted"
        return LoaderParts(loader, loader, None, problem=problem)
    sampler: Any = loader.sampler
    batch_size, drop_last = loader.batch_size, loader.drop_last
    if not hasattr(dataset, "__len__"):
        return LoaderParts(loader, loader, batch_size, problem=f"{type(dataset).__name__} has no __len__")
    length = len(dataset)
    if batch_size is None:  # a batch sampler was given
        given: Any = loader.batch_sampler
        if type(given) is not BatchSampler:
            _refuse_shares(given, split)
            sampled = SampledEpochs(given, seed, length, in_batches=True)
            return LoaderParts(loader, dataset, None, sampled=sampled, **common)
        sampler, batch_size, drop_last = given.sampler, given.batch_size, given.drop_last
    common["drop_last"] = drop_last
    if type(sampler) is DistributedSampler:  # the engine's order distributes each step to the ranks
        return LoaderParts(loader, dataset, batch_size, shuffle=sampler.shuffle, **common)
    _refuse_shares(sampler, split)
    if type(sampler) is SequentialSampler and _has(sampler, length):
        return LoaderParts(loader, dataset, batch_size, **common)
    if type(sampler) is RandomSampler and not sampler.replacement and _has(sampler, length):
        return LoaderParts(loader, dataset, batch_size, shuffle=True, **common)
    return LoaderParts(loader, dataset, batch_size, sampled=SampledEpochs(sampler, seed, length), **common)


def _has(sampler: Any, length: int) -> bool:
    """Returns whether a sampler yields each sample of a dataset of ``length`` once."""
    return len(sampler.data_source) == length and len(sampler) == length


def _refuse_shares(sampler: Any, split: str) -> None:
    ranks = getattr(sampler, "num_replicas", 1)
    if ranks not in (None, 1):
        raise ConfigError.of(
            "workload.data",
            f"the {split} DataLoader's {type(sampler).__name__} gives one of {ranks} ranks its share, and each step is "
            "shared out to the ranks here, whatever their number is.",
            "Leave num_replicas at 1, or use torch's DistributedSampler, which is replaced.",
        )

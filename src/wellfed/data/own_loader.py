"""Reads a user's loader as it came: its batches in its order, each with a position to resume from.

Everything random is the loader's own. It draws from the process's generators, which are seeded once at the start of a
run, as in a script that begins with ``torch.manual_seed(seed)``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.contract import Datasets
from wellfed.data.rank_batches import RankBatches, agreed
from wellfed.data.reading_state import BeforeReading, restore_states, states_of
from wellfed.errors import DataError

UNKNOWN_LENGTH = 2**53
"""Length reported for a user's loader, which no epoch reaches: its deliveries tell which one is the last."""


@dataclass(frozen=True)
class LoadedDatasets(Datasets):
    """Data of which some splits came in loaders. Such a split is the dataset of its loader, if that has one."""

    loaders: Mapping[str, Any] = field(default_factory=dict)
    """Loaders by split, as they came."""


class BareStream(DataLoader[Any]):
    """DataLoader for an IterableDataset that came without one. Its batch size is the workload's."""


def loader_of(data: Datasets, split: str) -> Any:
    """Returns the loader that a split came in, or None."""
    return data.loaders.get(split) if isinstance(data, LoadedDatasets) else None


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is read in order: it has ``__iter__``, and no samples by index."""
    if isinstance(dataset, IterableDataset):
        return True
    if callable(getattr(dataset, "__getitems__", None)):
        return False
    return getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__) and hasattr(dataset, "__iter__")


def has_own_batches(loader: Any) -> bool:
    """Returns whether a batch sampler of the user's own decides which samples a step has."""
    return isinstance(loader, DataLoader) and loader.batch_size is None and loader.batch_sampler is not None


def step_size(loader: Any) -> int | None:
    """Returns the samples of a loader's batch, or of the largest list that its batch sampler is; None if unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader, BareStream):
        return None
    sampler: Any = loader.batch_sampler
    if loader.batch_size is not None or sampler is None:
        return loader.batch_size
    if isinstance(own := getattr(sampler, "batch_size", None), int):
        return own
    return max(map(len, sampler), default=None) if isinstance(sampler, (list, tuple)) else None


def first_batch(loader: Any, size: int) -> Any:
    """Returns a batch of the first samples, built in a worker process, so that the user's own objects stay unread.

    Args:
        size: samples of the batch; ignored for batches that the dataset makes itself.

    Raises:
        DataError: it is no DataLoader of torch, or gives nothing.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(f"{type(loader).__name__} is read in training alone.")
    values: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": False, "pin_memory": False}
    if isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        values["batch_sampler"] = BatchSampler(loader.sampler, size, drop_last=False)
    elif loader.batch_sampler is not None:
        data: Any = loader.dataset
        values["batch_sampler"] = [list(range(min(size, len(data))))]
    other = copy.copy(loader)
    vars(other).update(values, generator=torch.Generator(), _iterator=None)
    for batch in other:
        return batch
    raise DataError(f"{type(loader.dataset).__name__} gave no batch.")


class OwnLoader:
    """Yields the batches of a user's loader, epoch after epoch; each ``iter()`` continues after the last batch.

    A checkpoint holds the states of all generators at the start of the epoch. A resume goes on by the ``state_dict`` of
    the loader, or of a dataset that this process reads. Without one it reads the epoch again, up to its place. At the
    end of an epoch it holds those at the start of the next.

    If each rank reads a loader of its own, the epoch ends for all with the last batch of one of them.
    """

    _has_place = True
    """Whether a checkpoint may hold a place within an epoch."""

    def __init__(
        self, loader: Any, *, batch_size: int | None = None, limit_batches: int | None = None, world_size: int = 1
    ) -> None:
        """
        Args:
            loader: yields batches, again at each ``iter()``.
            batch_size: samples of a batch whose tensors don't show them.
            world_size: number of ranks that train together.
        """
        self._loader, self._batch_size, self._limit, self._world_size = loader, batch_size, limit_batches, world_size
        self._dataset: Any = getattr(loader, "dataset", loader)
        self._methods = batches.methods(self._dataset)
        self._is_here = getattr(loader, "num_workers", 0) == 0
        """Whether this process reads the dataset, and not a copy in a worker."""
        self._epoch = self._next_batch = 0
        self._is_over = False
        self._start: dict[str, Any] | None = None
        """States of generators at the start of the epoch."""
        self._next_start: dict[str, Any] | None = None
        """States at the start of the next epoch, of a checkpoint that was saved between the two."""
        self._before = BeforeReading()
        self._state: Any = None
        """State of the loader or its dataset after the last batch handed out; None = it has none."""
        self._agrees = world_size > 1 and not isinstance(getattr(loader, "batch_sampler", None), RankBatches)

    def __len__(self) -> int:
        return UNKNOWN_LENGTH

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None = unknown."""
        try:
            length = len(self._loader)
        except (TypeError, NotImplementedError):
            return self._limit
        return length if self._limit is None else min(length, self._limit)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch + self._is_over

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        place = {"start": self._start, "state": self._state, "ahead": self._before.state}
        if self._is_over and self._has_place:  # the run restores the process's own
            place["next_start"] = self._next_start or {**states_of(self._loader), "rng": None}
        return {"epoch": self._epoch, "batch": self._next_batch, "stream": {"is_over": self._is_over, **place}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position."""
        before = self._epoch, self._next_batch, self._is_over
        self._epoch, self._next_batch = int(state["epoch"]), int(state["batch"])
        place = state.get("stream", {}) if self._next_batch else {}
        self._is_over = bool(place.get("is_over"))
        if before != (self._epoch, self._next_batch, self._is_over):  # else its generators are already there
            self._next_start = place.get("next_start")
        self._start, self._state, self._before.state = (place.get(name) for name in ("start", "state", "ahead"))

    def __iter__(self) -> Iterator[Delivery]:
        if self._is_over or (self._limit is not None and self._next_batch >= self._limit):
            self._epoch, self._next_batch, self._is_over = self._epoch + 1, 0, False
        most = None if self._limit is None else self._limit - self._next_batch
        for (batch, state), is_last in self._with_ends(self._begun(), most):
            yield self._given(batch, state, is_last=is_last)
            if self._is_over:
                return
        if self._next_batch == 0:
            again, check = (
                "An epoch is one reading: let each iter() begin anew.",
                "Check workload.data and workload.drop_last.",
            )
            way_out = again if self._epoch else check
            raise DataError(f"{type(self._dataset).__name__} gave no batch in epoch {self._epoch}. {way_out}")
        self._is_over = True  # nothing was left when the run was resumed
        yield from self

    def _begun(self) -> Iterator[tuple[Any, Any]]:
        """Returns the batches from the present position on, each with the state after it."""
        owner = self._owner_of_state()
        if self._next_batch == 0:
            resumed, self._next_start = self._next_start or {}, None
            if resumed:
                restore_states(self._loader, resumed)
            stayed = {"workers_stay": True} if resumed.get("workers_stay") else {}
            self._start, self._state = {**states_of(self._loader), **stayed} if self._has_place else None, None
            set_epoch(self._loader, self._epoch)
            return _read(self._without_new_seed() if stayed else iter(self._loader), owner)
        with generators.kept():  # the run restores its own afterwards
            start = self._start or states_of(self._loader)  # a run that began with the dataset alone has none
            restore_states(self._loader, start)
            set_epoch(self._loader, self._epoch)
            has_state = owner is not None and self._state is not None
            if has_state:
                owner.load_state_dict(self._state)
            found = _read(self._without_new_seed() if start["workers_stay"] else iter(self._loader), owner)
            if not has_state:
                next(islice(found, self._next_batch, self._next_batch), None)  # drops what was trained on
            if self._before.state is None:
                return found
            restore_states((), {"rng": self._before.state})
            return chain([*islice(found, 1)], found)  # the batch that had been read ahead

    def _without_new_seed(self) -> Iterator[Any]:
        """Returns the batches of new workers in place of some that had stayed, whose seed an earlier epoch drew."""
        own, vars(self._loader)["generator"] = self._loader.generator, torch.Generator()
        try:
            return iter(self._loader)
        finally:
            self._loader.generator = own

    def _owner_of_state(self) -> Any:
        """Returns the loader or dataset whose ``state_dict`` gives its position; None if neither has one.

        None with several ranks, too, of which one writes the checkpoint.
        """
        # The state of a dataset with indices may be another than its position.
        streams = [self._dataset] if self._is_here and is_stream(self._dataset) else []
        owners = [] if self._world_size > 1 else [self._loader, *streams]
        names = ("state_dict", "load_state_dict")
        return next((one for one in owners if all(callable(getattr(one, name, None)) for name in names)), None)

    def _with_ends(self, found: Iterator[Any], most: int | None) -> Iterator[tuple[Any, bool]]:
        """Yields each item with whether it is the last. Reads one ahead if only reading shows the length."""
        if (left := self._num_left()) is not None:
            shown = left if most is None else min(left, most)
            for number, one in enumerate(islice(found, shown), 1):
                if number == left and self._is_here:  # torch's RandomSampler draws once more at its end
                    next(found, None)
                yield one, number == shown
            return
        none, number = object(), 1
        held: Any = next(found, none)
        while held is not none:
            ahead: Any = none
            if number != most:
                with self._before.reading() if self._is_here and self._has_place else nullcontext():
                    ahead = next(found, none)
            yield held, ahead is none
            held, number = ahead, number + 1

    def _num_left(self) -> int | None:
        """Returns the batches left of the epoch; None if only reading shows it, as for samplers of the user's own."""
        sampler: Any = getattr(self._loader, "batch_sampler", None)
        sampler = sampler.inner if isinstance(sampler, RankBatches) else sampler
        is_torchs = type(sampler) is BatchSampler and type(sampler.sampler).__module__.startswith("torch.utils.data")
        if not is_torchs or type(self._loader).__iter__ is not DataLoader.__iter__ or is_stream(self._dataset):
            return None
        return max(0, len(self._loader) - self._next_batch)

    def _given(self, batch: Any, state: Any, *, is_last: bool) -> Delivery:
        size, index = self._size(batch), self._next_batch
        total, is_padding = size, False
        if self._agrees:
            total, is_last = agreed(size, is_last=is_last)
        elif self._world_size > 1:
            total, is_padding = self._loader.batch_sampler.total_of(index)
        self._state, self._next_batch, self._is_over = state, index + 1, is_last
        where = self.state_dict()
        return Delivery(batch, self._epoch, index, total, is_padding, num_samples=size, is_last=is_last, position=where)

    def _size(self, batch: Any) -> int:
        """Returns the samples of a batch; for a layout of its own its weight, else the loader's batch size."""
        if "split" not in self._methods:
            with suppress(TypeError):  # the step reports a layout that it can't cut
                return batches.batch_size(batch)
        weight = self._methods.get("weight")
        return int(weight(batch)) if weight is not None else self._batch_size or 1

    def close(self) -> None:
        """Ends worker processes that stay; a later ``iter()`` starts new ones."""
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None


class OwnEvalLoader(OwnLoader):
    """A split in a user's loader, read from its start at each ``iter()``. Every rank reads all of it."""

    _has_place = False

    def __len__(self) -> int:
        return UNKNOWN_LENGTH if (steps := self.steps_per_epoch) is None else steps

    def __iter__(self) -> Iterator[Delivery]:
        self.load_state_dict({"epoch": 0, "batch": 0})
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Returns the start position, where each pass begins."""
        return {"epoch": 0, "batch": 0}


def _read(found: Iterator[Any], owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each batch with the state of ``owner`` after it."""
    for batch in found:
        yield batch, None if owner is None else copy.deepcopy(owner.state_dict())


def set_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of a loader, its samplers, and a dataset that is read in order, as far as they have it."""
    batch_sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    inner = batch_sampler.inner if isinstance(batch_sampler, RankBatches) else batch_sampler
    found = [loader, getattr(loader, "sampler", None), inner, getattr(inner, "sampler", None)]
    found += [dataset] if is_stream(dataset) else []
    for one in {id(each): each for each in found}.values():
        if callable(call := getattr(one, "set_epoch", None)):
            call(epoch)

"""Describes a data set that is read in order: what it gives, and how several readers may share it."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch.utils.data._utils.worker as torch_worker
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset

from wellfed import batches, generators
from wellfed.data.settings import MOST_PARTS
from wellfed.errors import DataError

SharedBy = Literal["shard", "worker info"]
_DISTRIBUTED = ("is_initialized", "get_rank", "get_world_size")
_TURN = threading.Lock()
"""torch keeps one worker info for all threads of a process."""


def is_stream(dataset: Any) -> bool:
    """Whether a data set is read in order, having no ``__getitem__`` of its own; torch's classes all inherit one."""
    if isinstance(dataset, (Stream, IterableDataset)):
        return True
    return getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__) and hasattr(dataset, "__iter__")


def has_states(data: Any) -> bool:
    """Whether it can say where a reading stands, and go on from there (torchdata's protocol). A DataLoader that can
    tells it with all that its workers know, batch by batch: it is read again."""
    methods = (getattr(data, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(data, DataLoader)


def check_items(dataset: Any, *, by_item: bool) -> None:
    """A DataError where samples can't be asked for by their index.

    Args:
        by_item: ``fetch`` is left alone.
    """
    name = type(dataset).__name__
    if not hasattr(dataset, "__getitem__"):
        lacks = "neither __getitem__ nor __iter__"
    elif type(dataset).__getitem__ is Dataset.__getitem__ and (by_item or not hasattr(dataset, "fetch")):
        lacks = "no __getitem__ of its own"
    elif not hasattr(dataset, "__len__"):
        raise DataError(f"{name} has no __len__, the number of its samples. Give it one, or __iter__ for a stream.")
    else:
        return
    raise DataError(
        f"{name} gives no samples: it has {lacks}. "
        "Give it __getitem__(index), beside fetch if it has that, or __iter__ for a stream."
    )


@dataclass(frozen=True)
class PartOf:
    """What a stream is told of who reads it, in place of torch's ``WorkerInfo``."""

    id: int
    num_workers: int
    dataset: Any = None
    seed: int = 0


class Stream:
    """A data set that is iterated: torch's ``IterableDataset`` gives samples, any other iterable batches, unless its
    ``gives_batches`` says otherwise. What is asked of a batch (``on_device``, ``weight``, ``split``) it has, too."""

    def __init__(
        self,
        dataset: Any,
        *,
        gives_batches: bool | None = None,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        """``worker_init`` is called with the number of a part before a worker reads it, which is told what it reads."""
        self.worker_init = worker_init
        self.name = type(dataset).__name__
        own = getattr(dataset, "gives_batches", not isinstance(dataset, IterableDataset))
        self.gives_batches = bool(own if gives_batches is None else gives_batches)
        self._take(dataset)
        if type(dataset).__module__ in ("builtins", "itertools") and hasattr(dataset, "__next__"):
            raise DataError(
                f"A {self.name} can be read once only, and an epoch is one reading. "
                "Give the iterable that makes it: an object whose __iter__ begins anew."
            )
        self._at_start = None
        if has_states(dataset):
            with suppress(Exception):  # it may have none before it is read
                self._at_start = copy.deepcopy(dataset.state_dict())

    def _take(self, dataset: Any) -> None:
        self.dataset = dataset
        vars(self).update(batches.methods(dataset))

    @classmethod
    def of(cls, dataset: Any) -> Stream:
        """The data set itself, where it is described already."""
        return dataset if isinstance(dataset, cls) else cls(dataset)

    @property
    def splits_itself(self) -> bool:
        """Its batches are of a layout of their own, from which samples can't be counted."""
        return hasattr(self, "split")

    @property
    def length(self) -> int | None:
        """What it says by ``__len__``: samples, or batches; None where it says nothing."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    @cached_property
    def shared_by(self) -> SharedBy | None:
        """How parts of it are read; None = it can't be known. Reads a sample where there is no ``shard``."""
        if isinstance(self.dataset, DataLoader):
            return None
        if callable(getattr(self.dataset, "shard", None)):
            return "shard"
        return "worker info" if self._asked & {"id", "num_workers"} else None

    @property
    def shares_ranks_itself(self) -> bool:
        """It asks torch.distributed which rank it is read by."""
        return self.shared_by == "worker info" and not self._asked.isdisjoint(_DISTRIBUTED)

    @cached_property
    def _asked(self) -> set[str]:
        """What reading the first sample asks of those who may tell a reader its part."""
        asked: set[str] = set()

        class Asked(PartOf):
            def __getattribute__(self, name: str) -> Any:
                asked.add(name)
                return super().__getattribute__(name)

        data = self.anew()
        told = generators.kept(), _noting_calls(distributed, _DISTRIBUTED, asked), as_worker(Asked(0, 2, data))
        with suppress(Exception), told[0], told[1], told[2]:  # what it raises training meets again, and tells
            if self.worker_init is not None:
                self.worker_init(0)
            next(iter(data), None)
        return asked

    @property
    def num_shards(self) -> int | None:
        """The number of parts that it says it can be read in."""
        found = getattr(self.dataset, "num_shards", None)
        return found if isinstance(found, int) and found > 0 else None

    def num_parts(self, num_workers: int, world_size: int = 1) -> int:
        """Parts that a rank reads in turn: those that the stream has, else one a worker."""
        if self.num_shards is None:
            return max(1, num_workers)
        return max(1, min(MOST_PARTS, self.num_shards // world_size)) if self.shared_by else 1

    def anew(self) -> Any:
        """The data set as it was before anyone read it. Shallow: what it holds in memory is not copied."""
        is_kept = hasattr(type(self.dataset), "__del__") or isinstance(self.dataset, DataLoader)  # and its workers
        dataset = self.dataset if is_kept else _copied(self.dataset, copy.copy)
        if self._at_start is not None:
            dataset.load_state_dict(copy.deepcopy(self._at_start))
        return dataset

    def on_a_copy(self) -> Stream:
        """The same of a shallow copy of the data set."""
        other = copy.copy(self)
        other._take(_copied(self.dataset, copy.copy))
        return other

    def part(self, index: int, count: int, *, is_alone: bool) -> tuple[Any, PartOf | None]:
        """What to iterate for one of ``count`` parts, and what to tell it of who reads it.

        Args:
            is_alone: no other part is read by this process, as in a worker of torch's DataLoader.
        """
        if count == 1:
            return self.anew(), None
        if self.shared_by == "shard":
            shard = self.dataset.shard
            is_as_in_datasets = "num_shards" in inspect.signature(shard).parameters  # of Hugging Face
            return shard(num_shards=count, index=index) if is_as_in_datasets else shard(index, count), None
        dataset = self.anew() if is_alone else _copied(self.anew(), copy.deepcopy)
        return dataset, PartOf(index, count, dataset)


@contextmanager
def as_worker(info: PartOf | None) -> Iterator[None]:
    """Within, ``torch.utils.data.get_worker_info()`` gives this."""
    worker: Any = torch_worker
    if worker._worker_info is info:
        yield
        return
    with _TURN:
        before, worker._worker_info = worker._worker_info, info
        try:
            yield
        finally:
            worker._worker_info = before


@contextmanager
def _noting_calls(module: Any, names: tuple[str, ...], called: set[str]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            called.add(name)
            return function(*arguments, **named)

        return call

    for name, function in before.items():
        setattr(module, name, noting(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _copied(dataset: Any, how: Callable[[Any], Any]) -> Any:
    try:
        return how(dataset)
    except Exception:  # noqa: BLE001  what can't be copied is shared
        return dataset

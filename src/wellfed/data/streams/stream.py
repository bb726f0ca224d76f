"""Describes a dataset that is read in order: what it yields, and how several readers can share it."""

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
from torch.utils.data import DataLoader, Dataset, IterableDataset

from wellfed import batches, generators
from wellfed.data.settings import MOST_PARTS
from wellfed.errors import DataError

SharedBy = Literal["shard", "worker info"]
_TURN = threading.Lock()
"""Lock for torch's worker info, which all threads of a process share."""


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is read in order: it has no ``__getitem__`` of its own, and no ``__getitems__``."""
    if isinstance(dataset, (Stream, IterableDataset)):
        return True
    if callable(getattr(dataset, "__getitems__", None)):
        return False
    return getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__) and hasattr(dataset, "__iter__")


def has_states(data: Any) -> bool:
    """Returns whether the dataset can save and restore its position (torchdata's protocol).

    False for a DataLoader, whose state holds all that its workers hold for each batch; it is read again instead.
    """
    methods = (getattr(data, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not isinstance(data, DataLoader)


def check_items(dataset: Any, *, by_item: bool) -> None:
    """Raises a DataError if samples can't be read by index, or ``fetch`` takes other arguments.

    Args:
        by_item: whether ``fetch`` is left unused.
    """
    name = type(dataset).__name__
    has_getitems, has_fetch = (callable(getattr(dataset, each, None)) for each in ("__getitems__", "fetch"))
    if not (has_getitems or hasattr(dataset, "__getitem__")):
        lacks = "neither __getitem__ nor __iter__"
    elif not has_getitems and type(dataset).__getitem__ is Dataset.__getitem__ and (by_item or not has_fetch):
        lacks = "no __getitem__ of its own"
    elif not hasattr(dataset, "__len__"):
        raise DataError(f"{name} has no __len__, the number of its samples. Give it one, or __iter__ for a stream.")
    else:
        if not by_item:
            _check_fetch(dataset)
        return
    raise DataError(
        f"{name} gives no samples: it has {lacks}. "
        "Give it __getitem__(index) or __getitems__(indices), beside fetch if it has that, or __iter__ for a stream."
    )


def _check_fetch(dataset: Any) -> None:
    try:
        signature = inspect.signature(dataset.fetch)
    except (AttributeError, TypeError, ValueError):  # no such method, or compiled code
        return
    try:
        signature.bind("indices", "rng")
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__}.fetch{signature} is called as fetch(indices, rng), which its parameters don't "
            "allow. Write def fetch(self, indices, rng)."
        ) from None


@dataclass(frozen=True)
class PartOf:
    """The reader of a stream, in the role of torch's ``WorkerInfo``."""

    id: int
    num_workers: int
    dataset: Any = None
    seed: int = 0


class Stream:
    """A dataset that is iterated, with its methods for batches (``on_device``, ``weight``, ``split``).

    Torch's ``IterableDataset`` yields samples, other iterables yield batches; an attribute ``gives_batches`` changes
    that.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        gives_batches: bool | None = None,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            worker_init: called with the number of a part before a worker reads that part.
        """
        self.worker_init = worker_init
        self.name = type(dataset).__name__
        if hasattr(dataset, "__next__") and not has_states(dataset):
            raise DataError(
                f"A {self.name} can be read once only, and an epoch is one reading. "
                "Give the iterable that makes it: an object whose __iter__ begins anew."
            )
        own = getattr(dataset, "gives_batches", not isinstance(dataset, IterableDataset))
        self.gives_batches = bool(own if gives_batches is None else gives_batches)
        self._take(dataset)
        self._at_start = None
        if has_states(dataset):
            with suppress(Exception):  # may not exist before the first read
                self._at_start = copy.deepcopy(dataset.state_dict())

    def _take(self, dataset: Any) -> None:
        self.dataset = dataset
        vars(self).update(batches.methods(dataset))

    @classmethod
    def of(cls, dataset: Any) -> Stream:
        """Returns the stream of a dataset, or the dataset itself if it is a Stream."""
        return dataset if isinstance(dataset, cls) else cls(dataset)

    @property
    def length(self) -> int | None:
        """Number of samples, or of batches, by ``__len__``; None = unknown."""
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return None

    @cached_property
    def shared_by(self) -> SharedBy | None:
        """How its parts are read; None = unknown. Reads a sample if the dataset has no ``shard``."""
        if isinstance(self.dataset, DataLoader):
            return None
        if callable(getattr(self.dataset, "shard", None)):
            return "shard"
        asked: set[str] = set()

        class Asked(PartOf):
            def __getattribute__(self, name: str) -> Any:
                asked.add(name)
                return super().__getattribute__(name)

        data = self.anew()
        with suppress(Exception), generators.kept(), as_worker(Asked(0, 2, data)):  # training reports the same error
            if self.worker_init is not None:
                self.worker_init(0)
            next(iter(data), None)
        return "worker info" if asked & {"id", "num_workers"} else None

    @property
    def num_shards(self) -> int | None:
        """Number of parts that it offers as ``num_shards``."""
        found = getattr(self.dataset, "num_shards", None)
        return found if isinstance(found, int) and found > 0 else None

    def num_parts(self, num_workers: int, world_size: int = 1) -> int:
        """Returns the number of parts that a rank reads in turn: the stream's own, else one per worker."""
        if self.num_shards is None:
            return max(1, num_workers)
        return max(1, min(MOST_PARTS, self.num_shards // world_size)) if self.shared_by else 1

    def anew(self) -> Any:
        """Returns the dataset in its unread state, as a shallow copy that shares data in memory."""
        is_kept = hasattr(type(self.dataset), "__del__") or isinstance(self.dataset, DataLoader)  # keeps its workers
        dataset = self.dataset if is_kept else copied_by(copy.copy, self.dataset)
        if self._at_start is not None:
            dataset.load_state_dict(copy.deepcopy(self._at_start))
        return dataset

    def on_a_copy(self) -> Stream:
        """Returns a stream of a shallow copy of the dataset."""
        other = copy.copy(self)
        other._take(copied_by(copy.copy, self.dataset))
        return other

    def part(self, index: int, count: int, *, is_alone: bool) -> tuple[Any, PartOf | None]:
        """Returns the iterable for one of ``count`` parts, and the reader to set as worker info.

        Args:
            is_alone: whether this process reads no other part, as a worker of torch's DataLoader.
        """
        if count == 1:
            return self.anew(), None
        if self.shared_by == "shard":
            shard = self.dataset.shard
            is_as_in_datasets = "num_shards" in inspect.signature(shard).parameters  # Hugging Face's
            return shard(num_shards=count, index=index) if is_as_in_datasets else shard(index, count), None
        dataset = self.anew() if is_alone else copied_by(copy.deepcopy, self.anew())
        return dataset, PartOf(index, count, dataset)


@contextmanager
def as_worker(info: PartOf | None) -> Iterator[None]:
    """Makes ``torch.utils.data.get_worker_info()`` return ``info`` inside."""
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


def copied_by(how: Callable[[Any], Any], dataset: Any) -> Any:
    """Returns a copy of a dataset; the dataset itself if it can't be copied."""
    try:
        return how(dataset)
    except Exception:  # noqa: BLE001  a dataset that can't be copied is shared
        return dataset

"""Loaders for training and evaluation, built from a dataset, an order and a loader plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from wellfed.contract import Batch
from wellfed.errors import DataError
from wellfed.loading import backends, batches
from wellfed.loading.backends import ItemBuilder, Key, LoaderPlan, ProcessBackend
from wellfed.loading.position import EpochOrder, Share
from wellfed.sample_rng import SampleRng


@dataclass
class Delivery:
    """One optimizer step's samples for this rank, with where they come from."""

    batch: Batch
    epoch: int
    index: int
    """Number of the batch in its epoch, from 0."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool = False
    """See `position.Share`."""


class BatchBuilder:
    """Builds the batch of one (epoch, batch) key: by ``fetch`` where the data offers it, else item by item."""

    def __init__(
        self,
        dataset: Any,
        order: EpochOrder,
        seed: int,
        rank: int,
        collate: Callable[[list[Any]], Batch] | None,
        *,
        what: str = "training",
    ) -> None:
        self._dataset, self._order, self._seed, self._rank, self._what = dataset, order, seed, rank, what
        self.collate = collate or default_collate
        self.items = ItemBuilder(dataset, seed, takes_rng=takes_rng(dataset), what=what)
        self.has_fetch = callable(getattr(dataset, "fetch", None))

    def __getitem__(self, key: Key) -> Batch:
        """The batch of this key; torch's DataLoader asks this way."""
        return self(key)

    def __call__(self, key: Key) -> Batch:
        """The batch of this key."""
        epoch, batch = key
        share = self._order.share(epoch, batch)
        if not self.has_fetch:
            return self.collate([self.items[epoch, int(index)] for index in share.indices])
        try:
            return self._dataset.fetch(share.indices, SampleRng(self._seed, epoch, batch, self._rank))
        except Exception as cause:
            cause.add_note(f"while fetching {self._what} batch {batch} of epoch {epoch} ({len(share.indices)} samples)")
            raise

    def item_keys(self, key: Key) -> list[Key]:
        """What `items` is asked for to make the batch of this key."""
        return [(key[0], int(index)) for index in self._order.share(*key).indices]


def takes_rng(dataset: Any) -> bool:
    """Whether ``dataset.__getitem__`` has a parameter ``rng``."""
    try:
        return "rng" in inspect.signature(type(dataset).__getitem__).parameters
    except (AttributeError, ValueError, TypeError):
        return False


class TrainLoader:
    """The steps of successive epochs; each ``iter()`` goes on where the last delivered batch left off.

    Has ``__len__`` (without one Lightning reads a batch ahead and loses it at a checkpoint) and a state that is the
    position after the last delivered batch, whatever is queued ahead.
    """

    def __init__(self, builder: BatchBuilder, order: EpochOrder, plan: LoaderPlan) -> None:
        self._builder, self._order, self._plan = builder, order, plan
        self._epoch, self._next_batch = 0, 0
        self._processes: ProcessBackend | None = None
        self._running: Generator[Batch] | None = None

    def __len__(self) -> int:
        return self._order.num_batches

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch + (self._next_batch >= len(self))

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch."""
        return {"epoch": self._epoch, "batch": self._next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position."""
        self._epoch, self._next_batch = int(state["epoch"]), int(state["batch"])

    def __iter__(self) -> Iterator[Delivery]:
        self._stop_running()
        if self._next_batch >= len(self):
            self._epoch, self._next_batch = self._epoch + 1, 0
        epoch = self._epoch
        keys = [(epoch, batch) for batch in range(self._next_batch, len(self))]
        running = self._running = self._batches(keys)
        try:
            for (_, number), batch in zip(keys, running, strict=True):
                share = self._order.share(epoch, number)
                self._next_batch = number + 1
                yield Delivery(batch, epoch, number, share.total, share.is_padding)
        finally:
            running.close()

    def _batches(self, keys: list[Key]) -> Generator[Batch]:
        plan = self._plan
        if plan.backend == "inline":
            return backends.inline(self._builder, keys, plan)
        if plan.backend == "threads":
            return backends.threads(self._builder, keys, plan)
        by_item = plan.backend == "torch"
        if self._processes is None:
            dataset: Any = self._builder.items if by_item else self._builder
            self._processes = ProcessBackend(dataset, plan, by_item=by_item, collate=self._builder.collate)
        return self._processes([self._builder.item_keys(key) for key in keys] if by_item else keys)

    def close(self) -> None:
        """Stop what builds ahead, worker processes too; a later ``iter()`` starts them anew."""
        self._stop_running()
        self._processes = None

    def _stop_running(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


class IterableLoader:
    """Training data that brings its own batches: an iterable with ``__len__``; its order is its own."""

    def __init__(self, dataset: Iterable[Batch], limit_batches: int | None = None) -> None:
        self._dataset = dataset
        self._length = len(dataset) if limit_batches is None else min(len(dataset), limit_batches)  # type: ignore[arg-type]
        self._epoch, self._next_batch = 0, 0

    def __len__(self) -> int:
        return self._length

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch + (self._next_batch >= len(self))

    def state_dict(self) -> dict[str, int]:
        """The position of the next batch."""
        return {"epoch": self._epoch, "batch": self._next_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position; the batches before it are read and dropped."""
        self._epoch, self._next_batch = int(state["epoch"]), int(state["batch"])

    def __iter__(self) -> Iterator[Delivery]:
        if self._next_batch >= len(self):
            self._epoch, self._next_batch = self._epoch + 1, 0
        number = -1
        for number, batch in zip(range(len(self)), self._dataset, strict=False):
            if number < self._next_batch:
                continue
            self._next_batch = number + 1
            yield Delivery(batch, self._epoch, number, batches.batch_size(batch))
        if number + 1 < len(self):
            raise DataError(
                f"{type(self._dataset).__name__} promised {len(self)} batches by its __len__ and gave {number + 1} in "
                f"epoch {self._epoch}. Let __len__ return the number of batches that every pass gives."
            )

    def close(self) -> None:
        """Nothing runs ahead here."""


class EvalLoader:
    """A split in its own order, every sample once, on every rank."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        collate: Callable[[list[Any]], Batch] | None = None,
        limit_batches: int | None = None,
    ) -> None:
        self._order = EpochOrder(len(dataset), batch_size, seed=seed, shuffle=False, limit_batches=limit_batches)
        self._builder = BatchBuilder(dataset, self._order, seed, 0, collate, what="evaluation")

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[Delivery]:
        for number in range(len(self)):
            share: Share = self._order.share(0, number)
            yield Delivery(self._builder((0, number)), 0, number, share.total)


def train_loader(
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    plan: LoaderPlan,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Batch] | None = None,
    skip_ids: tuple[int, ...] = (),
    limit_batches: int | None = None,
    shuffle: bool = True,
) -> TrainLoader | IterableLoader:
    """Steps of ``batch_size`` samples over all ranks.

    Raises:
        DataError: no samples, fewer than one whole step with ``drop_last``, or an iterable without ``__len__``.
    """
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} has no __len__: without one the last batch is lost at a checkpoint. "
            "Give it __len__ (number of batches), or make it map-style with __getitem__."
        )
    if not hasattr(dataset, "__getitem__"):
        if world_size > 1:
            raise DataError(
                f"{type(dataset).__name__} is an iterable, which every one of the {world_size} ranks would read whole. "
                "Make it map-style with __getitem__, or set trainer.devices=1."
            )
        if len(dataset) == 0:
            raise DataError(f"{type(dataset).__name__} has no batches: its __len__ is 0. Check workload.data.")
        return IterableLoader(dataset, limit_batches)
    order = EpochOrder(
        len(dataset),
        batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        skip_ids=skip_ids,
        limit_batches=limit_batches,
        shuffle=shuffle,
    )
    if order.num_batches == 0:
        raise DataError(
            f"{len(dataset)} training samples make no step of workload.effective_batch_size={batch_size}"
            f"{' with workload.drop_last=true' if drop_last else ''}. "
            "Set a smaller workload.effective_batch_size, or workload.drop_last=false."
        )
    return TrainLoader(BatchBuilder(dataset, order, seed, rank, collate), order, plan)

"""Yields the batches of training, epoch after epoch, from any position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from torch.utils.data import Dataset

from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.backends.bad_samples import BadSamples
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_source import BatchSource
from wellfed.data.epoch_order import EpochOrder
from wellfed.data.non_finite_samples import NonFiniteSample, first_non_finite
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError
from wellfed.record.entries import OnEvent, ignore_event

_LOG = logging.getLogger(__name__)


class TrainLoader:
    """Yields the steps of successive epochs; each ``iter()`` continues after the last batch handed out.

    Batches queued ahead do not count.
    """

    def __init__(self, builder: BatchBuilder, order: EpochOrder, settings: LoaderSettings, bad: BadSamples) -> None:
        self._builder, self._order, self._bad = builder, order, bad
        self._epoch = self._next_batch = 0
        self._source = BatchSource(builder, settings, bad)

    def __len__(self) -> int:
        return self._order.num_batches

    @property
    def dataset(self) -> Any:
        """The dataset, for hooks that change it between epochs."""
        return self._builder.dataset

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, over all ranks together."""
        return len(self)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch + (self._next_batch >= len(self))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, the samples that failed so far, and those that are skipped."""
        lists = {"skipped": list(self._bad.indices), "skip_ids": list(self._order.skip_ids)}
        return {"epoch": self._epoch, "batch": self._next_batch} | {name: ids for name, ids in lists.items() if ids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position; samples that failed before it are not requested again.

        After a change of loader.skip_ids, batches of the same number hold other samples, so the epoch begins anew.
        """
        self._epoch, self._next_batch = int(state["epoch"]), int(state["batch"])
        self._bad.remember(state.get("skipped", ()))
        if self._next_batch and tuple(state.get("skip_ids", ())) != self._order.skip_ids:
            _LOG.warning("loader.skip_ids has changed: epoch %d begins anew.", self._epoch)
            self._next_batch = 0

    def __iter__(self) -> Iterator[Delivery]:
        self._source.stop()
        if self._next_batch >= len(self):
            self._epoch, self._next_batch = self._epoch + 1, 0
        self._order.check_length(self.dataset)
        numbers = range(self._next_batch, len(self))
        with closing(self._source.start(self._order.shares(self._epoch, numbers), len(numbers))) as running:
            for delivery in running:
                self._next_batch = delivery.index + 1
                yield delivery

    def non_finite_sample(self, state: dict[str, Any], *, steps: int = 1) -> NonFiniteSample | None:
        """Returns the first sample with NaN or infinite values among the ``steps`` batches before a position."""
        last = int(state["epoch"]) * len(self) + int(state["batch"])
        first = max(0, last - steps)
        shares = (self._order.share(*divmod(number, len(self))) for number in range(first, last))
        return first_non_finite(self._builder, list(map(self._bad.leave_out, shares)), is_usual_allowed=first > 0)

    def close(self) -> None:
        """Ends workers and everything built ahead; a later ``iter()`` restarts them.

        A blocked thread ends once it has its batch, and changes nothing here.
        """
        self._source.close()


def train_loader(
    dataset: Any,
    settings: LoaderSettings,
    *,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Batch] | None = None,
    limit_batches: int | None = None,
    shuffle: bool = True,
    on_event: OnEvent = ignore_event,
) -> TrainLoader:
    """Returns a loader of steps of ``batch_size`` samples over all ranks.

    Args:
        shuffle: whether each epoch has another order.
        on_event: receives a ``sample_skipped`` for each sample left out.

    Raises:
        DataError: there are too few samples for a step, or the dataset can't be read or sent to worker processes.
    """
    name, by_item = type(dataset).__name__, settings.backend == "torch"
    check_items(dataset, by_item=by_item)
    order = EpochOrder(
        len(dataset),
        batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        shuffle=shuffle,
        skip_ids=settings.skip_ids,
        limit_batches=limit_batches,
    )
    if len(dataset) == 0:
        raise DataError(f"{name} has no training samples: its __len__ is 0. Check workload.data.")
    if order.num_kept == 0:
        raise DataError(
            f"{name}: loader.skip_ids leaves out all {len(dataset)} training samples. Set loader.skip_ids=[]."
        )
    if order.num_batches == 0:
        problem = f"make no step of workload.effective_batch_size={batch_size} with workload.drop_last=true."
        way_out = "Set a smaller workload.effective_batch_size, or workload.drop_last=false."
        raise DataError(f"{order.num_kept} training samples {problem} {way_out}")
    if settings.max_skipped and world_size > 1:
        raise ValueError("max_skipped needs one rank: others would not know that a step has lost a sample")
    builder = BatchBuilder(dataset, seed, rank, collate, by_item=by_item, most_lost=settings.max_skipped)
    bad = BadSamples(name, settings, on_event=on_event, may_skip=world_size == 1)
    return TrainLoader(builder, order, settings, bad)


def check_items(dataset: Any, *, by_item: bool) -> None:
    """Raises a DataError if samples can't be read by index.

    Args:
        by_item: whether ``fetch`` is left unused.
    """
    name = type(dataset).__name__
    has_getitems, has_fetch = (callable(getattr(dataset, each, None)) for each in ("__getitems__", "fetch"))
    lacks = ""
    if not (has_getitems or hasattr(dataset, "__getitem__")):
        lacks = "neither __getitem__ nor __iter__"
    elif not has_getitems and type(dataset).__getitem__ is Dataset.__getitem__ and (by_item or not has_fetch):
        lacks = "no __getitem__ of its own"
    if lacks:
        way_out = "Give it __getitem__(index) or __getitems__(indices), beside fetch if it has that, or __iter__ for a"
        raise DataError(f"{name} gives no samples: it has {lacks}. {way_out} stream.")
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{name} has no __len__, the number of its samples. Give it one, or __iter__ for a stream.")

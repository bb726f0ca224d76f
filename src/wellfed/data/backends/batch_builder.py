"""Builds the batch of one request: by ``fetch`` or ``__getitems__`` if the dataset has it, else sample by sample.

Names a sample that raises; the loader decides whether to leave it out.
"""

from __future__ import annotations

import errno
import inspect
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import Subset, default_collate

from wellfed import batches, generators
from wellfed.batches import BuildTime, shapes_of
from wellfed.contract import Batch
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LostSample
from wellfed.errors import DataError, WellfedError, first_line, reason_of, text_of
from wellfed.sample_rng import rng_of_batch, seed_from

_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class UnreadBatch(DataError):
    """Raised for a batch that ``fetch`` could not load."""

    problem = ""
    """The message without a way out."""


class BatchBuilder:
    """Builds batches; randomness is a function of (seed, epoch, index), or of (seed, epoch, batch) for whole batches.

    The process's generators and those that dataset and collate function hold are seeded before each sample, or before
    each ``__getitems__``. ``fetch`` gets ``rng``, and finds the generators that it holds seeded.

    Args:
        most_lost: maximum number of samples that a batch may lose before building stops; none with ``fetch``.
        by_item: whether to read samples although the dataset has ``fetch``.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        rank: int = 0,
        collate: Callable[[list[Any]], Batch] | None = None,
        *,
        purpose: str = "training",
        by_item: bool = False,
        most_lost: int = 0,
    ) -> None:
        self.dataset, self.most_lost, self.purpose = dataset, most_lost, purpose
        self.seed, self._rank = seed, rank
        self._collate = collate or default_collate
        self.turn: AbstractContextManager[Any] = nullcontext()
        """Lock for the generators that a dataset holds, if several threads build batches."""
        self._epoch: int | None = None
        """Epoch of the latest batch."""
        self._held: list[Any] = []
        """Generators that dataset and collate function hold."""
        self._slowest: tuple[float, int] | tuple[None, None] = None, None
        """Milliseconds and index of the sample of the latest batch that took longest."""
        self._draws = False
        """Whether samples were seen to draw from a generator. Until then generators are not seeded per sample, which
        takes ten times as long as reading a sample from memory."""
        self.has_fetch = not by_item and callable(getattr(dataset, "fetch", None))
        self._has_getitems = not self.has_fetch and has_getitems(dataset)
        self._takes_rng = takes_rng(dataset) and not self._has_getitems
        self.splits_itself = "split" in batches.methods(dataset)
        """Whether batches have a layout of their own, whose samples can't be counted."""

    def __call__(self, request: BatchRequest) -> BuiltBatch:
        """Returns the batch of a request without the samples that raised, and those samples.

        Raises errors without a single sample as cause.
        """
        if not request.indices.numel():  # takes a third of the time of len()
            return BuiltBatch(None)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        is_first = request.epoch != self._epoch
        if is_first:
            self._begin(request.epoch)
        self._slowest = None, None
        build = self._by_fetch if self.has_fetch else self._by_item
        built = build(request)
        if is_first and self._finds_generators():  # made while the first batch was read
            built = build(request)
        wall_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        built.took = BuildTime(1e3 * wall_s, 1e3 * cpu_s, *self._slowest)
        return built

    def _begin(self, epoch: int) -> None:
        """Tells the dataset the epoch, if it has ``set_epoch``, and looks for generators that it holds."""
        with self.turn:
            if self.purpose == "training" and callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(epoch)
            self._finds_generators()
            self._epoch = epoch

    def _finds_generators(self) -> bool:
        """Looks for generators that dataset and collate function hold; returns whether one is new."""
        before, self._held = self._held, generators.held_by((self.dataset, self._collate))
        return any(all(each is not known for known in before) for each in self._held)

    def state_of_data(self) -> list[Any]:
        """Returns values that differ once a user has changed the dataset or the collate function."""
        return generators.values_in(self.dataset, self._collate)

    def loads(self, request: BatchRequest) -> bool:
        """Returns whether all samples of a request can be read in this process, by a new attempt."""
        try:
            with generators.kept(self._held):
                return not self(request).lost
        except Exception:  # noqa: BLE001  whatever the dataset raises
            return False

    def nothing_given(self, request: BatchRequest) -> DataError:
        """Returns the error for a batch that is None although no sample was lost."""
        method = "fetch" if self.has_fetch else "collate"
        problem = f"{type(self.dataset).__name__}: {method} returned None for {request.place(self.purpose)}."
        return DataError(f"{problem} It must return the batch.")

    def _by_fetch(self, request: BatchRequest) -> BuiltBatch:
        place = self.seed, request.epoch, request.batch, self._rank
        # A copy, since the dataset may write to it and the indices are a view of the epoch's order.
        indices = request.indices.clone() if request.indices.dtype is torch.int64 else request.indices.long()
        try:
            with self.turn if self._held else nullcontext():
                if self._held:
                    generators.seed_held(self._held, seed_from(*place))
                return BuiltBatch(self.dataset.fetch(indices, rng_of_batch(*place)))
        except Exception as error:
            if _is_passed_on(error):
                raise
            described = request.described(self.purpose)
            problem = f"{type(self.dataset).__name__}: fetch could not load {described}: {reason_of(error)}."
            way_out = "dataset[index] shows which sample fails: repair it"
            if self.purpose == "training":
                way_out += ", or add it to loader.skip_ids. loader.max_skipped is for data without fetch"
            fault = UnreadBatch(f"{problem} {way_out}.")
            fault.problem = problem
            fault.add_note("".join(traceback.format_exception(error)).rstrip())  # a worker sends no cause
            raise fault from error

    def _by_item(self, request: BatchRequest) -> BuiltBatch:
        read = self._at_once if self._has_getitems else self._one_by_one
        if self._takes_rng and not self._held:
            samples, lost = read(request, seeds=False)
        else:
            with generators.kept(self._held):  # per batch: takes longer than reading a sample from memory
                before = None if self._draws else generators.numbers(self._held)
                samples, lost = read(request, seeds=self._draws)
                if before is not None and generators.numbers(self._held) != before:
                    self._draws = True
                    samples, lost = read(request, seeds=True)
        if lost and (not samples or self._are_too_many(lost)):
            return BuiltBatch(None, tuple(lost))
        try:
            return BuiltBatch(self._collated(samples, request), tuple(lost))
        except Exception as error:
            if _is_passed_on(error):
                raise
            failed = {one.index for one in lost}
            indices = [index for index in request.indices.tolist() if index not in failed]
            is_own = default_collate not in (self._collate, getattr(self._collate, "collate", None))
            if is_own or len(samples) != len(indices):
                error.add_note(f"while collating {request.place(self.purpose)}")
                raise
            raise self._unlike(samples, indices, request, error) from error

    def _at_once(self, request: BatchRequest, *, seeds: bool) -> tuple[Any, list[LostSample]]:
        """Reads the samples by ``__getitems__``, or if it raises, one by one.

        It returns a list of samples, or what the user's collate function takes.
        """
        indices = request.indices.tolist()
        if seeds:
            self._seed(request.epoch, indices[0])
        try:
            return self.dataset.__getitems__(indices), []
        except Exception as error:
            if _is_passed_on(error):
                raise
            samples, lost = self._one_by_one(request, seeds=seeds)
            if not lost:
                place = request.described(self.purpose)
                error.add_note(f"__getitems__ could not load {place}, and each of them loads alone.")
                raise
            return samples, lost

    def _one_by_one(self, request: BatchRequest, *, seeds: bool) -> tuple[list[Any], list[LostSample]]:
        """Reads the samples one by one, until more than ``most_lost`` have failed."""
        samples: list[Any] = []
        lost: list[LostSample] = []
        times: list[tuple[float, int]] = []
        for index in request.indices.tolist():
            began_s = time.perf_counter()
            try:
                samples.append(self.item(request.epoch, index, seeds=seeds))
                times.append((1e3 * (time.perf_counter() - began_s), index))
            except Exception as error:
                if is_of_the_machine(error):
                    raise
                lost.append(LostSample(index, reason_of(error), error))
                if self._are_too_many(lost):
                    break
        self._slowest = max(times, default=(None, None))
        return samples, lost

    def _are_too_many(self, lost: Sequence[LostSample]) -> bool:
        """Returns whether a batch may not lose these; a sample that was drawn several times counts once."""
        return len({one.index for one in lost}) > self.most_lost

    def _collated(self, samples: list[Any], request: BatchRequest) -> Batch:
        """Collates with the batch's randomness, for masking; torch's own collate draws nothing."""
        if self._collate is default_collate:
            return default_collate(samples)
        with generators.kept(self._held):
            number = seed_from(self.seed, request.epoch, request.batch, self._rank)
            generators.seed_for_sample(number, self._held)
            return self._collate(samples)

    def item(self, epoch: int, index: int, *, seeds: bool = True) -> Any:
        """Returns ``dataset[index]`` with this epoch's randomness; ``seeds`` = seed all generators too."""
        if seeds:
            self._seed(epoch, index)
        if self._takes_rng:
            return self.dataset.__getitem__(index, rng_of_batch(self.seed, epoch, index, 0))
        return self.dataset.__getitems__([index])[0] if self._has_getitems else self.dataset[index]

    def _seed(self, epoch: int, index: int) -> None:
        generators.seed_for_sample(seed_from(self.seed, epoch, index), self._held)

    def _unlike(self, samples: Any, indices: Sequence[int], request: BatchRequest, error: Exception) -> DataError:
        """Returns the error of samples that torch can't collate, which names the one at fault."""
        shapes = [shapes_of(sample) for sample in samples]
        wrong = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), 0)
        reason = "samples of a batch must be alike" if wrong else first_line(error).rstrip(".")
        beside = f"; sample {indices[0]} is {shapes[0]}" if wrong else ""
        problem = f"sample {indices[wrong]} can't be collated into {request.place(self.purpose)}: {reason}."
        return DataError(
            f"{type(self.dataset).__name__}: {problem} It is {shapes[wrong]}{beside}. Make all samples alike, or give "
            "Datasets.collate=<function> that pads or stacks."
        )


def has_getitems(dataset: Any) -> bool:
    """Returns whether torch's DataLoader would read a dataset by ``__getitems__``, and it loads batches at once.

    Torch's Subset has one always, which only hands on that of its dataset.
    """
    if getattr(type(dataset), "__getitems__", None) is Subset.__getitems__:
        return has_getitems(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def takes_rng(dataset: Any) -> bool:
    """Returns whether ``dataset.__getitem__`` has a parameter ``rng``."""
    try:
        return "rng" in inspect.signature(type(dataset).__getitem__).parameters
    except (AttributeError, ValueError, TypeError):
        return False


def _is_passed_on(error: Exception) -> bool:
    """Returns whether an error is no fault of the samples, or describes itself."""
    return is_of_the_machine(error) or isinstance(error, WellfedError)


def is_of_the_machine(error: BaseException) -> bool:
    """Returns whether memory, disk or file descriptors ran out. Leaving samples out would hide that."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE):
        return True
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in text or "out of memory" in text

"""Measures, splits and moves batches, and declares what a loader yields: a batch with its position in training.

A batch is a nested structure of tuples, lists, dicts and dataclasses of tensors that share their first dimension.

``apply_to_collection`` of lightning_utilities can't rebuild them: it refuses frozen dataclasses, drops what a
BatchEncoding has beside its items, and gives `map_rows` neither names of members nor lists as a whole.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellfed.contract import Batch
from wellfed.errors import DataError


def map_tensors(batch: Batch, apply: Callable[[Tensor], Tensor]) -> Batch:
    """Returns the same structure with every tensor replaced."""
    if isinstance(batch, Tensor):
        return apply(batch)
    return _rebuilt(batch, lambda _, item: map_tensors(item, apply)) if _is_container(batch) else batch


def _is_container(value: Any) -> bool:
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, (Mapping, tuple, list)) or is_dataclass


def _has_fields(value: Any) -> bool:
    return hasattr(value, "_fields") if isinstance(value, tuple) else not isinstance(value, (Mapping, list))


def _member(name: str, container: Any, key: Any) -> str:
    """Returns the name of a member in Python syntax."""
    return f"{name}.{key}" if _has_fields(container) else f"{name}[{key!r}]"


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yields key or field, and value, of each entry."""
    if isinstance(container, Mapping):
        yield from container.items()
    elif isinstance(container, (tuple, list)):
        yield from zip(getattr(container, "_fields", range(len(container))), container, strict=True)
    else:
        yield from ((spec.name, getattr(container, spec.name)) for spec in dataclasses.fields(container))


def _rebuilt(container: Any, each: Callable[[Any, Any], Any]) -> Any:
    """Returns a container of the same type, with ``each(key, item)`` in place of every item."""
    if isinstance(container, (Mapping, tuple, list)):
        new = {key: each(key, item) for key, item in _entries(container)}
        if type(container) is dict:
            return new
        if isinstance(container, (dict, UserDict)):
            clone: Any = copy.copy(container)  # a defaultdict has more than its items
            for key, item in new.items():
                clone[key] = item
            return clone
        if isinstance(container, Mapping):
            return type(container)(new)  # type: ignore[call-arg]
        return type(container)(*new.values()) if _has_fields(container) else type(container)(new.values())
    fields = {spec.name: spec.init for spec in dataclasses.fields(container)}
    given = {name: each(name, getattr(container, name)) for name, is_given in fields.items() if is_given}
    try:
        return dataclasses.replace(container, **given)
    except (TypeError, ValueError):  # its class has its own __init__, or an InitVar
        clone = copy.copy(container)
        for name in fields:
            item = given[name] if name in given else each(name, getattr(container, name))
            object.__setattr__(clone, name, item)
        return clone


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Yields all tensors of the batch, depth first."""
    if isinstance(batch, Tensor):
        yield batch
    elif _is_container(batch):
        for _, item in _entries(batch):
            yield from tensors(item)


def named_tensors(batch: Batch, name: str = "batch") -> list[tuple[str, Tensor]]:
    """Returns all tensors of the batch with their names, as ``batch['inputs']``, depth first."""
    if isinstance(batch, Tensor):
        return [(name, batch)]
    entries = _entries(batch) if _is_container(batch) else ()
    return [found for key, item in entries for found in named_tensors(item, _member(name, batch, key))]


def methods(dataset: Any) -> dict[str, Callable[..., Any]]:
    """Returns a dataset's own methods for batches. A ``split`` that is not callable is a name, as in torchvision."""
    named = {name: getattr(dataset, name, None) for name in ("split", "weight", "on_device")}
    return {name: method for name, method in named.items() if callable(method)}


def batch_size(batch: Batch) -> int:
    """Returns the length of the first dimension that the tensors share.

    Raises:
        TypeError: there is no tensor, or the first dimensions differ.
    """
    each: Iterable[Tensor] = batch.values() if type(batch) is dict and _is_flat(batch) else tensors(batch)
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in each}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(batch)) or "no tensors"
        raise TypeError(
            f"A batch needs tensors that share their first dimension; this one has {found}. "
            "Give the training data split(batch, sizes) and weight(batch) for another layout."
        )
    return int(next(iter(sizes)))  # type: ignore[arg-type]


def shapes_of(value: Any, most: int = 12) -> str:
    """Returns names, shapes and types of a batch or a sample, with at most ``most`` entries a container."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # an array of numpy
        return f"{list(value.shape)} {value.dtype} ({type(value).__name__})"
    if isinstance(value, Mapping):
        entries = [f"{key} {shapes_of(item, most)}" for key, item in islice(value.items(), most)]
    elif isinstance(value, (tuple, list)):
        entries = [shapes_of(item, most) for item in value[:most]]
        if len(value) > 1 and set(entries) <= {"int", "float", "str", "bool"} and len(set(entries)) == 1:
            return f"{type(value).__name__} of {len(value)} {entries[0]}"
    else:
        return type(value).__name__
    listed = ", ".join(entries) + (f" and {len(value) - most} more" if len(value) > most else "")
    return f"{{{listed}}}" if isinstance(value, Mapping) else f"{type(value).__name__}({listed})"


def num_bytes(batch: Batch) -> int:
    """Returns the bytes of all tensors of the batch."""
    return sum(bytes_by_dtype(batch).values())


def bytes_by_dtype(batch: Batch) -> dict[str, int]:
    """Returns the bytes of all tensors of the batch by dtype, as ``float32``."""
    found: dict[str, int] = {}
    for tensor in tensors(batch):
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.numel() * tensor.element_size()
    return found


def map_rows(
    batch: Batch,
    num_samples: int,
    of_tensor: Callable[[Tensor], Tensor],
    of_rows: Callable[[Any], Any],
    name: str = "batch",
) -> Batch:
    """Returns the same structure with every member replaced that has an entry per sample.

    These are all tensors, and numpy arrays, lists and tuples of ``num_samples`` entries. None, strings and booleans
    stay unchanged.

    Args:
        name: of the batch, for messages.

    Raises:
        DataError: a member can't be cut with the samples; the error names it.
    """
    if isinstance(batch, Tensor):
        return of_tensor(batch)
    if next(tensors(batch), None) is None:
        if _is_constant(batch):
            return batch
        if _has_length(batch, num_samples):
            if _may_hold_rows(batch, num_samples):
                raise _uncut(name, num_samples, f"{shapes_of(batch)}: one entry a sample, or one a member")
            return of_rows(batch)
        if not _is_container(batch) or (type(batch) in (list, tuple) and all(map(_is_constant, batch))):
            raise _uncut(name, num_samples, shapes_of(batch))

    def mapped(key: Any, item: Any) -> Any:
        return map_rows(item, num_samples, of_tensor, of_rows, _member(name, batch, key))

    return _rebuilt(batch, mapped)


def _is_constant(value: Any) -> bool:
    """Returns whether a member is the same for any part of a batch."""
    is_plain = value is None or isinstance(value, (str, bytes, bool, Enum, torch.dtype, torch.device))
    return is_plain or (_is_container(value) and not any(True for _ in _entries(value)))


def _has_length(value: Any, num_samples: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == num_samples
    return type(value) in (list, tuple) and len(value) == num_samples


def _may_hold_rows(value: Any, num_samples: int) -> bool:
    """Returns whether each entry of a list has an entry for each of several samples."""
    is_list = type(value) in (list, tuple) and num_samples > 1
    return is_list and all(_has_length(item, num_samples) for item in value)


def _uncut(name: str, num_samples: int, what: str) -> DataError:
    return DataError(
        f"{name} can't be cut into micro-batches: it is {what}, beside tensors of {num_samples} samples. Give it an "
        f"entry for each sample, leave it out of the batch, or give the data split(batch, sizes). Whole batches need "
        f"neither: memory.micro_batch={num_samples} memory.on_oom=fail."
    )


def split(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Returns successive parts of a batch: views of tensors and arrays, slices of lists with an entry per sample.

    Raises:
        DataError: a member can't be cut; the error names it.
    """
    total = sum(sizes)

    def part(start: int, size: int) -> Batch:
        end = start + size
        return map_rows(batch, total, lambda tensor: tensor.narrow(0, start, size), lambda rows: rows[start:end])

    return [part(start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def repeated(sample: Batch, size: int) -> Batch:
    """Returns a batch of any size that repeats the samples of another. Members that can't be cut stay whole."""
    num_samples = batch_size(sample)
    rows = torch.arange(size) % num_samples

    def of_tensor(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, rows)

    def of_rows(held: Any) -> Any:
        return held[rows.numpy()] if isinstance(held, np.ndarray) else type(held)(held[row] for row in rows.tolist())

    try:
        return map_rows(sample, num_samples, of_tensor, of_rows)
    except DataError:  # cutting a step reports the member
        return map_tensors(sample, of_tensor)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on the device; copies from pinned memory don't block the host."""
    if type(batch) is dict and _is_flat(batch):  # as most are, in a tenth of the time
        if device.type == "cpu" and False not in [tensor.is_cpu for tensor in batch.values()]:
            return batch.copy()
        return {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _is_flat(batch: dict[Any, Any]) -> bool:
    """Returns whether a dict holds tensors alone, none of them of a subclass."""
    return set(map(type, batch.values())) == {Tensor}


def pin(batch: Batch) -> Batch:
    """Returns the batch in page-locked memory, from which copies to a GPU don't block the host."""
    return map_tensors(batch, lambda tensor: tensor.pin_memory())


class BuildTime(NamedTuple):
    """Time to build a batch, without pinning it and sending it to the training process."""

    wall_ms: float
    cpu_ms: float
    """CPU time of the thread that built it."""
    slowest_ms: float | None = None
    """Time of the slowest sample; None if whole batches are fetched."""
    slowest_index: int | None = None
    """Index of the slowest sample."""


@dataclasses.dataclass
class Delivery:
    """This rank's samples of one optimizer step, with their position in training."""

    batch: Batch
    epoch: int
    index: int
    """Number of the batch in its epoch, from 0."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool = False
    """Whether the batch only pads a share without samples; it must not count."""
    is_on_device: bool = False
    num_samples: int | None = None
    """Samples of the batch if its tensors don't show it: the dataset has its own ``split``."""
    is_last: bool = False
    """Whether the epoch ends with this batch; set for a stream, whose length is unknown."""
    position: dict[str, Any] | None = None
    """Position of the loader after this batch, if it needs more than epoch and index."""
    weights: tuple[list[int], list[int]] | None = None
    """Sizes of the micro-batches and their weights by the dataset's ``weight``, computed on the host."""
    took: BuildTime | None = None
    """None = built by the user's DataLoader, or from the samples left at the end of a stream."""
    copy_ahead_ms: float | None = None
    """Time to copy the batch to a GPU ahead of its step; None = it was not."""

    _size: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Samples of the batch. Counted once, since that visits every tensor."""
        if self._size is None:
            self._size = batch_size(self.batch) if self.num_samples is None else self.num_samples
        return self._size

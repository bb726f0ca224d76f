"""Measures, splits and moves batches: nested tuples, lists, dicts and dataclasses of tensors that share their first
dimension; and says what a loader delivers, a batch with its place in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellfed.contract import Batch


def map_tensors(
    batch: Batch, apply: Callable[[Tensor], Tensor], texts: Callable[[list[str]], list[str]] | None = None
) -> Batch:
    """The same structure with every tensor replaced; anything that is no tensor stays as it is.

    Args:
        texts: replaces lists of texts too, which is what collating leaves of one text a sample.
    """
    if isinstance(batch, Tensor):
        return apply(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(item, apply, texts) for key, item in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, apply, texts) for item in batch))
    if texts is not None and type(batch) is list and all(isinstance(item, (str, bytes)) for item in batch):
        return texts(batch)
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(item, apply, texts) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [spec.name for spec in dataclasses.fields(batch) if spec.init]
        return dataclasses.replace(batch, **{name: map_tensors(getattr(batch, name), apply, texts) for name in fields})
    return batch


def tensors(batch: Batch) -> Iterator[Tensor]:
    """All tensors of the batch, depth first."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tensors(item)
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from tensors(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for spec in dataclasses.fields(batch):
            yield from tensors(getattr(batch, spec.name))


def methods(dataset: Any) -> dict[str, Callable[..., Any]]:
    """What a data set does itself with its batches. A ``split`` that can't be called is a name, as torchvision's."""
    named = {name: getattr(dataset, name, None) for name in ("split", "weight", "on_device")}
    return {name: method for name, method in named.items() if callable(method)}


def batch_size(batch: Batch) -> int:
    """Length of the first dimension that the tensors share.

    Raises:
        TypeError: there is no tensor, or the first dimensions differ.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors(batch)}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(batch)) or "no tensors"
        raise TypeError(
            f"A batch needs tensors that share their first dimension; this one has {found}. "
            "Give the training data split(batch, sizes) and weight(batch) for another layout."
        )
    return int(next(iter(sizes)))  # type: ignore[arg-type]


def shapes_of(value: Any, most: int = 12) -> str:
    """Returns names, shapes and types of what a batch or a sample holds, at most so many entries a container."""
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
    """Bytes of all tensors of the batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch))


def split(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Views of successive parts along the first dimension; nothing is copied but lists of a text for each sample."""
    total = sum(sizes)

    def part(start: int, size: int) -> Batch:
        return map_tensors(
            batch,
            lambda tensor: tensor.narrow(0, start, size),
            lambda texts: texts[start : start + size] if len(texts) == total else texts,
        )

    return [part(start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; copies from pinned memory don't block the host."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Batch) -> Batch:
    """The batch in page-locked memory, from which copies to a GPU run beside the host."""
    return map_tensors(batch, lambda tensor: tensor.pin_memory())


class BuildTime(NamedTuple):
    """What building a batch took whoever built it: not pinning it, nor its way to the training process."""

    wall_ms: float
    cpu_ms: float
    """Of the thread that built it."""


@dataclasses.dataclass
class Delivery:
    """One optimizer step's samples for this rank, with where they come from."""

    batch: Batch
    epoch: int
    index: int
    """Number of the batch in its epoch, from 0."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool = False
    """It stands for a part of no samples, which must count nothing."""
    is_on_device: bool = False
    """Its batch has been brought to the device."""
    failure: Exception | None = None
    """Why there is padding in the place of a batch: to be raised once the other ranks know."""
    num_samples: int | None = None
    """Samples of the batch where its tensors do not say: the data has a ``split`` of its own."""
    is_last: bool = False
    """The epoch ends with it; known of a stream, which has no length that could be counted to."""
    position: dict[str, Any] | None = None
    """Where a loader whose position is more than epoch and index stands after it."""
    weights: tuple[list[int], list[int]] | None = None
    """Sizes of micro-batches, and what each counts by the data's own ``weight``, asked while they were on the host."""
    indices: Tensor | None = None
    """Of its samples in the data set; None = not known."""
    took: BuildTime | None = None
    """None: built by a DataLoader of the user's, or of what was left at the end of a stream."""

    @cached_property
    def size(self) -> int:
        """Samples of the batch; many ask, and to count them is to walk through it."""
        return batch_size(self.batch) if self.num_samples is None else self.num_samples

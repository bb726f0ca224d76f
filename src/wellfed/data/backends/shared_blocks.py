"""Sends batches from worker processes to the training process through blocks of shared memory that are reused.

torch sends each tensor in new shared memory, which costs a file descriptor, half a millisecond and new pages. Here a
worker copies a batch into one of its blocks and marks the block as in use. The training process builds the members of
the batch as views of one numpy array over the block. That array lives as long as any of them, and its end marks the
block as free.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
import pickle
import weakref
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage

from wellfed.data.backends.batch_request import BuiltBatch

_LOG = logging.getLogger(__name__)
_FREE, _IN_USE = 0, 1
"""States of a block, in its first byte. Its worker marks it as in use; the training process ends that."""
_ALIGNMENT = 64
"""Bytes to which the start of a member is aligned. The state takes the first of them."""
_ROUNDED_TO = 2**16
"""Bytes to which the size of a block is rounded up, so that batches of similar size fit."""
_SMALL = 2**14
"""Bytes below which a member goes through the pipe. A small member that a user keeps does not keep a block in use."""
_LARGER_STORAGE = 4
"""Maximum ratio of storage to tensor. Of a larger storage, which may be the whole dataset, the tensor alone is sent."""
_HELD = 4
"""Blocks of a worker beyond the batches that it builds ahead, for batches that training still holds."""

Bytes = NDArray[np.uint8]
Key = tuple[int, int]
"""Process id of the worker and number of the block."""


class Sender:
    """The blocks of one worker process, made when they are needed."""

    def __init__(self, inbox: int, prefetch_factor: int) -> None:
        """
        Args:
            inbox: number of the `Inbox` that receives the batches.
        """
        self._inbox, self._most = inbox, prefetch_factor + _HELD
        self._blocks: list[Bytes] = []
        self._has_room = True
        """False once no block could be made. torch leaves an empty file each time, so it is not tried again."""

    def packed(self, built: BuiltBatch) -> Any:
        """Returns an object that arrives in the training process as ``built``.

        The whole batch goes through the pipe if all blocks are in use, or if no further block can be made.

        Raises:
            Exception: ``built`` can't be pickled.
        """
        pickled, members = _pickled(built)
        if not members:
            return _Packed(self._inbox, pickled)
        starts = list(itertools.accumulate(map(_aligned, members), initial=_ALIGNMENT))
        number, new = self._take(starts[-1])
        if number is None:
            return _Packed(self._inbox, _pickled(built, math.inf)[0])
        block = self._blocks[number]
        block[0] = _IN_USE
        places = [(start, start + len(each)) for start, each in zip(starts, members, strict=False)]
        for (start, end), member in zip(places, members, strict=True):
            block[start:end] = member
        return _Packed(self._inbox, pickled, (os.getpid(), number), new, places)

    def _take(self, size: int) -> tuple[int | None, Tensor | None]:
        """Returns the number of a free block, and the block if it is new; None if there is none."""
        place = len(self._blocks)
        for number, block in enumerate(self._blocks):
            if block[0] == _FREE and len(block) >= size:
                return number, None
            if block[0] == _FREE:
                place = number  # too small: a larger one takes its place
        if not self._has_room or place == self._most:
            return None, None
        new = torch.empty(-(-size // _ROUNDED_TO) * _ROUNDED_TO, dtype=torch.uint8)
        try:
            new.share_memory_()  # type: ignore[no-untyped-call]
        except (RuntimeError, OSError) as error:
            self._has_room = False
            _LOG.warning("A worker has no shared memory for its batches, and sends them through a pipe: %s", error)
            return None, None
        self._blocks[place : place + 1] = [new.numpy()]
        return place, new


def _aligned(member: Bytes) -> int:
    return -(-len(member) // _ALIGNMENT) * _ALIGNMENT


def _pickled(built: BuiltBatch, smallest: float = _SMALL) -> tuple[bytes, list[Bytes]]:
    """Returns the pickle of a batch without the bytes of its tensors and arrays, and these bytes (PEP 574).

    Args:
        smallest: bytes of a tensor or array below which they stay in the pickle.
    """
    file, members = io.BytesIO(), list[Bytes]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        member = np.frombuffer(buffer.raw(), np.uint8)
        if len(member) < smallest:
            return True
        members.append(member)
        return False

    _Pickler(file, pickle.HIGHEST_PROTOCOL, True, stays).dump(built)
    return file.getvalue(), members


class _Pickler(ForkingPickler):
    """A pickler that takes tensors for bytes."""

    def reducer_override(self, value: Any) -> Any:
        """Reduces tensors to storages and these to bytes. torch reduces tensors of other kinds to storages."""
        if type(value) is Tensor and _is_plain(value):
            value = value.resolve_conj().resolve_neg()
            if value.untyped_storage().nbytes() > _LARGER_STORAGE * value.nbytes:
                value = value.clone()
            place = value.storage_offset(), tuple(value.shape), value.stride()
            return _tensor, (value.untyped_storage(), value.dtype, *place)
        if type(value) is UntypedStorage and value.device.type == "cpu" and value.nbytes():
            held: Any = torch.empty(0, dtype=torch.uint8).set_(value).numpy()
            return _storage, (pickle.PickleBuffer(held),)
        return NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and not (tensor.is_nested or tensor.requires_grad)


def _tensor(storage: UntypedStorage, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _storage(held: Any) -> UntypedStorage:
    return torch.frombuffer(held, dtype=torch.uint8).untyped_storage()


class _Packed:
    """A pickled batch on its way, with the block that holds its members; pickles as a call of `_opened`."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._parts


class Inbox:
    """The blocks of a loader's workers in the training process."""

    def __init__(self) -> None:
        self.number = next(_INBOX_NUMBERS)
        self._blocks: dict[Key, Tensor] = {}
        self._lent: dict[Key, weakref.ref[Bytes]] = {}
        """The array over each block that holds a batch; its end marks the block as free."""
        _INBOXES[self.number] = self

    def clear(self) -> None:
        """Drops the blocks of workers that have ended. Batches from them stay valid."""
        self._blocks.clear()
        self._lent.clear()

    def lend(self, key: Key, block: Tensor | None) -> Bytes | None:
        """Returns an array over a block, whose end marks the block as free; None if its worker has ended.

        Args:
            block: the block if it is new.
        """
        if block is not None:
            self._blocks[key] = block
        elif (block := self._blocks.get(key)) is None:
            return None
        whole: Bytes = block.numpy()  # a new array each time
        self._lent[key] = weakref.ref(whole, partial(_free, block.numpy(), os.getpid()))
        return whole


_INBOX_NUMBERS = itertools.count()
_INBOXES: weakref.WeakValueDictionary[int, Inbox] = weakref.WeakValueDictionary()


def _opened(
    inbox: int,
    pickled: bytes,
    key: Key | None = None,
    block: Tensor | None = None,
    places: list[tuple[int, int]] | None = None,
) -> Any:
    if key is None or places is None:
        return pickle.loads(pickled)
    found = _INBOXES.get(inbox)
    whole = None if found is None else found.lend(key, block)
    if whole is None:  # the pass has ended, and nothing reads this batch
        return BuiltBatch(None)
    return pickle.loads(pickled, buffers=[whole[start:end] for start, end in places])


def _free(block: Bytes, process: int, lent: object) -> None:
    if os.getpid() == process:  # a forked process has a copy of the batch, which ends with it
        block[0] = _FREE

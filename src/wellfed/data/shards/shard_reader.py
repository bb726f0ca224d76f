"""Reads the bytes of samples from tar shards by their offsets, in any order.

A system call for each sample takes half as long as copying its bytes. So a sample whose last read was as fast as
memory, since the system held it in its page cache, is copied from a mapping of its shard next time. All others are read
by system calls, which report errors of the disk; an error behind a mapping would kill the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed.data.shards.shard_index import ShardIndex, stamp
from wellfed.errors import DataError

Bytes = NDArray[np.uint8]
_S_OF_A_BYTE = 1e-9
"""Seconds a byte below which a read came from memory; a disk reads samples in any order at 0.1 to 0.5 of that rate."""


class ShardReader:
    """Reads one part of the samples of an index; safe in threads and worker processes, which open their own files."""

    def __init__(self, index: ShardIndex, part: str) -> None:
        self.index, self.part = index, part
        self._offset_N, self._size_N = index.parts[part]
        self._files = np.full(len(index.paths), -1)
        """File descriptor of each shard, -1 = not open."""
        self._process = os.getpid()
        self._opening = Lock()
        self._is_near_N = np.zeros(len(index), bool)
        """Samples that were in memory when they were read last."""
        self._maps: dict[int, Bytes | None] = {}
        """Bytes of shards with such samples; None = can't be mapped."""

    def sizes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the bytes of each sample's part, -1 if the sample lacks it."""
        return self._size_N[rows]

    def read(self, rows: NDArray[np.int64]) -> list[Bytes]:
        """Returns the bytes of the samples ``rows``, as views of one array.

        Raises:
            DataError: a sample lacks the part, or a shard has changed.
        """
        sizes = self._size_N[rows]
        if (sizes < 0).any():
            missing = int(rows[np.argmin(sizes)])
            key = self.index.keys[missing]
            raise DataError(f"{self._path(missing)}: the sample {key!r} has no .{self.part}. Make the shard again.")
        whole = np.empty(int(sizes.sum()), np.uint8)
        parts = np.split(whole, np.cumsum(sizes)[:-1]) if len(rows) else []
        self.fill(rows, parts)
        return parts

    def fill(self, rows: NDArray[np.int64], targets: Iterable[Bytes], starts: NDArray[np.int64] | None = None) -> None:
        """Reads a piece of each of the samples ``rows`` into an array of the piece's size.

        Args:
            starts: offsets of the pieces within the samples' bytes; None = 0.

        Raises:
            DataError: a shard has changed.
        """
        began_s = time.perf_counter()
        offsets = (self._offset_N[rows] if starts is None else self._offset_N[rows] + starts).tolist()
        shard_B, row, num_bytes = self.index.shards[rows], -1, 0
        files = self._opened(shard_B)
        sources = self._mapped(rows, shard_B, files)
        try:
            for row, file, source, offset, into in zip(rows.tolist(), files, sources, offsets, targets, strict=True):
                size = into.nbytes
                num_bytes += size
                if source is not None:
                    into[...] = source[offset : offset + size]
                elif read_into(file, into, offset) != size:
                    problem = f"is shorter than it was when it was indexed, at {self.index.keys[row]!r}. Start again."
                    raise DataError(f"{self._path(row)} {problem}")
        except OSError as error:
            problem = f"can't be read at {self.index.keys[row]!r}: {error.strerror}. Check the disk."
            raise DataError(f"{self._path(row)} {problem}") from error
        self._is_near_N[rows] = time.perf_counter() - began_s < _S_OF_A_BYTE * num_bytes

    def _mapped(self, rows: NDArray[np.int64], shard_B: NDArray[np.int64], files: Sequence[int]) -> list[Bytes | None]:
        """Returns the mapped shard of each sample that was in memory lately, None for others."""
        is_near_B = self._is_near_N[rows]
        if not is_near_B.any():
            return [None] * len(rows)
        shards = shard_B.tolist()
        of_shard = {shard: self._map(shard, file) for shard, file in dict(zip(shards, files, strict=True)).items()}
        return [of_shard[shard] if is_near else None for shard, is_near in zip(shards, is_near_B.tolist(), strict=True)]

    def _map(self, shard: int, file: int) -> Bytes | None:
        if shard not in self._maps:
            try:
                self._maps[shard] = np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
            except (OSError, ValueError):  # no file descriptor is left for it, or the file is empty
                self._maps[shard] = None
        mapped = self._maps[shard]
        # Reading a mapping beyond the end of a file that has become shorter would kill the process.
        return mapped if mapped is not None and os.fstat(file).st_size >= len(mapped) else None

    def _path(self, row: int) -> Path:
        return self.index.paths[int(self.index.shards[row])]

    def _opened(self, shards: NDArray[np.int64]) -> list[int]:
        """Returns the file descriptor of each sample's shard. Each process opens each file once."""
        if self._process != os.getpid():  # a forked process opens its own files
            # After a fork the old lock may stay locked for ever, if another thread held it.
            self._files, self._process, self._opening = np.full(len(self.index.paths), -1), os.getpid(), Lock()
        found = self._files[shards]
        if len(found) and found.min() < 0:
            with self._opening:
                for shard in np.unique(shards[found < 0]).tolist():
                    if self._files[shard] < 0:
                        self._files[shard] = self._open(shard)
            found = self._files[shards]
        descriptors: list[int] = found.tolist()
        return descriptors

    def _open(self, shard: int) -> int:
        path = self.index.paths[shard]
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            way_out = "It was there a while ago."
            if error.errno == errno.EMFILE:
                way_out = "Make fewer and larger shards, or allow more open files: ulimit -n 65536"
            raise DataError(f"{path} can't be read: {error.strerror}. {way_out}") from error
        if stamp(os.fstat(file)) != self.index.stamps[shard]:
            os.close(file)
            raise DataError(f"{path} has changed since it was indexed. Start again.")
        return file

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "part": self.part}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["index"], state["part"])  # type: ignore[misc]

    def __del__(self) -> None:
        if self._process == os.getpid():
            close(self._files[self._files >= 0].tolist())


def read_into(file: int, into: Bytes, offset: int) -> int:
    """Reads until an array is full or the file ends; returns the bytes read. One system call reads at most 2 GiB."""
    count = found = os.preadv(file, (into,), offset)  # type: ignore[arg-type]
    while found and count < into.nbytes:
        found = os.preadv(file, (into.reshape(-1)[count:],), offset + count)  # type: ignore[arg-type]
        count += found
    return count


def close(descriptors: Sequence[int]) -> None:
    """Closes files; ignores files already closed."""
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            continue

"""Reads the bytes of samples from tar shards by their offsets, in any order."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellfed.data.shards.shard_index import ShardIndex, stamp
from wellfed.errors import DataError

Bytes = NDArray[np.uint8]


class ShardReader:
    """Reads one part of the samples of an index; safe in threads and worker processes, which open their own files."""

    def __init__(self, index: ShardIndex, part: str) -> None:
        self.index, self.part = index, part
        self._offset_N, self._size_N = index.parts[part]
        self._files = np.full(len(index.paths), -1)
        """File descriptor of each shard, -1 = not open."""
        self._process = os.getpid()

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
        offsets = (self._offset_N[rows] if starts is None else self._offset_N[rows] + starts).tolist()
        pieces = _rows_of(targets) if isinstance(targets, np.ndarray) else targets
        files, row = self._opened(self.index.shards[rows]), -1
        try:
            for row, file, offset, into in zip(rows.tolist(), files, offsets, pieces, strict=True):
                if read_into(file, into, offset) != into.nbytes:
                    problem = f"is shorter than it was when it was indexed, at {self.index.keys[row]!r}. Start again."
                    raise DataError(f"{self._path(row)} {problem}")
        except OSError as error:
            problem = f"can't be read at {self.index.keys[row]!r}: {error.strerror}. Check the disk."
            raise DataError(f"{self._path(row)} {problem}") from error

    def _path(self, row: int) -> Path:
        return self.index.paths[int(self.index.shards[row])]

    def _opened(self, shards: NDArray[np.int64]) -> list[int]:
        """Returns the file descriptor of each sample's shard. Each process opens each file once."""
        if self._process != os.getpid():  # a forked process opens its own files
            self._files, self._process = np.full(len(self.index.paths), -1), os.getpid()
        found: list[int] = self._files[shards].tolist()
        if -1 in found:
            for shard in np.unique(shards).tolist():
                if self._files[shard] < 0:
                    self._files[shard] = self._open(shard)
            found = self._files[shards].tolist()
        return found

    def _open(self, shard: int) -> int:
        path = self.index.paths[shard]
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            way_out = "Make fewer and larger shards, or allow more open files: ulimit -n 65536"
            way_out = way_out if error.errno == errno.EMFILE else "It was there a while ago."
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
            for file in self._files[self._files >= 0].tolist():
                os.close(file)


def _rows_of(table: Bytes) -> Iterable[Bytes | memoryview]:
    """Returns the rows of a table; those of a usual one as memoryviews, which are read into faster than arrays."""
    if table.ndim != 2 or not table.size or not table.flags.c_contiguous:
        return table
    whole, size = table.reshape(-1).data, table.shape[1]
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def read_into(file: int, into: Bytes | memoryview, offset: int) -> int:
    """Reads until an array is full or the file ends; returns the bytes read. One system call reads at most 2 GiB."""
    count = found = os.preadv(file, (into,), offset)  # type: ignore[arg-type]
    while found and count < into.nbytes:
        found = os.preadv(file, (memoryview(into).cast("B")[count:],), offset + count)  # type: ignore[arg-type]
        count += found
    return count

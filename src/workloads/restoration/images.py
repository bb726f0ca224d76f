"""Stores decoded images one after the other in one uint8 file, which is mapped into memory.

Shapes: N bytes of all images, R rows of bytes, W width of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workloads.restoration.bad_files import BadFiles
from workloads.restoration.decoding import MAX_PIXELS, DamagedImage, Decoded, Pixels, decode, quiet_pillow, size_of
from workloads.restoration.image_files import ImageFile

PIXELS_FILE = "pixels.bin"
INDEX_FILE = "images.json"


@dataclass(frozen=True)
class StoredImage:
    """Position of an image in the file of all pixels."""

    name: str
    split: str
    """Split of the `ImageFile`."""
    offset: int
    """First byte of the image."""
    height: int
    width: int
    digest: str
    """Hash of pixels and size."""

    @property
    def end(self) -> int:
        """First byte after the image."""
        return self.offset + 3 * self.height * self.width


@dataclass(frozen=True)
class ImageIndex:
    """Index of a folder of decoded images."""

    images: tuple[StoredImage, ...]
    damaged: tuple[tuple[str, str], ...] = ()
    """Name and reason of files that could not be decoded."""
    turned: tuple[tuple[str, int], ...] = ()
    """Original kinds of images that were converted to 8-bit RGB, with their counts."""


class ImagePixels:
    """Bytes of decoded images, in a mapped file or in a copy in RAM.

    Sent to another process, it maps or reads the file again; no content is sent. A forked process shares existing
    memory.
    """

    def __init__(self, file: Path, num_bytes: int, *, in_memory: bool = False) -> None:
        self.file, self.num_bytes, self.is_in_memory = file, num_bytes, in_memory
        self._copied: weakref.ref[ImagePixels] | None = None
        self._flat: Tensor | None = None
        self._opening = threading.Lock()

    @property
    def flat(self) -> Tensor:
        """All bytes, uint8 [N]; read-only."""
        if self._flat is None:
            with self._opening:  # one copy for all threads that build the first batches
                self._flat = self._open() if self._flat is None else self._flat
        return self._flat

    def _open(self) -> Tensor:
        if self.is_in_memory:
            return torch.from_numpy(np.fromfile(self.file, dtype=np.uint8, count=self.num_bytes))
        # Copy-on-write, since torch needs a writable tensor; unmodified pages stay shared with the file.
        return torch.from_numpy(np.memmap(self.file, dtype=np.uint8, mode="c", shape=(self.num_bytes,)))

    def in_memory(self) -> ImagePixels:
        """Returns the same bytes, read into RAM at first use. All callers share one copy while any of them holds it."""
        copied = self._copied() if self._copied is not None else None
        if copied is None:
            copied = ImagePixels(self.file, self.num_bytes, in_memory=True)
            self._copied = weakref.ref(copied)
        return copied

    def image(self, image: StoredImage) -> Pixels:
        """Returns a view ``[height, width, 3]`` of an image."""
        flat: Pixels = self.flat[image.offset : image.end].numpy()
        return flat.reshape(image.height, image.width, 3)

    def is_grey(self, image: StoredImage) -> bool:
        """Returns whether all pixels have three equal values."""
        whole = self.image(image)
        bands = (whole[top : top + 256] for top in range(0, image.height, 256))
        return all(bool((band == band[..., :1]).all()) for band in bands)

    def __reduce__(self) -> tuple[Callable[..., ImagePixels], tuple[Path, int]]:
        return partial(ImagePixels, in_memory=self.is_in_memory), (self.file, self.num_bytes)


def cut_rows(bytes_N: Tensor, start_R: Tensor, width: int) -> Tensor:
    """Returns rows ``[R, width]`` of bytes from ``start_R``; only these rows, which may overlap, are copied."""
    return bytes_N.as_strided((len(bytes_N) - width + 1, width), (1, 1)).index_select(0, start_R)


def read_index(folder: Path) -> ImageIndex:
    """Returns the index written by `write_images` or `decode_into`."""
    content = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return ImageIndex(
        tuple(StoredImage(**image) for image in content["images"]),
        tuple((name, reason) for name, reason in content["damaged"]),
        tuple((kind, count) for kind, count in content["turned"]),
    )


def write_images(folder: Path, decoded: Iterable[tuple[str, str, Decoded | DamagedImage]]) -> None:
    """Writes images, each with its name and split, in this order."""
    images, damaged, turned, offset = list[StoredImage](), list[tuple[str, str]](), Counter[str](), 0
    with (folder / PIXELS_FILE).open("wb") as file:
        for name, split, each in decoded:
            if isinstance(each, DamagedImage):
                damaged.append((name, str(each)))
                continue
            height, width, _ = each.pixels.shape
            digest = hashlib.sha256(each.pixels.data).hexdigest()[:24] + f"{height:08x}"
            images.append(StoredImage(name, split, offset, height, width, digest))
            file.write(each.pixels.data)
            turned.update(each.turned)
            offset = images[-1].end
    index = asdict(ImageIndex(tuple(images), tuple(damaged), tuple(turned.most_common())))
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def decode_into(folder: Path, files: Iterable[ImageFile], bad: BadFiles) -> None:
    """Decodes files in several threads and writes the images in the order of the files.

    Raises:
        DataError: more files are damaged than ``bad`` allows.
    """

    def judged() -> Iterator[tuple[str, str, Decoded | DamagedImage]]:
        for file, decoded in decoded_in_order(files):
            if isinstance(decoded, DamagedImage):
                bad.add(file.name, str(decoded))
            yield file.name, file.split, decoded

    with quiet_pillow():
        write_images(folder, judged())


def decoded_in_order(files: Iterable[ImageFile]) -> Iterator[tuple[ImageFile, Decoded | DamagedImage]]:
    """Yields images in file order; images decoded ahead have at most `MAX_PIXELS` in all."""
    num_threads = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ahead: deque[tuple[ImageFile, int, Future[Decoded | DamagedImage]]] = deque()
    with ThreadPoolExecutor(num_threads, "decode") as pool:
        try:
            for file in files:
                num_pixels = _size_or_0(file.path)
                while ahead and (
                    len(ahead) >= 4 * num_threads or num_pixels + sum(size for _, size, _ in ahead) > MAX_PIXELS
                ):
                    done, _, future = ahead.popleft()
                    yield done, future.result()
                ahead.append((file, num_pixels, pool.submit(_try_decode, file.path)))
            while ahead:
                done, _, future = ahead.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _size_or_0(path: Path) -> int:
    try:
        return size_of(path)
    except DamagedImage:
        return 0


def _try_decode(path: Path) -> Decoded | DamagedImage:
    try:
        return decode(path)
    except DamagedImage as error:
        return error

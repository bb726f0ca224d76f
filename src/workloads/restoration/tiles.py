"""Cuts whole images into tiles of one size for evaluation, each with a halo.

Shapes: T side of a tile with its halo, H x W of an image, N tiles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workloads.restoration.images import ImagePixels, StoredImage

CORE, HALO = 128, 32
"""Maximum side of a tile's scored core, and width of the halo around it, in pixels."""
_HELD = 2
"""Number of degraded images kept; a batch may hold the end of one and the beginning of the next."""

DegradeWhole = Callable[[Tensor, int], Tensor]
"""Function from a uint8 image [3, H, W] and its number to the degraded image, float32, always the same."""


class TileData:
    """Tiles of all images, one image after the other.

    The core of a tile begins ``halo`` pixels from its upper and left edge, and is smaller at the end of the image.
    Pixels outside the image are mirrored.

    Args:
        first_image: number of the first image.
        core: side of a core; None = `CORE`, or the side of the largest image if smaller.
        most_tiles: maximum number of tiles per image, evenly spread; None = all.
    """

    def __init__(
        self,
        pixels: ImagePixels,
        images: Sequence[StoredImage],
        *,
        degrade: DegradeWhole,
        first_image: int = 0,
        core: int | None = None,
        halo: int = HALO,
        most_tiles: int | None = None,
    ) -> None:
        self._pixels, self.images, self._degrade, self._first = pixels, tuple(images), degrade, first_image
        core = core or min(CORE, max(max(image.height, image.width) for image in images))
        self.core, self.halo = core, halo
        places: list[tuple[int, int, int]] = []
        for number, image in enumerate(images):
            corners = [(y, x) for y in range(0, image.height, core) for x in range(0, image.width, core)]
            count = min(len(corners), most_tiles or len(corners))
            chosen = [corners[(2 * place + 1) * len(corners) // (2 * count)] for place in range(count)]
            places += [(number, y, x) for y, x in chosen]
        self.place_N3 = torch.tensor(places)
        """Image and upper left corner of each tile's core."""
        self._held = HeldImages()

    def __len__(self) -> int:
        return len(self.place_N3)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one tile, equal to a row of `fetch`."""
        return {name: values.squeeze(0) for name, values in self.fetch(torch.tensor([range(len(self))[index]])).items()}

    def fetch(self, indices: Tensor, rng: Any = None) -> dict[str, Tensor]:
        """Returns ``clean`` uint8 and ``degraded`` float32 [B, 3, T, T], ``image`` int64 [B], and ``valid`` int64 [B,
        4]: y0, y1, x0, x1 of the core within the tile."""
        side = self.core + 2 * self.halo
        clean = np.empty((len(indices), 3, side, side), dtype=np.uint8)
        degraded = np.empty((len(indices), 3, side, side), dtype=np.float32)
        valid = []
        numbers, corners = self.place_N3[indices, 0], self.place_N3[indices, 1:]
        for row, (number, (y, x)) in enumerate(zip(numbers.tolist(), corners.tolist(), strict=True)):
            image = self.images[number]
            whole = self._pixels.image(image).transpose(2, 0, 1)
            inside = mirrored(y - self.halo, side, image.height)[:, None], mirrored(x - self.halo, side, image.width)
            clean[row] = whole[:, *inside]
            degraded[row] = self._held.get(number, self._degraded)[:, *inside]
            height, width = min(self.core, image.height - y), min(self.core, image.width - x)
            valid.append((self.halo, self.halo + height, self.halo, self.halo + width))
        return {
            "clean": torch.from_numpy(clean),
            "degraded": torch.from_numpy(degraded),
            "image": numbers + self._first,
            "valid": torch.tensor(valid),
        }

    def _degraded(self, number: int) -> NDArray[np.float32]:
        clean = self._pixels.image(self.images[number]).transpose(2, 0, 1)
        made = self._degrade(torch.from_numpy(np.ascontiguousarray(clean)), int(self.images[number].digest[:12], 16))
        values: NDArray[np.float32] = made.to(torch.float32).numpy()
        return values


class HeldImages:
    """A cache of the last few images, not sent to other processes."""

    def __init__(self) -> None:
        self.images: OrderedDict[int, NDArray[np.float32]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, number: int, make: Callable[[int], NDArray[np.float32]]) -> NDArray[np.float32]:
        """Returns the image, computed unless cached; threads that need the same one wait for it."""
        with self._lock:
            if number not in self.images:
                self.images[number] = make(number)
                if len(self.images) > _HELD:
                    self.images.popitem(last=False)
            return self.images[number]

    def __reduce__(self) -> tuple[type[HeldImages], tuple[()]]:
        return HeldImages, ()


def mirrored(start: int, count: int, size: int) -> NDArray[np.int64]:
    """Returns the positions ``start`` to ``start + count`` along a side of ``size``; outside ones are mirrored."""
    period = max(1, 2 * (size - 1))
    place = np.arange(start, start + count) % period
    return np.minimum(place, period - place)

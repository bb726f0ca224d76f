"""Cuts random uint8 crops of images for training, and turns them into clean and degraded float patches.

Shapes: B samples, P side of a crop, I images, S samples of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from wellfed import FeatureModeName, Features, FeatureSource, SampleRng
from workloads.restoration.images import ImagePixels, StoredImage, cut_rows

PLACE_DRAW, TURN_DRAW = 0, 1
"""Numbers of a sample's random draws for position and orientation; `Degradation` uses higher ones."""

Degrade = Callable[[Tensor, Tensor, SampleRng], Tensor]
"""Function from clean patches [B, 3, P, P] in 0..1, keys [B] and the batch's generator to degraded patches."""


class CropData:
    """Crops of ``patch_size``, with position and orientation by (seed, epoch, sample index).

    Args:
        images: images of at least the size of a crop, within the first ``pixels.num_bytes``.
        patches_per_image: crops of each image per epoch.
    """

    def __init__(
        self,
        pixels: ImagePixels,
        images: Sequence[StoredImage],
        *,
        patch_size: int,
        patches_per_image: int,
        degrade: Degrade,
    ) -> None:
        self.images, self.patch_size, self.degrade = tuple(images), patch_size, degrade
        self._pixels = pixels
        self._read: ImagePixels | None = pixels
        """Pixels for the crops of `fetch`; None = `on_device` looks them up."""
        # numpy, which computes with few numbers in half the time of torch
        self._image_4I = np.array(
            [
                (image.offset, 3 * image.width, image.height - patch_size + 1, image.width - patch_size + 1)
                for image in images
            ],
            np.int64,
        ).T.copy()
        """First byte, bytes of a line, and number of vertical and horizontal crop positions."""
        self._patches_per_image = patches_per_image
        self._line_P = np.arange(patch_size)

    def __len__(self) -> int:
        return len(self.images) * self._patches_per_image

    def __getitem__(self, index: int, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns one sample, equal to a row of `fetch`; without ``rng`` for seed 0, epoch 0."""
        batch = self.fetch(torch.tensor([range(len(self))[index]]), rng or SampleRng(0, 0))
        return {name: values.squeeze(0) for name, values in batch.items()}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        """Returns ``index`` int64 [B] and ``crop`` uint8 [B, P, P, 3]. In mode ``cache`` ``line`` int64 [B, P] replaces
        the crop: the first byte of each line."""
        line_BP = self._lines(indices, rng)
        if self._read is None:
            return {"index": indices, "line": line_BP}
        size = self.patch_size
        rows = cut_rows(self._read.flat, line_BP.flatten(), 3 * size)
        return {"index": indices, "crop": rows.view(-1, size, size, 3)}

    def on_device(
        self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource | None = None
    ) -> dict[str, Tensor]:
        """Returns ``clean`` and ``degraded``, float32 [B, 3, P, P]: the crop in 0..1, mirrored or turned in one of
        eight ways, and its degradation."""
        crop = batch.get("crop")
        if crop is None:
            if features is None:
                raise ValueError("A batch of mode cache holds no pixels: on_device wants the features.")
            crop = features.rows(batch["line"].flatten()).view(-1, self.patch_size, self.patch_size, 3)
        way_B = rng.bits_at(batch["index"], TURN_DRAW)
        clean = turned(crop.permute(0, 3, 1, 2).contiguous(), way_B).to(torch.float32) / 255
        return {"clean": clean, "degraded": self.degrade(clean, batch["index"], rng)}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"degrade": copy.copy(self.degrade)}  # leaves out tensors on a device

    def for_features(self, mode: FeatureModeName) -> Self:
        """Returns the same samples, with batches for that mode."""
        other = copy.copy(self)
        other._read = None if mode == "cache" else self._pixels if mode == "dynamic" else self._pixels.in_memory()
        return other

    def _lines(self, indices: Tensor, rng: SampleRng) -> Tensor:
        """Returns the first byte of each line, int64 [B, P]."""
        offset_B, pitch_B, down_B, across_B = self._image_4I[:, indices.numpy() // self._patches_per_image]
        bits_B = rng.bits_at(indices, PLACE_DRAW).numpy()  # 63 bits: lower for vertical, upper for horizontal
        start_B = offset_B + (bits_B & 0x7FFFFFFF) % down_B * pitch_B + (bits_B >> 31) % across_B * 3
        return torch.from_numpy(start_B[:, None] + pitch_B[:, None] * self._line_P)


def turned(image_BCPP: Tensor, way_B: Tensor) -> Tensor:
    """Mirrors or turns square integer images in one of eight ways, by the lowest bits of ``way_B``."""
    for bit, of_image in enumerate((_mirrored, _upside_down, _transposed)):
        # Equals torch.where in a twentieth of its time for bytes on a CPU; a mask of all ones takes the other image.
        mask_B111 = -(way_B >> bit & 1).to(image_BCPP.dtype)[:, None, None, None]
        image_BCPP = image_BCPP ^ (image_BCPP ^ of_image(image_BCPP)) & mask_B111
    return image_BCPP


def _mirrored(image: Tensor) -> Tensor:
    return image.flip(-1)


def _upside_down(image: Tensor) -> Tensor:
    return image.flip(-2)


def _transposed(image: Tensor) -> Tensor:
    return image.transpose(-1, -2)


def crop_features(pixels: ImagePixels, patch_size: int) -> Features:
    """Returns the features: row i is the ``3 * patch_size`` bytes from byte i of the images."""
    width = 3 * patch_size

    def cut(store: Tensor, indices: Tensor) -> Tensor:
        return cut_rows(store, indices, width)

    return Features(
        num_rows=pixels.num_bytes - width + 1,
        bytes=pixels.num_bytes,
        rows=lambda indices: cut(pixels.flat, indices.cpu()),
        store=lambda: pixels.flat,
        cut=cut,
    )

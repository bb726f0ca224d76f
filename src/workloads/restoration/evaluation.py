"""Compares restored photographs with the clean ones, image by image, from tiles of one size.

Shapes: B tiles, T side of a tile, S side of its central square with the core, I images. SSIM: Wang, Bovik, Sheikh,
Simoncelli, IEEE TIP 2004, https://doi.org/10.1109/TIP.2003.819861
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from wellfed import FeatureSource
from workloads.restoration.degradations import gaussian_window

WINDOW_REACH, WINDOW_SIGMA = 5, 1.5
"""Reach and spread of SSIM's Gaussian window, which is 11 pixels wide."""
SSIM_FLOORS = (0.01**2, 0.03**2)
"""Constants added to means and variances, for values in 0..1."""
NUM_PICTURES = 4
NUM_CANDIDATES = 32
"""Number of tiles kept as candidates for pictures, uint8: 32 x 144 KiB of cores of 128 pixels."""
SUMS = ("pixels", "error", "error_degraded", "ssim")


class ImageQuality:
    """PSNR and SSIM of each image, averaged over the images; values are clipped to 0..1 first.

    Only the cores of tiles count, so every pixel counts once. At the edges of an image SSIM's windows use its mirror
    image. Sums stay on the device; ``compute`` moves them to the host at once.

    Args:
        names: names of all images, by their numbers in the batches.
        halo: pixels around the core of a tile, at least 5. The model's reach + 5 gives the figures of whole images,
            mirrored at their edges.
    """

    best_metric = "psnr"
    best_mode: Literal["max", "min"] = "max"
    with_loss = False
    """False, since the loss would include the halo of the tiles."""

    def __init__(self, names: Sequence[str], halo: int) -> None:
        if halo < WINDOW_REACH:
            raise ValueError(f"halo={halo} is below {WINDOW_REACH}, the reach of SSIM's window")
        self.names, self.halo = list(names), halo
        self.reset()

    def reset(self) -> None:
        """Clears all sums and pictures."""
        self._sums_SI: Tensor | None = None
        self._candidates: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Restores the tiles of a batch.

        Args:
            batch: ``clean`` uint8 and ``degraded`` float [B, 3, T, T]; ``image`` int64 [B], its number; ``valid`` int64
                [B, 4], y0, y1, x0 and x1 of the core within the tile.
            features: unused, since tiles contain their pixels.
        """
        degraded = batch["degraded"].float()
        clean = batch["clean"].float() / 255
        restored = model(degraded).float().clamp(0, 1)
        degraded = degraded.clamp(0, 1)
        inner = slice(self.halo, degraded.shape[-1] - self.halo)
        mask_BSS = _cores(batch["valid"], degraded.shape[-1])[:, inner, inner]
        sums = [3 * mask_BSS.flatten(1).double().sum(1)]
        sums += [_total((each - clean).square()[..., inner, inner], mask_BSS) for each in (restored, degraded)]
        wide = slice(self.halo - WINDOW_REACH, degraded.shape[-1] - self.halo + WINDOW_REACH)
        clean_wide = clean[..., wide, wide]
        sums.append(_total(ssim_map(restored[..., wide, wide], clean_wide), mask_BSS))
        if self._sums_SI is None:
            self._sums_SI = torch.zeros(len(SUMS), len(self.names), dtype=torch.float64, device=degraded.device)
        self._sums_SI.index_add_(1, batch["image"], torch.stack(sums))
        if len(self._candidates) < NUM_CANDIDATES:
            shown = torch.stack([each[0, :, inner, inner] for each in (degraded, restored, clean)])
            place = torch.cat([batch["image"][:1], batch["valid"][0]])
            self._candidates.append((place, (shown * 255).round().byte()))

    def state(self) -> tuple[Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Returns the sums of each image, and tiles for pictures."""
        return self._sums_SI, self._candidates

    def merge(self, states: Sequence[tuple[Tensor | None, list[tuple[Tensor, Tensor]]]]) -> None:
        """Adds the sums of all ranks, and collects the tiles in the order of their batches."""
        sums = [each for each, _ in states if each is not None]
        self._sums_SI = torch.stack(sums).sum(0) if sums else None
        in_turn = itertools.zip_longest(*(candidates for _, candidates in states))
        found = [each for batches in in_turn for each in batches if each is not None]
        self._candidates = found[:NUM_CANDIDATES]

    def compute(self) -> dict[str, float]:
        """Returns means over the images since `reset`; NaN without images."""
        figures = self.per_image()
        names = ("psnr", "ssim", "psnr_degraded")
        return {
            name: float(np.mean([row[name] for row in figures.values()])) if figures else math.nan for name in names
        }

    def per_image(self) -> dict[str, dict[str, float]]:
        """Returns the metrics of each image by its name, with one transfer from the device."""
        if self._sums_SI is None:
            return {}
        found = {}
        for name, values in zip(self.names, self._sums_SI.T.cpu().tolist(), strict=True):
            pixels, error, error_degraded, ssim = values
            if pixels:
                found[name] = {
                    "psnr": psnr_of(error / pixels),
                    "ssim": ssim / pixels,
                    "psnr_degraded": psnr_of(error_degraded / pixels),
                }
        return found

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes ``per_image.csv``, a row per image, and PNGs of some tiles: degraded, restored and clean in a row."""
        figures = self.per_image()
        if not figures:
            return {}
        path = folder / "per_image.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["image", *next(iter(figures.values()))])
            writer.writerows([name, *row.values()] for name, row in figures.items())
        return {path.stem: path} | self._pictures(folder)

    def _pictures(self, folder: Path) -> dict[str, Path]:
        found: dict[int, Path] = {}
        for place, shown in self._candidates:
            image, _, bottom, _, right = place.tolist()
            if image not in found and len(found) < NUM_PICTURES:
                cut = shown[:, :, : bottom - self.halo, : right - self.halo].cpu()
                found[image] = folder / f"restored_{len(found)}.png"
                Image.fromarray(torch.cat(list(cut), 2).permute(1, 2, 0).contiguous().numpy()).save(found[image])
        return {path.stem: path for path in found.values()}


def psnr_of(mean_squared_error: float) -> float:
    """Returns decibels for values in 0..1; 100 for equal images, so that means stay finite."""
    return -10 * math.log10(max(mean_squared_error, 1e-10))


def ssim_map(one_BCHW: Tensor, other_BCHW: Tensor) -> Tensor:
    """Returns the SSIM of each colour around each pixel with a whole window, [B, C, H - 10, W - 10]."""
    values = torch.stack([one_BCHW, other_BCHW, one_BCHW.square(), other_BCHW.square(), one_BCHW * other_BCHW])
    mean_1, mean_2, square_1, square_2, product = _windowed(values)
    floor_1, floor_2 = SSIM_FLOORS
    # float32 is enough: a difference of means of squares has an error of 1e-7, against a constant of 9e-4.
    variances = (square_1 - mean_1.square()) + (square_2 - mean_2.square())
    covariance = product - mean_1 * mean_2
    likeness: Tensor = (2 * mean_1 * mean_2 + floor_1) * (2 * covariance + floor_2)
    likeness /= (mean_1.square() + mean_2.square() + floor_1) * (variances + floor_2)
    return likeness


def _windowed(values_VBCHW: Tensor) -> Tensor:
    """Returns means under each whole window.

    Computed as sums of shifted images: convolutions and matrix products may be TF32 on a GPU, too coarse for variances.
    """
    weight_K = gaussian_window(WINDOW_REACH, WINDOW_SIGMA).tolist()
    for dim in (-2, -1):
        size = values_VBCHW.shape[dim] - len(weight_K) + 1
        means = values_VBCHW.narrow(dim, 0, size) * weight_K[0]
        for place, weight in enumerate(weight_K[1:], 1):
            means.add_(values_VBCHW.narrow(dim, place, size), alpha=weight)
        values_VBCHW = means
    return values_VBCHW


def _cores(valid_B4: Tensor, side: int) -> Tensor:
    """Returns True for the pixels of a tile's core, [B, T, T]."""
    place_T = torch.arange(side, device=valid_B4.device)
    top, bottom, left, right = (each[:, None] for each in valid_B4.unbind(1))
    rows_BT, columns_BT = (place_T >= top) & (place_T < bottom), (place_T >= left) & (place_T < right)
    return rows_BT[:, :, None] & columns_BT[:, None, :]


def _total(values_BCSS: Tensor, mask_BSS: Tensor) -> Tensor:
    """Returns sums over colours and the pixels of the mask, float64 [B]."""
    total_B: Tensor = torch.where(mask_BSS, values_BCSS.sum(1), 0).flatten(1).double().sum(1)
    return total_B

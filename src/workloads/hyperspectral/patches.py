"""Cuts the patches around pixels, a whole batch with one lookup.

Shapes: B pixels, P side of a patch, C channels: bands or components; N pixels of a split.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property, partial

import torch
from torch import Tensor

from wellfed import FeatureModeName, Features, FeatureSource, SampleRng
from workloads.hyperspectral.bands import BandScaling, PrincipalComponents
from workloads.hyperspectral.padded_cube import PaddedCube, cut_patches

NO_LABEL = -1
_LINES = 4
"""Number of lines of the cube converted to components at a time."""


class PatchStore:
    """A source of patches: the padded cube itself, or its padded principal components.

    Args:
        components: None = the bands themselves.
    """

    def __init__(self, cube: PaddedCube, components: PrincipalComponents | None) -> None:
        self.cube, self.components = cube, components
        self.side = 2 * cube.radius + 1

    def raw(self, place_B: Tensor) -> Tensor:
        """Reads patches [B, P, P, C] from the file, and computes their components."""
        rows = cut_patches(self.cube.values, place_B, self.side)
        return rows if self.components is None else self.components(rows)

    def held(self, place_B: Tensor) -> Tensor:
        """Cuts the patches from host memory; equal to `raw`."""
        return cut_patches(self.in_memory, place_B, self.side)

    @cached_property
    def in_memory(self) -> Tensor:
        """The cube or its components in host memory, [H + P - 1, W + P - 1, C]: bands in the cube's type, components in
        float32."""
        if self.components is None:
            return self.cube.read()
        height, width, _ = self.cube.values.shape
        held = torch.empty(height, width, self.components.directions.shape[1])
        for start in range(0, height, _LINES):
            lines = slice(start, start + _LINES)
            held[lines] = self.components(self.cube.opened()[lines])  # a new mapping releases the pages that were read
        return held

    @property
    def bytes(self) -> int:
        """Bytes of `in_memory`."""
        height, width, bands = self.cube.values.shape
        if self.components is None:
            return height * width * bands * self.cube.values.element_size()
        return height * width * self.components.directions.shape[1] * 4

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "in_memory"}


def patch_features(store: PatchStore) -> Features:
    """Returns the features: row i is the patch whose upper left corner is pixel i of the padded cube."""
    height, width, _ = store.cube.values.shape
    return Features(
        num_rows=(height - store.side) * width + width - store.side + 1,
        bytes=store.bytes,
        rows=store.raw,
        store=lambda: store.in_memory,
        cut=partial(cut_patches, side=store.side),
    )


class PatchData:
    """Samples for each of the pixels ``place_N``.

    Args:
        label_N: class of each pixel; `NO_LABEL` for pixels that are only drawn on the map.
        scaling: scaling of the bands; None if the store holds components.
        is_mirrored: whether to mirror patches at random, as in training.
        passes: draws of each pixel per epoch.
    """

    def __init__(
        self,
        store: PatchStore,
        place_N: Tensor,
        label_N: Tensor,
        *,
        scaling: BandScaling | None,
        is_mirrored: bool,
        passes: int = 1,
    ) -> None:
        self.place_N, self.label_N = place_N.to(torch.int64), label_N.to(torch.int64)
        self._store, self._scaling, self._is_mirrored, self._passes = store, scaling, is_mirrored, passes
        self._read: Callable[[Tensor], Tensor] | None = store.raw
        """Function that returns the patches for `fetch`; None = `on_device` looks them up."""

    def __len__(self) -> int:
        return self._passes * len(self.place_N)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns one sample, equal to a row of `fetch`."""
        return {name: values.squeeze(0) for name, values in self.fetch(torch.tensor([range(len(self))[index]])).items()}

    def fetch(self, indices: Tensor, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns ``index``, ``place`` and ``label``, int64 [B], and ``rows`` [B, P, P, C] unless the mode is
        ``cache``. ``rng`` is unused."""
        pixel_B = indices % len(self.place_N)
        place_B = self.place_N.index_select(0, pixel_B)
        batch = {"index": indices, "place": place_B, "label": self.label_N.index_select(0, pixel_B)}
        return batch if self._read is None else batch | {"rows": self._read(place_B)}

    def on_device(
        self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource | None = None
    ) -> dict[str, Tensor]:
        """Returns ``patch`` float32 [B, C, P, P], ``label`` and ``place``. Training patches are mirrored left to right,
        upside down or along the diagonal, by (seed, epoch, index)."""
        rows = batch.get("rows")
        if rows is None:
            if features is None:
                raise ValueError("A batch of mode cache holds no patches: on_device wants the features.")
            rows = features.rows(batch["place"])
        patch = (rows if self._scaling is None else self._scaling(rows)).permute(0, 3, 1, 2)
        if self._is_mirrored:
            patch = mirrored(patch, rng.bits_at(batch["index"]))
        return {"patch": patch, "label": batch["label"], "place": batch["place"]}

    def for_features(self, mode: FeatureModeName) -> PatchData:
        """Returns the same samples, with batches for that mode."""
        other = copy(self)
        other._read = None if mode == "cache" else self._store.raw if mode == "dynamic" else self._store.held
        return other


class EvaluatedPatches(PatchData):
    """Patches of a split, of which some are drawn on the map alone; training patches all have a label."""

    def weight(self, batch: dict[str, Tensor]) -> int:
        """Returns the number of labelled pixels, over which the loss and its metrics are means."""
        return int((batch["label"] != NO_LABEL).sum())


def mirrored(patch_BCPP: Tensor, way_B: Tensor) -> Tensor:
    """Turns or mirrors each patch in one of eight ways, by the lowest three bits of ``way_B``."""
    is_turned, is_flipped, is_upside_down = ((way_B >> bit & 1).bool()[:, None, None, None] for bit in range(3))
    patch_BCPP = torch.where(is_flipped, patch_BCPP.flip(3), patch_BCPP)
    patch_BCPP = torch.where(is_upside_down, patch_BCPP.flip(2), patch_BCPP)
    return torch.where(is_turned, patch_BCPP.transpose(2, 3), patch_BCPP)

"""Stores a cube with a mirrored margin in one mapped file, so that a patch around any pixel is a view.

Shapes: H height, W width, C bands, R radius of a patch, P = 2 R + 1 its side, B pixels.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellfed import DataError
from workloads.hyperspectral.scene_files import RawScene

CUBE_FILE, LABELS_FILE, ABOUT_FILE = "cube.bin", "labels.npy", "scene.json"
KEPT_TYPES = {"uint8": "uint8", "int16": "int16", "uint16": "int16", "bool": "uint8", "int8": "int16"}
"""Type in the file -> type in memory; all others become float32. torch lacks most uint16 operations, so uint16 is
stored minus 2**15, which band scaling removes."""


class PaddedCube:
    """A cube [H + 2 R, W + 2 R, C] in a file that is mapped into memory.

    Sent to another process, it maps the file again; no content is sent.
    """

    def __init__(self, file: Path, shape: tuple[int, int, int], radius: int, dtype: str) -> None:
        self.file, self.shape, self.radius, self.dtype = file, shape, radius, dtype

    @cached_property
    def values(self) -> Tensor:
        """All values, mapped into memory, read-only."""
        return self.opened()

    def opened(self) -> Tensor:
        """Returns all values, mapped again; pages that were read leave memory with the tensor."""
        # Copy-on-write, since torch needs a writable tensor; unmodified pages stay shared with the file.
        return torch.from_numpy(np.memmap(self.file, self.dtype, mode="c", shape=self._padded_shape))

    def read(self) -> Tensor:
        """Returns a copy of all values in RAM."""
        return torch.from_numpy(np.fromfile(self.file, self.dtype).reshape(self._padded_shape))

    @property
    def _padded_shape(self) -> tuple[int, int, int]:
        height, width, bands = self.shape
        return height + 2 * self.radius, width + 2 * self.radius, bands

    def place_of(self, row_B: Tensor, column_B: Tensor) -> Tensor:
        """Returns the positions of the patches around pixels [B], for `cut_patches`."""
        return row_B * (self.shape[1] + 2 * self.radius) + column_B

    def pixels(self, row_B: Tensor, column_B: Tensor) -> Tensor:
        """Returns the spectra [B, C] of pixels."""
        return self.opened()[row_B + self.radius, column_B + self.radius]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "values"}


def cut_patches(padded: Tensor, place_B: Tensor, side: int) -> Tensor:
    """Returns patches [B, P, P, C] with upper left corners at pixels ``place_B`` of the padded cube, counted by line.
    Only these patches are copied."""
    height, width, bands = padded.shape
    num_places = (height - side) * width + width - side + 1
    views = padded.as_strided((num_places, side, side, bands), (bands, width * bands, bands, 1))
    return views.index_select(0, place_B)


def write_scene(folder: Path, scene: RawScene, radius: int, source: str) -> None:
    """Writes the files for `read_cube`.

    Args:
        source: name of the cube, for messages.

    Raises:
        DataError: a value is not finite.
    """
    height, width, bands = scene.cube.shape
    dtype = KEPT_TYPES.get(scene.cube.dtype.name, "float32")
    column = np.pad(np.arange(width), radius, mode="reflect")
    with (folder / CUBE_FILE).open("wb") as file:
        for row in np.pad(np.arange(height), radius, mode="reflect"):
            file.write(_line(scene, int(row), source).astype(dtype)[column].tobytes())
    np.save(folder / LABELS_FILE, scene.labels)
    about = {"shape": [height, width, bands], "radius": radius, "dtype": dtype, "notes": scene.notes}
    (folder / ABOUT_FILE).write_text(json.dumps(about), encoding="utf-8")


def _line(scene: RawScene, row: int, source: str) -> NDArray[Any]:
    """Returns one line of the cube [W, C]."""
    line_WC = np.ascontiguousarray(scene.cube[row])
    if line_WC.dtype.kind == "u" and line_WC.dtype.itemsize == 2:
        return line_WC.astype(np.int32) - 2**15
    if line_WC.dtype.kind != "f":
        return line_WC
    with np.errstate(over="ignore"):
        kept_WC = line_WC.astype(np.float32)
    if not np.isfinite(kept_WC).all():
        column, band = np.argwhere(~np.isfinite(kept_WC))[0]
        raise DataError(
            f"{source}: {line_WC[column, band]} at row {row}, column {column}, band {band} is no finite float32. "
            "Take such bands or lines out, or write numpy.save('X.npy', numpy.nan_to_num(cube))."
        )
    return kept_WC


def read_cube(folder: Path) -> tuple[PaddedCube, NDArray[np.int32], tuple[str, ...]]:
    """Returns cube, labels [H, W] and notes from a folder written by `write_scene`."""
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    height, width, bands = about["shape"]
    cube = PaddedCube(folder / CUBE_FILE, (height, width, bands), about["radius"], about["dtype"])
    return cube, np.load(folder / LABELS_FILE), tuple(about["notes"])

from pathlib import Path

import numpy as np
import pytest
import torch

from wellfed import DataError
from workloads.hyperspectral.padded_cube import PaddedCube, cut_patches, read_cube, write_scene
from workloads.hyperspectral.scene_files import RawScene


def written(folder: Path, cube: np.ndarray, radius: int = 2) -> PaddedCube:
    write_scene(folder, RawScene(cube, np.zeros(cube.shape[:2], np.int32), ("a note",)), radius, "a.npy")
    found, labels, notes = read_cube(folder)
    assert labels.shape == cube.shape[:2]
    assert notes == ("a note",)
    return found


def test_a_patch_is_what_lies_around_a_pixel(tmp_path: Path, cube):
    found = written(tmp_path, cube)
    whole = np.pad(cube, ((2, 2), (2, 2), (0, 0)), mode="reflect")
    row, column = torch.tensor([0, 5, 11, 0]), torch.tensor([0, 3, 9, 9])
    patches = cut_patches(found.values, found.place_of(row, column), 5)
    for patch, y, x in zip(patches, row, column, strict=True):
        assert (patch.numpy() == whole[y : y + 5, x : x + 5]).all()
        assert (patch[2, 2].numpy() == cube[y, x]).all()
    assert (found.pixels(row, column).numpy() == cube[row, column]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_have_a_place(tmp_path: Path, cube, value: float):
    cube = cube.astype(np.float64)
    cube[7, 3, 5] = value
    with pytest.raises(DataError, match=r"a\.npy: .* at row 7, column 3, band 5 is no finite float32"):
        written(tmp_path, cube)

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


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 7, 3), (2, 2, 1)])
def test_a_margin_may_be_larger_than_the_scene(tmp_path: Path, shape: tuple[int, int, int]):
    found = written(tmp_path, np.arange(np.prod(shape), dtype=np.float32).reshape(shape), radius=3)
    last = found.place_of(torch.tensor([shape[0] - 1]), torch.tensor([shape[1] - 1]))
    assert cut_patches(found.values, last, 7).shape == (1, 7, 7, shape[2])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *(("u1", "uint8"), ("i2", "int16"), ("<u2", "int16"), (">u2", "int16"), ("f8", "float32")),
        *((">f4", "float32"), ("i8", "float32"), ("?", "uint8"), ("i1", "int16")),
    ],
)
def test_numbers_are_kept_in_small_types(tmp_path: Path, given: str, kept: str):
    cube = np.random.default_rng(0).integers(0, 2, (4, 5, 3)).astype(given)
    if "u2" in given:
        cube[0, 0, 0] = 65_535
    found = written(tmp_path, cube)
    shift = 2**15 if "u2" in given else 0
    assert found.dtype == kept
    assert (found.values[2:-2, 2:-2].numpy().astype(np.int64) + shift == cube.astype(np.int64)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_have_a_place(tmp_path: Path, cube, value: float):
    cube = cube.astype(np.float64)
    cube[7, 3, 5] = value
    with pytest.raises(DataError, match=r"a\.npy: .* at row 7, column 3, band 5 is no finite float32"):
        written(tmp_path, cube)

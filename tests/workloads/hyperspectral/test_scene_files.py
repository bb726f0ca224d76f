from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from wellfed import DataError
from workloads.hyperspectral.scene_files import RawScene, find_scene, read_scene


def scene_of(path: Path) -> RawScene:
    return read_scene(find_scene(path))


def test_cube_and_ground_truth_are_found_by_name(put, cube, labels):
    scene = scene_of(put())
    assert (scene.cube == cube).all()
    assert (scene.labels == labels).all()
    assert scene.notes == ()


def test_one_mat_file_may_hold_both(tmp_path: Path, cube, labels):
    savemat(tmp_path / "both.mat", {"x": cube, "half": cube[..., :3], "y": labels.astype(float), "z": np.ones((3, 3))})
    scene = scene_of(tmp_path / "both.mat")
    assert (scene.cube == cube).all()
    assert (scene.labels == labels).all()
    assert scene.notes == ("both.mat holds 2 cubes: x, the largest, is taken.",)


def test_other_sizes_are_refused(put, cube, labels):
    with pytest.raises(DataError, match=r"field_gt\.npy: .* of 11 x 10 pixels does not fit the cube of 12 x 10 x 6"):
        scene_of(put(cube, labels[1:]))
    with pytest.raises(DataError, match=r"Turned it fits: numpy\.save\('.*/field_gt\.npy', labels\.T\)\."):
        scene_of(put(cube, labels.T))


def test_labels_that_are_no_numbers_of_classes_are_refused(put, cube, labels):
    wrong = labels.astype(float)
    wrong[3, 4] = 1.5
    with pytest.raises(DataError, match=r"field_gt\.npy: label 1\.5 at row 3, column 4 is no whole number \(1 such"):
        scene_of(put(cube, wrong))
    wrong[3, 4] = np.nan
    with pytest.raises(DataError, match="label nan at row 3, column 4"):
        scene_of(put(cube, wrong))
    with pytest.raises(DataError, match="no class numbers"):
        scene_of(put(cube, labels * 2**40))


def test_what_is_no_cube_says_what_is_there(put, tmp_path: Path, labels):
    with pytest.raises(DataError, match=r"field\.npy: no cube .* but field \(12 x 10 int64\)"):
        scene_of(put(labels, labels))
    savemat(tmp_path / "alone.mat", {"x": np.ones((3, 4, 5)), "name": "a"})
    with pytest.raises(DataError, match=r"alone\.mat: no ground truth beside it.*Put alone_gt\.mat or \.npy there"):
        scene_of(tmp_path / "alone.mat")
    savemat(tmp_path / "field_gt.mat", {"line": np.ones((1, 9)), "name": "a"})
    (tmp_path / "field_gt.npy").unlink()
    with pytest.raises(DataError, match=r"field_gt\.mat: .*does not fit"):
        scene_of(put(np.ones((3, 4, 5)), None))
    (tmp_path / "field_gt.mat").unlink()
    np.save(tmp_path / "field_gt.npy", np.ones(9))
    with pytest.raises(DataError, match=r"field_gt\.npy: no map of labels \(two axes\) in it"):
        scene_of(tmp_path / "field.npy")

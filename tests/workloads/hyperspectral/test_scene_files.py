import os
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


@pytest.mark.parametrize("beside", ["Indian_pines_gt.mat", "Indian_pines_corrected_GT.npy", "indian_gt.npy", "gt.npy"])
def test_a_longer_name_finds_the_ground_truth_of_a_shorter_one(tmp_path: Path, cube, labels, beside: str):
    savemat(tmp_path / "Indian_pines_corrected.mat", {"anything": cube})
    path = tmp_path / beside
    savemat(path, {"truth": labels}) if path.suffix == ".mat" else np.save(path, labels)
    for place in (tmp_path / "Indian_pines_corrected.mat", tmp_path):
        scene = scene_of(place)
        assert (scene.cube == cube).all()
        assert (scene.labels == labels).all()


def test_one_mat_file_may_hold_both(tmp_path: Path, cube, labels):
    savemat(tmp_path / "both.mat", {"x": cube, "half": cube[..., :3], "y": labels.astype(float), "z": np.ones((3, 3))})
    scene = scene_of(tmp_path / "both.mat")
    assert (scene.cube == cube).all()
    assert (scene.labels == labels).all()
    assert scene.notes == ("both.mat holds 2 cubes: x, the largest, is taken.",)


@pytest.mark.parametrize("name", ["field_gt", "labels"])
def test_masks_beside_the_labels_are_not_taken_for_them(put, tmp_path: Path, labels, name: str):
    """The name decides, then how many labels there are; heights are no labels."""
    more = {} if name == "labels" else {"instances": np.arange(labels.size).reshape(labels.shape)}
    heights = np.random.default_rng(0).normal(size=labels.shape)
    savemat(tmp_path / "field_gt.mat", {"a_mask": labels > 0, "heights": heights, name: labels} | more)
    put(labels=None)
    scene = scene_of(tmp_path / "field.npy")
    assert (scene.labels == labels).all()
    assert scene.notes == (f"field_gt.mat holds {3 + len(more)} maps that fit the cube: {name} is taken as labels.",)


@pytest.mark.parametrize("shape", [(1, 10, 6), (12, 1, 6), (12, 10, 1)])
def test_a_cube_may_be_one_line_or_one_band(put, shape: tuple[int, int, int]):
    assert scene_of(put(np.ones(shape), np.ones(shape[:2], int))).cube.shape == shape


@pytest.mark.parametrize("shape", [(0, 5, 6), (12, 10, 0)])
def test_a_cube_of_nothing_is_refused(put, shape: tuple[int, int, int]):
    with pytest.raises(DataError, match=r"field\.npy: no cube .*but field \(.* float64\)"):
        scene_of(put(np.ones(shape), np.ones(shape[:2], int)))


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1)])
def test_other_orders_of_axes_are_read_and_said(put, cube, order: tuple[int, int, int]):
    scene = scene_of(put(cube.transpose(order)))
    assert (scene.cube == cube).all()
    assert "are read as bands" in scene.notes[0]


def test_axes_of_length_1_do_not_count(put, cube, labels):
    scene = scene_of(put(cube[None], labels[..., None]))
    assert scene.cube.shape == cube.shape
    assert scene.labels.shape == labels.shape


def test_other_sizes_are_refused(put, cube, labels):
    with pytest.raises(DataError, match=r"field_gt\.npy: .* of 11 x 10 pixels does not fit the cube of 12 x 10 x 6"):
        scene_of(put(cube, labels[1:]))
    with pytest.raises(DataError, match=r"Turned it fits: numpy\.save\('.*/field_gt\.npy', labels\.T\)\."):
        scene_of(put(cube, labels.T))


def test_a_turned_map_of_matlab_gives_way_to_the_one_that_is_advised(tmp_path: Path, cube, labels):
    savemat(tmp_path / "field.mat", {"x": cube})
    savemat(tmp_path / "field_gt.mat", {"x": labels.T})
    with pytest.raises(DataError, match=r"'(.*)', labels\.T\), and remove field_gt\.mat\.") as told:
        scene_of(tmp_path / "field.mat")
    np.save(str(told.value).split("'")[1], labels)
    (tmp_path / "field_gt.mat").unlink()
    assert scene_of(tmp_path / "field.mat").labels.shape == labels.shape


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


def test_paths_that_lead_nowhere_are_refused(put, tmp_path: Path):
    with pytest.raises(DataError, match="no such file or folder"):
        find_scene(tmp_path / "none")
    with pytest.raises(DataError, match="no cube in it"):
        find_scene(tmp_path)
    with pytest.raises(DataError, match=r"Put field_gt\.npy or field_gt\.mat there"):
        find_scene(put(labels=None))
    with pytest.raises(DataError, match="is a ground truth by its name"):
        find_scene(put().with_name("field_gt.npy"))
    put(name="meadow", labels=None)
    (tmp_path / "field_gt.npy").rename(tmp_path / "labels.npy")
    with pytest.raises(DataError, match=r"holds 3 arrays, none with a ground truth .*Put X_gt\.npy or \.mat beside"):
        find_scene(tmp_path)
    put(), put(name="meadow")
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"holds 2 cubes \(field\.npy, meadow\.npy\)\. Name one"):
        find_scene(tmp_path)
    (tmp_path / "x.tif").write_bytes(b"")
    with pytest.raises(DataError, match=r"neither \.mat nor \.npy"):
        find_scene(tmp_path / "x.tif")


def test_a_named_pipe_is_no_scene(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(DataError, match=r"x\.npy is a named pipe, not a file"):
        find_scene(tmp_path / "x.npy")

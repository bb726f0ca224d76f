from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from scipy.sparse import csc_matrix

from wellfed import DataError
from workloads.hyperspectral.array_files import read_arrays


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_of_a_mat_file_are_named(tmp_path: Path, compressed: bool):
    content = {"cube": np.ones((2, 3, 4), np.uint16), "note": "text", "cell": np.array([1, "a"], dtype=object)}
    content |= {"struct": {"a": 1}, "sparse": csc_matrix(np.eye(3))}
    savemat(tmp_path / "a.mat", content, do_compression=compressed)
    arrays, others = read_arrays(tmp_path / "a.mat")
    assert {name: array.dtype for name, array in arrays.items()} == {"cube": np.uint16}
    assert others == ["note (<U4)", "cell (objects)", "struct (struct)", "sparse (csc_matrix)"]


def test_python_objects_are_not_read(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.array([1, "a"], dtype=object))
    with pytest.raises(DataError, match=r"a\.npy: holds Python objects.*numpy\.save"):
        read_arrays(tmp_path / "a.npy")


@pytest.mark.parametrize("suffix", [".npy", ".mat"])
@pytest.mark.parametrize("kept", [5, 140])
def test_what_was_cut_off_is_damaged(tmp_path: Path, suffix: str, kept: int):
    path = tmp_path / f"a{suffix}"
    values = np.random.default_rng(0).normal(size=(5, 5, 5))
    np.save(path, values) if suffix == ".npy" else savemat(path, {"a": values})
    path.write_bytes(path.read_bytes()[:kept])
    if suffix == ".mat" and kept == 128:
        assert read_arrays(path) == ({}, [])
        return
    with pytest.raises(DataError, match=r"a\.(npy|mat): .*(damaged|Python objects)"):
        read_arrays(path)


@pytest.mark.parametrize("offset", [0, 512])
def test_matlab_7_3_says_what_to_do(tmp_path: Path, offset: int):
    head = b"MATLAB 7.3 MAT-file".ljust(offset)[:offset]
    (tmp_path / "a.mat").write_bytes(head + b"\x89HDF\r\n\x1a\n" + bytes(600))
    with pytest.raises(DataError, match=r"MATLAB 7\.3 .*'-v7'.*h5py"):
        read_arrays(tmp_path / "a.mat")

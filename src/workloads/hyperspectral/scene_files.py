"""Finds a cube and its ground truth among files, and the order of the cube's axes.

Shapes: H height, W width, C bands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError, check_file
from wellfed.units import show_line
from workloads.hyperspectral.array_files import SUFFIXES, Array, read_arrays

LAYOUTS: dict[tuple[int, ...], str] = {
    (0, 1, 2): "bands last",
    (1, 2, 0): "bands first",
    (0, 2, 1): "bands between lines and columns",
}
"""Transposition of a cube to [H, W, C] -> name of its layout."""
MARK = "_gt"
"""Suffix of the name of a ground truth; ``gt`` alone is a name too."""


@dataclass(frozen=True)
class SceneFiles:
    """Paths of a scene."""

    cube: Path
    labels: Path | None
    """File of the labels; None = the file of the cube."""

    @property
    def paths(self) -> list[Path]:
        """One or two paths."""
        return [self.cube] if self.labels is None else [self.cube, self.labels]


@dataclass(frozen=True)
class RawScene:
    """A cube and its ground truth as read."""

    cube: Array
    """Values [H, W, C], of any type of real numbers."""
    labels: NDArray[np.int32]
    """Labels [H, W]."""
    notes: tuple[str, ...] = ()


def find_scene(path: Path) -> SceneFiles:
    """Returns the files of a scene. ``path`` names the cube, or a folder with one cube and its ground truth.

    Raises:
        DataError: there is no cube, or several.
    """
    path = path.expanduser()
    if not path.exists():
        raise DataError(f"workload.data.path={path}: no such file or folder. Name a cube: X.mat or X.npy.")
    check_file(path)
    if path.is_file():
        return _beside(path)
    files = [each for each in _entries(path) if each.suffix.lower() in SUFFIXES and each.is_file()]
    cubes = [each for each in files if not _is_ground_truth(each)]
    with_truth = [each for each in cubes if _ground_truth_of(each) is not None]
    found = with_truth or cubes
    if len(found) == 1:
        return _beside(found[0])
    if not found:
        raise DataError(f"workload.data.path={path}: no cube in it. Put X.npy or X.mat there, and X{MARK}.npy or .mat.")
    names = ", ".join(show_line(each.name) for each in found[:10])
    way_out = "Name one of them." if with_truth else f"Put X{MARK}.npy or .mat beside X.npy or .mat, and name that."
    kind = "cubes" if with_truth else "arrays, none with a ground truth"
    raise DataError(f"workload.data.path={path}: holds {len(found)} {kind} ({names}). {way_out}")


def _beside(cube: Path) -> SceneFiles:
    if cube.suffix.lower() not in SUFFIXES:
        raise DataError(f"workload.data.path={cube}: is neither .mat nor .npy. Write numpy.save('X.npy', cube).")
    if _is_ground_truth(cube):
        raise DataError(f"workload.data.path={cube}: is a ground truth by its name. Name the cube beside it.")
    labels = _ground_truth_of(cube)
    if labels is None and cube.suffix.lower() == ".npy":
        wanted = " or ".join(f"{cube.stem}{MARK}{suffix}" for suffix in reversed(SUFFIXES))
        raise DataError(f"workload.data.path={cube}: no ground truth beside it. Put {wanted} there.")
    return SceneFiles(cube, labels)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} can't be listed: {error.strerror or error}. Check its rights.") from error


def _is_ground_truth(path: Path) -> bool:
    return f"_{path.stem.lower()}".endswith(MARK)


def _ground_truth_of(cube: Path) -> Path | None:
    """Returns the ground truth of ``A_b.mat``: ``A_b_gt``, ``A_gt`` or ``gt``, the cube's own file type first; None
    without one."""
    beside = {each.name.lower(): each for each in _entries(cube.parent)}
    own = cube.suffix.lower()
    words = cube.stem.lower().split("_")
    for count in range(len(words), -1, -1):
        for suffix in (own, *(each for each in SUFFIXES if each != own)):
            found = beside.get("_".join([*words[:count], MARK[1:]]) + suffix)
            if found is not None:
                return found
    return None


def read_scene(files: SceneFiles) -> RawScene:
    """Reads cube and ground truth, with the cube's axes in order.

    Raises:
        DataError: the content is no scene; see also `array_files.read_arrays`.
    """
    arrays, others = read_arrays(files.cube)
    cube_name, cube = _cube_of(files.cube, arrays, others)
    notes = list[str]()
    rest = [name for name, array in arrays.items() if name != cube_name and np.squeeze(array).ndim == 3]
    if rest:
        notes.append(f"{files.cube.name} holds {len(rest) + 1} cubes: {cube_name}, the largest, is taken.")
    if files.labels is None:
        del arrays[cube_name]
        source = files.cube
    else:
        source = files.labels
        arrays, others = read_arrays(source)
    name, layout, num_maps = _labels_of(source, arrays, others, cube.shape, is_own_file=files.labels is not None)
    if num_maps > 1:
        notes.append(f"{source.name} holds {num_maps} maps that fit the cube: {show_line(name)} is taken as labels.")
    if layout != (0, 1, 2):
        notes.append(f"The axes of {files.cube.name} ({_sizes(cube.shape)}) are read as {LAYOUTS[layout]}.")
    return RawScene(cube.transpose(layout), _whole_numbers(source, _map(arrays[name])), tuple(notes))


def _cube_of(path: Path, arrays: dict[str, Array], others: list[str]) -> tuple[str, Array]:
    """Returns name and array of the largest array with three axes, ignoring axes of length 1."""
    cubes = {name: array if array.ndim == 3 else np.squeeze(array) for name, array in arrays.items()}
    found = {name: cube for name, cube in cubes.items() if cube.ndim == 3 and cube.size}
    if not found:
        raise DataError(f"{path}: no cube (three axes: height, width, bands) in it, but {_content(arrays, others)}.")
    name = max(found, key=lambda each: found[each].size)
    return name, found[name]


def _map(array: Array) -> Array:
    """Returns an array of two axes, without axes of length 1."""
    return array if array.ndim == 2 else np.squeeze(array)


def _labels_of(
    path: Path, arrays: dict[str, Array], others: list[str], cube_shape: tuple[int, ...], *, is_own_file: bool
) -> tuple[str, tuple[int, ...], int]:
    """Returns the name of the label array, the matching layout of the cube, and the number of matching arrays.

    Names that end in ``gt`` come first, then the array with most labels, since others may be masks.
    """
    maps = {name: _map(array) for name, array in arrays.items() if _map(array).ndim == 2}
    fitting = dict[str, tuple[int, ...]]()
    for (name, array), layout in itertools.product(maps.items(), LAYOUTS):
        if array.shape == tuple(cube_shape[axis] for axis in layout[:2]):
            fitting.setdefault(name, layout)
    if fitting:
        name = max(fitting, key=lambda each: (each.lower().endswith("gt"), _num_labels(maps[each])))
        return name, fitting[name], len(fitting)
    if not is_own_file:
        raise DataError(
            f"{path}: no ground truth beside it, and in it no map of labels that fits a cube of {_sizes(cube_shape)}, "
            f"but {_content(arrays, others)}. Put {path.stem}{MARK}.mat or .npy there."
        )
    if not maps:
        raise DataError(f"{path}: no map of labels (two axes) in it, but {_content(arrays, others)}.")
    array = next(iter(maps.values()))
    turned = any(array.shape[::-1] == tuple(cube_shape[axis] for axis in layout[:2]) for layout in LAYOUTS)
    replaced = f", and remove {path.name}" if path.suffix.lower() != ".npy" else ""
    way_out = (
        f"Turned it fits: numpy.save('{path.with_suffix('.npy')}', labels.T){replaced}."
        if turned
        else "Both must be of the same scene, cut alike."
    )
    raise DataError(
        f"{path}: a ground truth of {_sizes(array.shape)} pixels does not fit the cube of {_sizes(cube_shape)}. "
        f"{way_out}"
    )


def _num_labels(array: Array) -> int:
    """Returns the number of different values; 0 if one is not a whole number."""
    values = np.unique(array)
    return len(values) if (np.isfinite(values) & (values == np.round(values))).all() else 0


def _whole_numbers(path: Path, labels: Array) -> NDArray[np.int32]:
    if labels.dtype.kind == "f":
        wrong = ~np.isfinite(labels) | (labels != np.round(labels))
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise DataError(
                f"{path}: label {labels[row, column]} at row {row}, column {column} is no whole number "
                f"({int(wrong.sum())} such pixels). Labels are class numbers, 0 for background."
            )
    low, high = int(labels.min()), int(labels.max())
    if low < -(2**31) or high >= 2**31:
        raise DataError(f"{path}: labels from {low} to {high} are no class numbers. Number the classes from 1.")
    return np.ascontiguousarray(labels, dtype=np.int32)


def _content(arrays: dict[str, Array], others: list[str]) -> str:
    found = [f"{show_line(name)} ({_sizes(array.shape)} {array.dtype})" for name, array in arrays.items()]
    return ", ".join([*found, *others]) or "nothing"


def _sizes(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))

"""Builds the data of a hyperspectral scene: patches for training, pixels for validation and test, and the whole map."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from wellfed import ConfigError, DataError, Datasets, prepared
from wellfed.units import counted, show_bytes, show_count, show_percent
from workloads.hyperspectral.bands import (
    USUAL_COMPONENTS,
    PrincipalComponents,
    chosen_components,
    fit_components,
    fit_scaling,
)
from workloads.hyperspectral.evaluation import ClassScores
from workloads.hyperspectral.padded_cube import PaddedCube, read_cube, write_scene
from workloads.hyperspectral.patches import NO_LABEL, EvaluatedPatches, PatchData, PatchStore, patch_features
from workloads.hyperspectral.pixel_split import (
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    SplitName,
    keep_apart,
    split_blocks,
    split_random,
)
from workloads.hyperspectral.scene_files import RawScene, find_scene, read_scene
from workloads.hyperspectral.synthetic import field_scene

VERSION = 2
"""Version of the prepared scene."""
EPOCH_PATCHES = 1500
"""Approximate number of patches in a derived epoch; 40 epochs then have 1,900 steps of 32."""
EVAL_PIXELS = 1024
"""Pixels in a batch of validation."""


def datasets(
    path: str | None = None,
    *,
    patch_size: int = 9,
    num_components: int | None = None,
    passes: int | None = None,
    split: SplitName = "blocks",
    block_size: int = 16,
    train_frac: float = 0.2,
    val_frac: float = 0.1,
    background: int = 0,
    whole_map: bool = True,
    size: int = 96,
    num_bands: int = 100,
    num_classes: int = 9,
    seed: int = 0,
    cache_dir: str = ".cache",
) -> Datasets:
    """Returns patches around labelled pixels for training, validation and test.

    Args:
        path: cube ``X.npy`` or ``X.mat`` with ``X_gt.npy`` or ``.mat`` next to it, or a folder with one; None = the
            embedded scene.
        patch_size: side in pixels, odd.
        num_components: principal components, fitted on training pixels; None = 15, or the possible maximum; 0 = the
            bands themselves.
        passes: draws of each training pixel per epoch; None = about 1,500 patches in all.
        split: ``blocks`` of ground, or ``random`` pixels, whose neighbours training then sees.
        block_size: side of a block in pixels.
        train_frac: approximate share of each class for training; ``val_frac`` for validation. The rest is for the test.
        background: label of unlabelled pixels.
        whole_map: whether the test classifies all pixels of the scene for the map; figures use test pixels alone.
        size: side of the embedded scene in pixels, of ``num_bands`` and ``num_classes``.
        seed: seed of the split and of the embedded scene; the training has its own.
        cache_dir: folder for the padded cube.

    Raises:
        DataError: the scene is missing, damaged, does not fit its ground truth, or has too few pixels.
        ConfigError: an argument is out of range.
    """
    has_middle = 1 <= patch_size <= 63 and patch_size % 2 == 1
    has_passes = passes is None or 1 <= passes <= 10_000
    leaves_some = not (0.01 <= train_frac <= 0.9 and 0 <= val_frac <= 0.5) or train_frac + val_frac <= 0.95
    ConfigError.check(
        "workload.data",
        ("patch_size", patch_size, has_middle, "is no odd number in 1..63", "patch_size=9 or so"),
        (
            *("num_components", num_components, num_components is None or num_components >= 0, "is negative"),
            "num_components=15, null to let the scene decide, or 0 for the bands as they are",
        ),
        ("passes", passes, has_passes, "is not in 1..10,000", "passes=1, or null for what the scene's size asks for"),
        ("split", split, split in SPLITS, f"is none of {', '.join(SPLITS)}", "split=blocks"),
        ("block_size", block_size, block_size >= 2, "is below 2", "block_size=16 or so"),
        ("train_frac", train_frac, 0.01 <= train_frac <= 0.9, "is not in 0.01..0.9", "train_frac=0.2 or so"),
        ("val_frac", val_frac, 0 <= val_frac <= 0.5, "is not in 0..0.5", "val_frac=0.1, or 0 for none"),
        ("val_frac", val_frac, leaves_some, f"and train_frac={train_frac} leave nothing to test on", "val_frac=0.1"),
    )
    radius = patch_size // 2
    if path is None:
        source = "the embedded scene"

        def draw(folder: Path) -> None:
            write_scene(folder, RawScene(*field_scene(size, num_bands, num_classes, seed)), radius, source)

        settings = {"version": VERSION, "radius": radius, "embedded": [size, num_bands, num_classes, seed]}
        folder = prepared(cache_dir, "scenes", (), settings, draw)
    else:
        files = find_scene(Path(path))
        source = str(files.paths[-1])

        def write(folder: Path) -> None:
            write_scene(folder, read_scene(files), radius, str(files.cube))

        folder = prepared(cache_dir, "scenes", files.paths, {"version": VERSION, "radius": radius}, write)
    cube, labels_HW, notes = read_cube(folder)
    class_HW, names, class_notes = _classes(labels_HW, background, source)
    shares = (train_frac, val_frac, 1 - train_frac - val_frac)
    part_HW, split_notes = _split(class_HW, names, split, shares, block_size, radius, seed)
    said = (*notes, *class_notes, *split_notes)
    return _wrapped(cube, class_HW, part_HW, names, num_components, passes, whole_map, said)


def _wrapped(
    cube: PaddedCube,
    class_HW: NDArray[np.int64],
    part_HW: NDArray[np.int64],
    names: list[str],
    num_components: int | None,
    passes: int | None,
    whole_map: bool,
    notes: tuple[str, ...],
) -> Datasets:
    spectra = cube.pixels(*map(torch.from_numpy, np.nonzero(part_HW == TRAIN)))
    count = chosen_components(spectra) if num_components is None else num_components
    components = fit_components(spectra, count) if count else None
    derived = dict[str, tuple[int, str]]()
    if num_components is None and components is not None:
        derived["workload.data.num_components"] = count, _why(count, spectra, components)
    if passes is None:
        passes = max(1, math.ceil(EPOCH_PATCHES / len(spectra) - 0.5))
        because = (
            f"with {counted(len(spectra), 'training pixel')} an epoch has {show_count(passes * len(spectra))} patches"
        )
        derived["workload.data.passes"] = passes, because
    scaling = fit_scaling(spectra) if components is None else None
    store = PatchStore(cube, components)

    def part(number: int) -> PatchData | None:
        is_asked_HW = np.ones_like(part_HW, dtype=bool) if number == TEST and whole_map else part_HW == number
        row, column = map(torch.from_numpy, np.nonzero(is_asked_HW))
        label = torch.from_numpy(np.where(part_HW == number, class_HW, NO_LABEL)[is_asked_HW])
        if not len(row):
            return None
        place = cube.place_of(row, column)
        if number == TRAIN:
            return PatchData(store, place, label, scaling=scaling, is_mirrored=True, passes=passes)
        kind = EvaluatedPatches if bool((label == NO_LABEL).any()) else PatchData  # weights wait for the device
        return kind(store, place, label, scaling=scaling, is_mirrored=False)

    height, width, bands = cube.shape
    counts = [show_count(int((part_HW == number).sum())) for number in (TRAIN, VAL, TEST)]
    said = (
        f"{height} x {width} pixels, {counted(bands, 'band')} ({show_bytes(cube.values.nbytes)} with its margin), "
        f"{len(names)} classes; {counts[0]} pixels to train on, {counts[1]} to validate on, {counts[2]} to test on"
    )
    if components is not None:
        said += f"; {_held(count, components)}"
    train = part(TRAIN)
    assert train is not None
    return Datasets(
        train=train,
        val=part(VAL),
        test=part(TEST),
        eval_batch_size=EVAL_PIXELS,
        features=patch_features(store),
        evaluation=ClassScores(names, class_HW, cube.radius),
        model_args={"num_channels": count or bands, "num_classes": len(names)},
        derived=derived,
        notes=(said, *notes),
    )


def _why(count: int, spectra_NC: torch.Tensor, components: PrincipalComponents) -> str:
    num_pixels, num_bands = spectra_NC.shape
    if count == num_bands:
        return f"as many as the scene has bands; {USUAL_COMPONENTS} where it has more"
    if count < USUAL_COMPONENTS:
        return f"no more follow from {counted(num_pixels, 'training pixel')}"
    return f"the usual number; {_held(count, components)}"


def _held(count: int, components: PrincipalComponents) -> str:
    verb = "holds" if count == 1 else "hold"
    return f"{counted(count, 'component')} {verb} {show_percent(components.kept_frac)} of the training pixels' variance"


def _classes(
    labels_HW: NDArray[np.int32], background: int, source: str
) -> tuple[NDArray[np.int64], list[str], tuple[str, ...]]:
    """Returns classes from 0 (-1 = background), their names, and notes on classes with too few pixels."""
    found, count = np.unique(labels_HW[labels_HW != background], return_counts=True)
    single = found[count == 1]
    kept = found[count > 1]
    if len(kept) < 2:
        held = ", ".join(f"{label} ({number})" for label, number in zip(found, count, strict=True)) or "none"
        raise DataError(
            f"{source}: classes to tell apart need two pixels each, and there must be two of them. Labels beside the "
            f"background {background}, with their pixels: {held}. workload.data.background=<label> names another one."
        )
    notes = [
        f"Label {label} of {source} is taken for a class, of {counted(int(number), 'pixel')}. If it says that there is "
        f"no label: workload.data.background={label}."
        for label, number in zip(found, count, strict=True)
        if label < 0
    ]
    for label in single:
        row, column = np.argwhere(labels_HW == label)[0]
        notes.append(
            f"Class {label} of {source} has one pixel, at row {row}, column {column}: there is none to test on, so it "
            "is left out. Label more of it, or give it the background's label."
        )
    place = np.searchsorted(kept, labels_HW).clip(max=len(kept) - 1)
    class_HW = np.where(kept[place] == labels_HW, place, -1)
    return class_HW, [str(label) for label in kept], tuple(notes)


def _split(
    class_HW: NDArray[np.int64],
    names: list[str],
    split: SplitName,
    shares: tuple[float, float, float],
    block_size: int,
    radius: int,
    seed: int,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Returns the part of each pixel, and notes on the split."""
    rng = np.random.default_rng([seed, 20])
    if split == "random":
        part_HW = split_random(class_HW, shares, rng)
        note = "Random pixels: most test pixels lie in a patch that was trained on. split=blocks keeps them apart."
        return part_HW, (note,)
    part_HW, num_left_out, too_close = keep_apart(class_HW, split_blocks(class_HW, shares, block_size, rng), radius)
    notes = []
    if num_left_out:
        notes.append(f"{counted(num_left_out, 'pixel')} beside training pixels are left out of validation and test")
    for part, name in ((VAL, "validation"), (TEST, "test")):
        if too_close[part]:
            classes = "class" if len(too_close[part]) == 1 else "classes"
            listed = ", ".join(names[each] for each in too_close[part])
            notes.append(
                f"Of {classes} {listed} all {name} pixels lie in patches of training pixels; they are kept, and their "
                "figures are too good. A smaller patch_size may help."
            )
    return part_HW, tuple(notes)

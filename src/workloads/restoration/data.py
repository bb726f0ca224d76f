"""Builds the data of restoration from a folder or the embedded set: crops for training, tiles for evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wellfed import ConfigError, DataError, Datasets, prepared
from wellfed.units import counted, show_bytes, show_count
from workloads.restoration import degradations
from workloads.restoration.bad_files import BadFiles
from workloads.restoration.crops import CropData, crop_features
from workloads.restoration.decoding import MAX_PIXELS, Decoded
from workloads.restoration.degradations import Degradation
from workloads.restoration.evaluation import ImageQuality
from workloads.restoration.image_files import find_images
from workloads.restoration.images import (
    PIXELS_FILE,
    ImageIndex,
    ImagePixels,
    StoredImage,
    decode_into,
    read_index,
    write_images,
)
from workloads.restoration.splits import split_images
from workloads.restoration.synthetic import dead_leaves
from workloads.restoration.tiles import CORE, HALO, TileData

VERSION = 1
"""Version of the prepared images."""
SIDE = 128
"""Side of the embedded images in pixels. For larger crops, images are half as large again as the crop."""
EVAL_TILES = 8
"""Number of tiles per batch of validation: about the pixels of 70 default crops, without gradients."""
SMALLEST_PATCH, USUAL_PATCH = 16, 64
"""Sides of crops in pixels: the allowed minimum, and the derived side for images that are large enough."""
LEFT_OUT_FRAC = 0.1
"""Maximum share of images that a derived patch size may exclude as too small."""
FULL_EPOCH = 1536
"""Minimum number of crops in a derived epoch: 96 steps, as with the embedded set. More images give one crop each."""
USUAL_CROPS = 8
"""Crops of each embedded image per epoch."""
VAL_TILES = 128
"""Maximum number of tiles of a derived validation, to keep it shorter than an epoch."""
MANY = 200
"""Number of images above which decoding takes seconds or minutes and is announced."""
NUMBERS: Mapping[str, tuple[range, int | None]] = {
    "patch_size": (range(SMALLEST_PATCH, 1025), None),
    "patches_per_image": (range(1, 1_000_001), None),
    "max_bad_files": (range(1_000_001), 10),
    "num_images": (range(3, 100_001), 240),
    "val_tiles": (range(1, 1_000_001), None),
    "halo": (range(8, CORE + 1, 2), HALO),
    "seed": (range(2**63), 0),
}
"""Range and default of whole-number arguments."""


def datasets(
    path: str | None = None,
    *,
    task: str = "denoise",
    sigma: float | None = None,
    blur_sigma: float = 1.6,
    scale: int = 2,
    patch_size: int | None = None,
    patches_per_image: int | None = None,
    grey_noise: bool | None = None,
    max_bad_files: int = 10,
    val_frac: float = 0.1,
    test_frac: float = 0.1,
    val_tiles: int | None = None,
    num_images: int = 240,
    halo: int = HALO,
    seed: int = 0,
    cache_dir: str = ".cache",
) -> Datasets:
    """Returns crops for training, and tiles of whole images for validation and test.

    Args:
        path: folder of images (PNG, JPEG, WebP, BMP, TIFF) in any depth; folders ``train/``, ``val/`` and ``test/`` in
            it are used as splits. None = the embedded set.
        task: ``denoise``, ``deblur`` or ``super_resolve``; see `Degradation`, also for the next three.
        patch_size: side of a crop in pixels; smaller images are left out. None = 64, or less if more than a tenth of
            the images are smaller.
        patches_per_image: crops of each image per epoch; None = more for fewer images.
        grey_noise: whether all colours get the same noise; None = if all images are grey.
        max_bad_files: maximum number of undecodable files to skip.
        val_frac: share of the images for validation, without a folder ``val/``; ``test_frac`` likewise. 0 = none.
        val_tiles: tiles of 128 pixels per validation image, evenly spread; None = all, unless there are many. The test
            uses all.
        num_images: size of the embedded set.
        halo: pixels around each tile in evaluation. The model's reach + 5 gives the figures of whole images, mirrored
            at their edges.
        seed: seed of the split and of the embedded set; the training has its own.
        cache_dir: folder for decoded images.

    Raises:
        DataError: the folder is missing, has no images, too many damaged or too few to split; or the cache can't be
            written.
        ConfigError: an argument is out of range.
    """
    numbers = {"patch_size": patch_size, "patches_per_image": patches_per_image, "max_bad_files": max_bad_files}
    numbers |= {"val_tiles": val_tiles, "num_images": num_images, "halo": halo, "seed": seed}
    shares = {"val_frac": val_frac, "test_frac": test_frac}
    ConfigError.check(
        "workload.data",
        *degradations.rules(task, sigma, blur_sigma, scale),
        *map(_whole_number, numbers, numbers.values()),
        *(
            (name, share, isinstance(share, int | float) and 0 <= share <= 0.5, "is not in 0..0.5", f"{name}=0.1, or 0")
            for name, share in shares.items()
        ),
    )
    reach = degradations.blur_reach(blur_sigma)
    least_patch = max(SMALLEST_PATCH, reach + 1) if task == "deblur" else SMALLEST_PATCH
    is_covered = task != "deblur" or patch_size is None or reach < patch_size
    problem = f"pixels blur over {reach} to each side, and a crop has patch_size={patch_size}"
    way_out = f"patch_size={reach + 1} or more, or a smaller blur"
    ConfigError.check("workload.data", ("blur_sigma", blur_sigma, is_covered, problem, way_out))
    if path is None:
        made = _embedded(num_images, max(SIDE, (patch_size or USUAL_PATCH) * 3 // 2), seed, cache_dir)
    else:
        made = _decoded(Path(path), max_bad_files, seed, cache_dir)
    derived: dict[str, tuple[Any, str]] = {}
    if patch_size is None:
        patch_size, _ = derived["workload.data.patch_size"] = _patch_size(made.index.images, least_patch)
    where = "The embedded set" if path is None else f"workload.data.path={path}"
    parts = split_images(
        made.index, made.split_folders, where, patch_size=patch_size, val_frac=val_frac, test_frac=test_frac
    )
    whole = ImagePixels(made.file, max(image.end for image in made.index.images))
    num_train = len(parts.train)
    if patches_per_image is None:
        few = (
            -(-FULL_EPOCH // num_train),
            f"{counted(num_train, 'training image')}; an epoch has {FULL_EPOCH:,} crops or more",
        )
        usual = USUAL_CROPS, "the embedded set"
        patches_per_image, _ = derived["workload.data.patches_per_image"] = usual if path is None else few
    if grey_noise is None:
        grey_noise = path is not None and all(map(whole.is_grey, (*parts.train, *parts.val, *parts.test)))
        reason = "all images are grey" if grey_noise else "some images have colours"
        derived["workload.data.grey_noise"] = grey_noise, reason
    if val_tiles is None and parts.val:
        reason = f"{counted(len(parts.val), 'image')} to validate on; {VAL_TILES} tiles in all, at least 1 of each"
        val_tiles, _ = derived["workload.data.val_tiles"] = max(1, VAL_TILES // len(parts.val)), reason
    degradation = Degradation(task, sigma, blur_sigma, scale, is_grey=grey_noise)
    pixels = ImagePixels(made.file, max(image.end for image in parts.train))
    train = CropData(
        pixels, parts.train, patch_size=patch_size, patches_per_image=patches_per_image, degrade=degradation
    )
    tiles = partial(TileData, whole, degrade=degradation.for_evaluation, halo=halo)
    size = (
        f"{counted(len(parts.train), 'training image')} ({show_bytes(pixels.num_bytes)} decoded), "
        f"{counted(len(train), 'crop')} an epoch, {len(parts.val)} to validate on, {len(parts.test)} to test on"
    )
    return Datasets(
        train=train,
        val=tiles(parts.val, most_tiles=val_tiles) if parts.val else None,
        test=tiles(parts.test, first_image=len(parts.val)) if parts.test else None,
        eval_batch_size=EVAL_TILES,
        features=crop_features(pixels, patch_size),
        evaluation=ImageQuality([image.name for image in (*parts.val, *parts.test)], halo),
        notes=(size, *made.notes, *parts.notes),
        derived=derived,
    )


@dataclass(frozen=True)
class _Made:
    """Decoded images on disk."""

    file: Path
    index: ImageIndex
    split_folders: frozenset[str] = frozenset()
    """Splits with their own folder."""
    notes: tuple[str, ...] = ()


def _embedded(num_images: int, side: int, seed: int, cache_dir: str) -> _Made:
    settings = {"version": VERSION, "embedded": num_images, "side": side, "seed": seed}
    build = partial(_write_embedded, num_images=num_images, side=side, seed=seed)
    folder = prepared(cache_dir, "images", (), settings, build)
    return _Made(folder / PIXELS_FILE, read_index(folder))


def _write_embedded(folder: Path, *, num_images: int, side: int, seed: int) -> None:
    drawn = dead_leaves(num_images, side, seed)
    write_images(folder, ((f"leaves_{number:04d}", "train", Decoded(image, ())) for number, image in enumerate(drawn)))


def _decoded(path: Path, max_bad_files: int, seed: int, cache_dir: str) -> _Made:
    found = find_images(path, seed)

    def build(folder: Path) -> None:
        if len(found.files) >= MANY:
            count = show_count(len(found.files))
            print(f"Decoding {count} images into {folder.parent}, once.", file=sys.stderr, flush=True)
        decode_into(folder, found.files, BadFiles(found.folder, max_bad_files, found.unreadable))

    settings = {"version": VERSION, "most_pixels": MAX_PIXELS, "seed": seed}
    folder = prepared(cache_dir, "images", [file.path for file in found.files], settings, build)
    index = read_index(folder)
    bad = BadFiles(found.folder, max_bad_files, (*found.unreadable, *index.damaged))
    if not index.images:
        raise DataError(f"workload.data.path={found.folder}: no image in it can be decoded. {' '.join(bad.notes())}")
    return _Made(folder / PIXELS_FILE, index, found.split_folders, (*found.notes, *bad.notes()))


def _patch_size(images: Sequence[StoredImage], least: int) -> tuple[int, str]:
    """Returns the usual side, or a smaller one that nine of ten images have."""
    sides = sorted(min(image.height, image.width) for image in images)
    usable = [side for side in sides if side >= least]
    usual = max(USUAL_PATCH, least)
    if not usable:
        return least, f"the shorter sides are {sides[0]} to {sides[-1]} pixels, and {least} is the least"
    side = usable[int(LEFT_OUT_FRAC * len(usable))]
    if side >= usual:
        return usual, f"the shorter sides are {sides[0]} to {sides[-1]} pixels"
    return side, f"the shorter sides are {sides[0]} to {sides[-1]} pixels, and nine of ten images shall have a crop"


def _whole_number(name: str, number: int | None) -> degradations.Rule:
    """Returns the rule for an argument of `NUMBERS`, for `ConfigError.check`."""
    span, usual = NUMBERS[name]
    is_fine = (number is None and usual is None) or (type(number) is int and number in span)
    kind = "even" if span.step == 2 else "whole"
    problem = f"is no {kind} number in {span[0]:,}..{span[-1]:,}"
    return name, number, is_fine, problem, f"{name}={'null' if usual is None else usual}"

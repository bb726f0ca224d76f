"""Makes data for restoration of a folder of images or the embedded set: crops to train on, tiles to evaluate on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from wellfed.contract import Datasets
from wellfed.errors import ConfigError, DataError, Fault
from wellfed.prepared import prepared
from wellfed.units import counted, show_bytes, show_count
from workloads.restoration import degradations
from workloads.restoration.bad_files import BadFiles
from workloads.restoration.crops import CropData, crop_features
from workloads.restoration.decoding import MAX_PIXELS, Decoded
from workloads.restoration.degradations import Degradation
from workloads.restoration.evaluation import ImageQuality
from workloads.restoration.image_files import FoundImages, find_images
from workloads.restoration.images import PIXELS_FILE, ImageIndex, ImagePixels, decode_into, read_index, write_images
from workloads.restoration.splits import split_images
from workloads.restoration.synthetic import dead_leaves
from workloads.restoration.tiles import CORE, HALO, TileData

VERSION = 1
"""Of what is written for a folder; another one is decoded anew."""
SIDE = 128
"""Of the embedded images; those of larger crops are half as large again as a crop."""
EVAL_TILES = 8
"""In a batch of validation: about the pixels of 70 crops of the default size, without gradients."""
SMALLEST_PATCH = 16


def datasets(
    path: str | None = None,
    *,
    task: str = "denoise",
    sigma: float | None = None,
    blur_sigma: float = 1.6,
    scale: int = 2,
    patch_size: int = 64,
    patches_per_image: int | None = None,
    max_bad_files: int = 10,
    val_frac: float = 0.1,
    test_frac: float = 0.1,
    num_images: int = 240,
    halo: int = HALO,
    seed: int = 0,
    cache_dir: str = ".cache",
) -> Datasets:
    """Crops to train on, and the tiles of whole images for validation and test.

    Args:
        path: folder of images (PNG, JPEG, WebP, BMP, TIFF) in any depth, or with ``train/`` and, where there are any,
            ``val/`` and ``test/`` inside, which are used as such; None = the embedded set.
        task: ``denoise``, ``deblur`` or ``super_resolve``; this and the next three as `Degradation` has them.
        patch_size: side of a crop in pixels; images with a shorter side are left out.
        patches_per_image: crops of each image in an epoch; None = as many as fit into it side by side.
        max_bad_files: files to skip that can't be decoded.
        val_frac: share of the images to validate on, unless there is ``val/``; ``test_frac`` likewise. 0 = none.
        num_images: size of the embedded set.
        halo: pixels that evaluation sees around each tile of an image; the model's reach and 5 more give the figures of
            images that are restored in one piece.
        seed: of the split and of the embedded set; not of the training.
        cache_dir: where decoded images are kept.

    Raises:
        DataError: folder missing, without images, with too many damaged ones or too few to split; nowhere to keep them.
        ConfigError: an argument out of its range.
    """
    degradation_faults = degradations.faults(task, sigma, blur_sigma, scale)
    _check(degradation_faults, patch_size, patches_per_image, max_bad_files, val_frac, test_frac, num_images, halo)
    if path is None:
        side = max(SIDE, patch_size * 3 // 2)
        settings = {"version": VERSION, "embedded": num_images, "side": side, "seed": seed}
        build = partial(_write_embedded, num_images=num_images, side=side, seed=seed)
        folder = prepared(cache_dir, "images", (), settings, build)
        index, split_folders = read_index(folder), frozenset[str]()
        notes: tuple[str, ...] = ()
    else:
        found = find_images(Path(path), seed)
        folder, index, notes = _decoded(found, max_bad_files, seed, cache_dir)
        split_folders = found.split_folders
    parts = split_images(index, split_folders, patch_size=patch_size, val_frac=val_frac, test_frac=test_frac)
    degradation = Degradation(task, sigma, blur_sigma, scale)
    train_pixels = ImagePixels(folder / PIXELS_FILE, max(image.end for image in parts.train))
    train = CropData(
        train_pixels,
        parts.train,
        patch_size=patch_size,
        patches_per_image=patches_per_image,
        degrade=degradation,
    )
    whole = ImagePixels(folder / PIXELS_FILE, max(image.end for image in index.images))
    tiles = partial(TileData, whole, degrade=degradation.for_evaluation, halo=halo)
    size = (
        f"{counted(len(parts.train), 'training image')} ({show_bytes(train_pixels.num_bytes)} decoded), "
        f"{show_count(len(train))} crops an epoch, {len(parts.val)} to validate on, {len(parts.test)} to test on"
    )
    return Datasets(
        train=train,
        val=tiles(parts.val) if parts.val else None,
        test=tiles(parts.test, first_image=len(parts.val)) if parts.test else None,
        eval_batch_size=EVAL_TILES,
        features=crop_features(train_pixels, patch_size),
        evaluation=ImageQuality([image.name for image in (*parts.val, *parts.test)], halo),
        notes=(size, *notes, *parts.notes),
    )


def _decoded(
    found: FoundImages, max_bad_files: int, seed: int, cache_dir: str
) -> tuple[Path, ImageIndex, tuple[str, ...]]:
    """The folder with the pixels of all files, what it holds, and what is to be said of that."""

    def build(folder: Path) -> None:
        decode_into(folder, found.files, BadFiles(found.folder, max_bad_files, found.unreadable))

    settings = {"version": VERSION, "most_pixels": MAX_PIXELS, "seed": seed}
    folder = prepared(cache_dir, "images", [file.path for file in found.files], settings, build)
    index = read_index(folder)
    bad = BadFiles(found.folder, max_bad_files, (*found.unreadable, *index.damaged))
    if not index.images:
        raise DataError(f"workload.data.path={found.folder}: no image in it can be decoded. {' '.join(bad.notes())}")
    return folder, index, (*found.notes, *bad.notes())


def _write_embedded(folder: Path, *, num_images: int, side: int, seed: int) -> None:
    drawn = dead_leaves(num_images, side, seed)
    write_images(folder, ((f"leaves_{number:04d}", "train", Decoded(image, ())) for number, image in enumerate(drawn)))


def _check(
    faults: list[Fault],
    patch_size: int,
    patches_per_image: int | None,
    max_bad_files: int,
    val_frac: float,
    test_frac: float,
    num_images: int,
    halo: int,
) -> None:
    """Raise ConfigError with these faults and those of the other arguments."""
    faults = list(faults)

    def refuse(name: str, problem: str, way_out: str) -> None:
        faults.append(Fault(f"workload.data.{name}", problem, way_out))

    if not SMALLEST_PATCH <= patch_size <= 1024:
        refuse("patch_size", f"{patch_size} is not in {SMALLEST_PATCH}..1024.", "Write patch_size=64 or so.")
    if patches_per_image is not None and patches_per_image < 1:
        refuse("patches_per_image", f"{patches_per_image} is not positive.", "Write patches_per_image=16, or null.")
    if max_bad_files < 0:
        refuse("max_bad_files", f"{max_bad_files} is negative.", "Write 0 to allow none.")
    for name, share in (("val_frac", val_frac), ("test_frac", test_frac)):
        if not 0 <= share <= 0.5:
            refuse(name, f"{share} is not in 0..0.5.", f"Write {name}=0.1, or 0 for none.")
    if not 3 <= num_images <= 100_000:
        refuse("num_images", f"{num_images} is not in 3..100,000.", "Write num_images=240 or so.")
    if halo % 2 or not 8 <= halo <= CORE:
        refuse("halo", f"{halo} is no even number in 8..{CORE}.", "Write halo=32 or so.")
    if faults:
        raise ConfigError(faults)

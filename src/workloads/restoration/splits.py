"""Assigns images to training, validation and test, and leaves out unsuitable ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wellfed import DataError
from wellfed.units import counted
from workloads.restoration.image_files import SPLITS
from workloads.restoration.images import ImageIndex, StoredImage


@dataclass(frozen=True)
class ImageSplits:
    """Images of each split; training images come first in the file of pixels."""

    train: tuple[StoredImage, ...]
    val: tuple[StoredImage, ...]
    test: tuple[StoredImage, ...]
    notes: tuple[str, ...]
    """Notes on omissions and changes."""


def split_images(
    index: ImageIndex, split_folders: Collection[str], where: str, *, patch_size: int, val_frac: float, test_frac: float
) -> ImageSplits:
    """Splits images by folder; a split without a folder gets a share of the training images.

    Args:
        where: name of the folder, for errors.

    Raises:
        DataError: a split has no image.
    """
    large = [image for image in index.images if min(image.height, image.width) >= patch_size]
    small = [image for image in index.images if min(image.height, image.width) < patch_size]
    once, again = _without_copies(large)
    part = {split: [image for image in once if image.split == split] for split in SPLITS}
    _refuse_empty(part, split_folders, where, small, patch_size)
    shares = {"val": val_frac, "test": test_frac}
    num_train = len(part["train"])
    for split in ("test", "val"):
        if split not in split_folders and shares[split] > 0:
            num = max(1, round(shares[split] * num_train))
            part["train"], part[split] = part["train"][:-num], part["train"][-num:]
    if not part["train"] or any(not part[split] and shares[split] > 0 for split in shares):
        raise DataError(
            f"{where}: {counted(num_train, 'image')} to train on can't be split three ways. Add some, or train without "
            "validation or test: workload.data.val_frac=0, workload.data.test_frac=0."
        )
    notes = [f"{counted(count, 'image')} changed: {kind}" for kind, count in index.turned]
    if small:
        notes.append(
            f"{counted(len(small), 'image')} with a side below patch_size={patch_size} left out, the first: "
            f"{_named(small[0])}"
        )
    if again:
        notes.append(f"{counted(len(again), 'image')} left out as copies of others, the first: {again[0].name}")
    return ImageSplits(tuple(part["train"]), tuple(part["val"]), tuple(part["test"]), tuple(notes))


def _without_copies(images: Sequence[StoredImage]) -> tuple[list[StoredImage], list[StoredImage]]:
    """Returns images with different pixels, and the copies, since a test image must not be trained on."""
    chosen: dict[str, StoredImage] = {}
    for split in reversed(SPLITS):
        for image in images:
            if image.split == split:
                chosen.setdefault(image.digest, image)
    once = [image for image in images if chosen[image.digest] is image]
    return once, [image for image in images if chosen[image.digest] is not image]


def _refuse_empty(
    part: dict[str, list[StoredImage]],
    split_folders: Collection[str],
    where: str,
    small: Sequence[StoredImage],
    patch_size: int,
) -> None:
    """Raises DataError if all images of a folder are too small, damaged or copies."""
    for split in SPLITS:
        if part[split] or (split not in split_folders and split != "train"):
            continue
        place = f"{where}: {split}/" if split in split_folders else where
        largest = max((min(image.height, image.width) for image in small if image.split == split), default=0)
        if largest:
            raise DataError(
                f"{place} holds no image with both sides of patch_size={patch_size} or more, the largest has "
                f"{largest}. Write workload.data.patch_size={largest}, or add larger ones."
            )
        raise DataError(
            f"{place} holds no image that can be used: all are damaged, or copies of images of another split. "
            "Add others, or remove the folder."
        )


def _named(image: StoredImage) -> str:
    return f"{image.name} ({image.width} x {image.height})"

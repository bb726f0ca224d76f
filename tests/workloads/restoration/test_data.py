import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wellfed import ConfigError, DataError, Datasets, SampleRng
from workloads.restoration.data import datasets

Put = Callable[..., Path]


@pytest.fixture
def read(photos: Path, tmp_path: Path) -> Callable[..., Datasets]:
    """The folder's data, with small crops."""

    def made(**given: Any) -> Datasets:
        return datasets(str(photos), **{"patch_size": 16, "cache_dir": str(tmp_path / "cache"), **given})

    return made


def names(data: Datasets) -> dict[str, set[str]]:
    """Of the images in each split."""
    return {
        "train": {image.name for image in data.train.images},
        "val": {image.name for image in data.val.images} if data.val else set(),
        "test": {image.name for image in data.test.images} if data.test else set(),
    }


def test_the_embedded_set_is_made_once(tmp_path: Path):
    one, two = (datasets(num_images=20, cache_dir=str(tmp_path)) for _ in range(2))
    assert [len(part) for part in names(one).values()] == [16, 2, 2]
    assert len([path for path in (tmp_path / "images").iterdir() if path.is_dir()]) == 1
    first, second = (each.train.fetch(torch.arange(8), SampleRng(0, 0))["crop"] for each in (one, two))
    assert torch.equal(first, second)
    assert first.shape == (8, 64, 64, 3)
    assert one.notes == ("16 training images (768.0 KiB decoded), 128 crops an epoch, 2 to validate on, 2 to test on",)
    assert {knob: value for knob, (value, _) in one.derived.items()} == {
        "workload.data.patch_size": 64,
        "workload.data.patches_per_image": 8,
        "workload.data.grey_noise": False,
        "workload.data.val_tiles": 64,
    }
    other = datasets(num_images=20, seed=1, cache_dir=str(tmp_path)).train.fetch(torch.arange(8), SampleRng(0, 0))
    assert not torch.equal(first, other["crop"])


def test_a_folder_is_split_and_described(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(20):
        put(f"{number}.png", 20 + number, 40)
    made = read()
    parts = names(made)
    assert [len(part) for part in parts.values()] == [16, 2, 2]
    assert not parts["train"] & (parts["val"] | parts["test"])
    assert not parts["val"] & parts["test"]
    assert names(read()) == parts != names(read(seed=1))
    assert made.evaluation.names == [image.name for image in (*made.val.images, *made.test.images)]
    assert made.test[0]["image"] == 2
    assert [len(part) for part in names(read(val_frac=0, test_frac=0.25)).values()] == [15, 0, 5]
    assert read(val_frac=0).val is None
    assert made.notes[0].startswith("16 training images (")


def test_crops_are_of_training_images_alone(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(8):
        shade = np.full((20, 20, 3), 10 * number, dtype=np.uint8)
        shade[0, 0] = number  # else flat images of two sizes could be taken for copies
        Image.fromarray(shade).save(photos / f"{number}.png")
    made = read(val_frac=0.25, test_frac=0.25, patches_per_image=3)
    crops = made.train.fetch(torch.arange(len(made.train)), SampleRng(0, 0))["crop"]
    trained = {int(name.removesuffix(".png")) for name in names(made)["train"]}
    assert {int(crop[5, 5, 0]) // 10 for crop in crops} == trained
    assert made.features.bytes == 4 * 20 * 20 * 3


def test_folders_of_splits_are_used_and_what_is_missing_is_taken_of_train(
    photos: Path, put: Put, read: Callable[..., Datasets]
):
    for number in range(10):
        put(f"train/{number}.png")
    put("test/a.png")
    parts = names(read(test_frac=0.5))
    assert (len(parts["train"]), len(parts["val"]), parts["test"]) == (9, 1, {"test/a.png"})
    put("val/b.png")
    made = read(val_frac=0, test_frac=0)
    assert [len(part) for part in names(made).values()] == [10, 1, 1]
    assert made.features.bytes == 10 * 24 * 32 * 3


def test_small_images_are_said_and_left_out(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(5):
        put(f"{number}.png", 16, 40)
    put("x/small.png", 15, 40)
    made = read()
    assert "x/small.png" not in set.union(*names(made).values())
    assert "1 image with a side below patch_size=16 left out, the first: x/small.png (15 x 40)" in made.notes
    with pytest.raises(
        DataError, match=r"patch_size=64 or more, the largest has 16.*Write workload.data.patch_size=16"
    ):
        read(patch_size=64)


def test_damaged_files_are_counted_up_to_a_limit(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(5):
        put(f"{number}.png")
    (photos / "empty.png").touch()
    (photos / "page.jpg").write_text("<html>")
    torn = put("torn.jpg", 64, 64)
    torn.write_bytes(torn.read_bytes()[:-900])
    made = read(max_bad_files=3)
    assert len(set.union(*names(made).values())) == 5
    assert "3 bad files skipped, the first: empty.png: empty file" in made.notes
    with pytest.raises(DataError, match=r"max_bad_files=2; the first is empty.png: empty file.*or raise the limit"):
        read(max_bad_files=2)


def test_a_changed_file_is_seen(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(4):
        put(f"{number}.png")
    before = read(val_frac=0, test_frac=0)
    assert len(before.train.images) == 4
    put("later.png")
    assert len(read(val_frac=0, test_frac=0).train.images) == 5
    put("0.png", 50, 50)
    assert {image.width for image in read(val_frac=0, test_frac=0).train.images} == {32, 50}


def test_copies_are_left_out_so_that_nothing_is_tested_on_that_was_trained_on(
    photos: Path, put: Put, read: Callable[..., Datasets]
):
    for number in range(4):
        put(f"train/{number}.png")
    (photos / "test").mkdir()
    shutil.copy(photos / "train" / "1.png", photos / "test" / "other_name.png")
    shutil.copy(photos / "train" / "2.png", photos / "train" / "again.png")
    put("test/new.png")
    made = read(val_frac=0)
    parts = names(made)
    assert parts["test"] == {"test/other_name.png", "test/new.png"}
    assert len(parts["train"]) == 3
    assert "train/1.png" not in parts["train"]
    assert any(note.startswith("2 images left out as copies of others") for note in made.notes)


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_images_to_split_are_refused(photos: Path, put: Put, read: Callable[..., Datasets], count: int):
    for number in range(count):
        put(f"{number}.png")
    with pytest.raises(DataError, match=r"val_frac=0, workload.data.test_frac=0"):
        read()
    assert len(read(val_frac=0, test_frac=0).train.images) == count


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"patch_size": 8}, ["patch_size"]),
        ({"patch_size": "64", "num_images": 7.5, "val_frac": None}, ["patch_size", "num_images", "val_frac"]),
        ({"task": "deblur", "blur_sigma": 5.1, "patch_size": 16}, ["blur_sigma"]),
        ({"task": "sharpen", "patch_size": 5000, "sigma": 300}, ["task", "patch_size", "sigma"]),
    ],
)
def test_arguments_out_of_range_are_named_all_at_once(arguments: dict[str, Any], where: list[str]):
    with pytest.raises(ConfigError) as caught:
        datasets(**arguments)
    assert {fault.where for fault in caught.value.faults} == {f"workload.data.{name}" for name in where}


def grey(path: Path, size: int = 24, bits: int = 8) -> None:
    """Writes a picture without colour."""
    values = np.random.default_rng(size).integers(0, 2**bits, (size, size), dtype=np.uint8 if bits == 8 else np.uint16)
    Image.fromarray(values).save(path)


def test_grey_images_get_grey_noise(photos: Path, put: Put, read: Callable[..., Datasets]):
    for number in range(6):
        grey(photos / f"{number}.png", 20 + number, 8 if number < 3 else 16)
    made = read()
    assert made.derived["workload.data.grey_noise"] == (True, "all images are grey")
    batch = made.train.on_device(made.train.fetch(torch.arange(5), SampleRng(0, 0)), SampleRng(0, 0))
    for image in (batch["degraded"], made.test[0]["degraded"][None]):
        assert torch.equal(image, image[:, :1].expand(image.shape))
        assert float((image - image.mean((1, 2, 3), keepdim=True)).std()) > 0.08
    assert "3 images changed: 16 bits" in made.notes
    typed = read(grey_noise=False).train
    colours = typed.on_device(typed.fetch(torch.arange(5), SampleRng(0, 0)), SampleRng(0, 0))["degraded"]
    assert not torch.equal(colours[:, 0], colours[:, 1])
    put("colours.png")
    assert read().derived["workload.data.grey_noise"] == (False, "some images have colours")

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wellfed import DataError
from workloads.restoration.image_files import find_images

Put = Callable[..., Path]


def test_images_in_folders_in_folders_are_found_whatever_the_case_of_their_suffix(photos: Path, put: Put):
    for name in ("a.png", "B.JPG", "x/a.png", "x/y/c.JpEg", "x/y/d e.webp"):
        put(name)
    found = find_images(photos, 0)
    assert {file.name for file in found.files} == {"a.png", "B.JPG", "x/a.png", "x/y/c.JpEg", "x/y/d e.webp"}
    assert {file.split for file in found.files} == {"train"}
    assert (found.split_folders, found.unreadable, found.notes) == (frozenset(), (), ())


def test_the_order_belongs_to_seed_and_name(photos: Path, put: Put):
    for number in range(20):
        put(f"{number}.png")
    before = [file.name for file in find_images(photos, 0).files]
    assert before != sorted(before)
    assert before != [file.name for file in find_images(photos, 1).files]
    put("new.png")
    after = [file.name for file in find_images(photos, 0).files]
    after.remove("new.png")
    assert after == before


def test_train_val_and_test_are_used_as_such(photos: Path, put: Put):
    for name in ("Train/a.png", "train/b/c.png", "validation/d.png", "test/e.png", "beside.png", "other/f.png"):
        put(name)
    found = find_images(photos, 0)
    assert [file.split for file in found.files] == ["train", "train", "val", "test"]
    assert found.split_folders == {"train", "val", "test"}
    assert found.notes == ("2 images beside Train/, test/, train/ and validation/ left out",)


def test_empty_and_closed_files_are_told(photos: Path, put: Put):
    put("a.png")
    (photos / "empty.png").touch()
    put("closed.png").chmod(0)
    put("closed/b.png").parent.chmod(0)
    try:
        unreadable = dict(find_images(photos, 0).unreadable)
    finally:
        (photos / "closed").chmod(0o700)
    assert unreadable.pop("empty.png") == "empty file"
    assert unreadable == ({} if os.geteuid() == 0 else dict.fromkeys(("closed.png", "closed/"), "Permission denied"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"photos holds nothing, and no image \(.png, "),
        (["notes.txt", "a.gif"], r"holds 2 other files \(.gif, .txt\), and no image"),
        (["val/a.png"], "holds val/ but no train/"),
        (["test/a.png", "valid/b.png", "c.png"], "holds test/ and valid/ but no train/"),
        (["train/a.txt", "test/b.png"], "train/ holds no image"),
        (["train/a.png", "val/b.txt"], "val/ holds no image.*or remove the folder"),
    ],
)
def test_folders_without_images_are_refused(photos: Path, files: list[str], message: str):
    for name in files:
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        find_images(photos, 0)

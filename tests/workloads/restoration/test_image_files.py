import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wellfed import DataError
from workloads.restoration.image_files import find_images

Put = Callable[..., Path]


def names(folder: Path, seed: int = 0) -> set[str]:
    return {file.name for file in find_images(folder, seed).files}


def test_images_in_folders_in_folders_are_found_whatever_the_case_of_their_suffix(photos: Path, put: Put):
    for name in ("a.png", "B.JPG", "x/a.png", "x/y/c.JpEg", "x/y/d e.webp"):
        put(name)
    found = find_images(photos, 0)
    assert {file.name for file in found.files} == {"a.png", "B.JPG", "x/a.png", "x/y/c.JpEg", "x/y/d e.webp"}
    assert {file.split for file in found.files} == {"train"}
    assert (found.split_folders, found.unreadable, found.notes) == (frozenset(), (), ())


def test_other_files_are_counted_and_hidden_ones_passed_over(photos: Path, put: Put):
    put("a.png")
    for name in ("notes.txt", "more.TXT", "Makefile", ".DS_Store", "._a.png"):
        (photos / name).write_bytes(b"x")
    (photos / ".thumbnails").mkdir()
    put(".thumbnails/a.png")
    found = find_images(photos, 0)
    assert [file.name for file in found.files] == ["a.png"]
    assert found.notes == ("3 files of other kinds left out: 2 .txt, 1 Makefile",)


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


def test_links_are_followed_and_circles_are_not(photos: Path, put: Put, tmp_path: Path):
    put("a.png")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    put("../elsewhere/b.png")
    (photos / "linked").symlink_to(elsewhere)
    (photos / "c.png").symlink_to(elsewhere / "b.png")
    (photos / "circle").symlink_to(photos)
    (elsewhere / "back").symlink_to(photos)
    (photos / "gone.png").symlink_to(tmp_path / "nowhere.png")
    found = find_images(photos, 0)
    assert {file.name for file in found.files} == {"a.png", "c.png", "linked/b.png"}
    assert found.unreadable == (("gone.png", "a link to a file that is not there"),)


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


def test_an_empty_folder_of_a_split_is_refused(photos: Path, put: Put):
    put("train/a.png")
    (photos / "test").mkdir()
    with pytest.raises(DataError, match=r"test/ holds no image\. Put some there, or remove the folder"):
        find_images(photos, 0)


def test_what_is_no_folder_is_refused(photos: Path, put: Put):
    with pytest.raises(DataError, match="no such folder"):
        find_images(photos / "gone", 0)
    with pytest.raises(DataError, match="is a file; name the folder"):
        find_images(put("a.png"), 0)


def test_a_home_is_found(photos: Path, put: Put, monkeypatch: pytest.MonkeyPatch):
    put("a.png")
    monkeypatch.setenv("HOME", str(photos.parent))
    assert names(Path("~/photos")) == {"a.png"}


def test_a_named_pipe_is_no_image(photos: Path, put: Put):
    """To open one waits for its writer."""
    put("a.png")
    os.mkfifo(photos / "x.png")
    assert find_images(photos, 0).unreadable == (("x.png", "a named pipe, a socket or a device, not a file"),)

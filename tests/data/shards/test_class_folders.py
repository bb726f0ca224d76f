import pytest

from wellfed.data.shards.class_folders import class_of, files_below, folders, sample_key, splits_of
from wellfed.errors import DataError


def names(place):
    return [path.relative_to(place).as_posix() for path in files_below(place)]


def test_links_to_folders_are_followed_and_hidden_names_left_out(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    elsewhere.mkdir()
    for file in ("a/b/1.wav", "a/2.wav", ".git/3.wav", "elsewhere/4.wav"):
        (tmp_path / file).write_bytes(b"")
    place = tmp_path / "a"
    (place / "linked").symlink_to(elsewhere)
    assert names(place) == ["2.wav", "b/1.wav", "linked/4.wav"]


def test_a_link_to_a_folder_above_does_not_go_on_for_ever(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.wav").write_bytes(b"")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert names(tmp_path) == ["a/1.wav"]


def test_a_folder_that_can_not_be_read_is_told(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.iterdir", refuse)
    with pytest.raises(DataError, match="can't be read: Permission denied"):
        names(tmp_path)


def test_train_is_a_split_where_folders_or_shards_lie_in_it_and_else_a_class(tmp_path):
    for name in ("bird", "train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.wav").write_bytes(b"")
    assert splits_of(tmp_path) == {"": tmp_path}
    (tmp_path / "train" / "0.tar").write_bytes(b"")
    assert splits_of(tmp_path) == {"train": tmp_path / "train", "test": tmp_path / "test"}
    assert [each.name for each in folders(tmp_path)] == ["bird", "test", "train"]


def test_the_class_is_the_first_folder(tmp_path):
    assert class_of((tmp_path / "a" / "b" / "1.wav").relative_to(tmp_path)) == "a"
    assert class_of((tmp_path / "1.wav").relative_to(tmp_path)) is None


def test_a_key_has_no_dots_blanks_or_colons():
    assert sample_key("c:d/up down.v2") == "c_d/up_down_v2"

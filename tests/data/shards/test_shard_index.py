import numpy as np
import pytest

from tests.data.shards.test_tar_members import packed
from wellfed.data.shards.shard_index import find_shards, index_shards, split_name
from wellfed.data.shards.shard_reader import ShardReader
from wellfed.errors import DataError

PARTS = ("wav", "cls")


def clips(numbers):
    return [
        pair
        for number in numbers
        for pair in ((f"c/{number}.wav", bytes([number]) * (number + 1)), (f"c/{number}.cls", b"7"))
    ]


@pytest.fixture
def shards(tmp_path):
    """Two shards of three and two clips."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, numbers in (("0.tar", (1, 2, 3)), ("1.tar", (4, 5))):
        (folder / name).write_bytes(packed([*clips(numbers), ("README", b"no sample's"), (".hidden.wav", b"")]))
    return folder


def indexed(folder):
    return index_shards(find_shards(folder), PARTS, folder.parent / "cache")


def test_members_that_share_a_key_are_a_sample(shards):
    index = indexed(shards)
    assert index.keys == ("c/1", "c/2", "c/3", "c/4", "c/5")
    assert index.shards.tolist() == [0, 0, 0, 1, 1]
    assert index.parts["wav"][1].tolist() == [2, 3, 4, 5, 6]


def test_samples_are_read_in_any_order(shards):
    reader = ShardReader(indexed(shards), "wav")
    assert [bytes(each) for each in reader.read(np.array([4, 0, 2, 0]))] == [b"\5" * 6, b"\1\1", b"\3" * 4, b"\1\1"]
    assert reader.read(np.array([], np.int64)) == []
    table = np.zeros((2, 2), np.uint8)
    reader.fill(np.array([0, 0]), table)
    assert (table == 1).all()


def test_a_sample_without_the_part_is_told_when_it_is_read(shards):
    (shards / "2.tar").write_bytes(packed([("x.cls", b"1")]))
    index = indexed(shards)
    assert index.parts["wav"][1].tolist()[-1] == -1
    with pytest.raises(DataError, match=r"2\.tar: the sample 'x' has no \.wav"):
        ShardReader(index, "wav").read(np.array([5]))


def test_a_changed_shard_is_indexed_again_and_the_others_are_not(shards):
    indexed(shards)
    entries = {path: path.stat().st_mtime_ns for path in shards.parent.glob("cache/shards/*/members.npy")}
    (shards / "1.tar").write_bytes(packed(clips((8, 9, 10))))
    assert indexed(shards).keys == ("c/1", "c/2", "c/3", "c/8", "c/9", "c/10")
    after = {path: path.stat().st_mtime_ns for path in shards.parent.glob("cache/shards/*/members.npy")}
    assert len(entries) == 2
    assert len(after) == 3
    assert entries.items() <= after.items()


def test_a_part_that_comes_twice_is_refused(shards):
    (shards / "2.tar").write_bytes(packed([("a.wav", b"1"), ("a.wav", b"22")]))
    with pytest.raises(DataError, match=r"2\.tar: a sample has two members"):
        indexed(shards)


def test_shards_without_the_parts_are_refused(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "0.tar").write_bytes(packed([("a.jpg", b"1")]))
    with pytest.raises(DataError, match=r"no member ends in \.wav or \.cls"):
        indexed(folder)


def test_a_folder_without_shards_says_how_they_are_made(tmp_path):
    with pytest.raises(DataError, match=r"has no \.tar files.*python -m wellfed shards"):
        find_shards(tmp_path)
    with pytest.raises(DataError, match="neither a folder nor a file"):
        find_shards(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a/b.seg.PNG", ("a/b", "seg.png")),
        ("./a.wav", ("a", "wav")),
        ("a.b/c.wav", ("a.b/c", "wav")),
        ("README", None),
        (".hidden.wav", None),
        ("a/b.", None),
    ],
)
def test_keys_end_at_the_first_dot_of_the_files_name(name, found):
    assert split_name(name) == found

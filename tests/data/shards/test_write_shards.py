import json
from collections import Counter

import numpy as np
import pytest

from wellfed.data.shards.class_folders import CLASSES
from wellfed.data.shards.shard_index import find_shards, index_shards
from wellfed.data.shards.shard_reader import ShardReader
from wellfed.data.shards.write_shards import write_shards
from wellfed.errors import ConfigError, DataError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "wavs"
    for name in ("yes", "no", "up.down"):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            (folder / name / f"clip {number}.v2.wav").write_bytes(f"{name}{number}".encode())
    (folder / "LICENSE").write_text("free")
    return folder


def read(out, cache):
    index = index_shards(find_shards(out), ["wav", "cls"], cache)
    rows = np.arange(len(index))
    return index, [
        tuple(bytes(each[row]) for each in (w, c))
        for w, c in [(ShardReader(index, "wav").read(rows), ShardReader(index, "cls").read(rows))]
        for row in rows
    ]


def test_all_files_are_packed_once_with_their_class(source, tmp_path):
    seen = []
    written = write_shards(source, tmp_path / "out", num=4, on_file=lambda done, total: seen.append((done, total)))
    assert (written.num_samples, written.classes) == (30, ("no", "up.down", "yes"))
    assert [path.name for path in written.shards] == ["0000.tar", "0001.tar", "0002.tar", "0003.tar"]
    assert json.loads((tmp_path / "out" / CLASSES).read_text()) == ["no", "up.down", "yes"]
    index, samples = read(tmp_path / "out", tmp_path / "cache")
    assert sorted(samples) == sorted(
        (f"{name}{number}".encode(), str(label).encode())
        for label, name in enumerate(written.classes)
        for number in range(10)
    )
    assert len(set(index.keys)) == 30
    assert not any("." in key or " " in key for key in index.keys)
    assert [done for done, _ in seen] == list(range(1, 31))


def test_shards_hold_equally_many_of_mixed_classes(source, tmp_path):
    write_shards(source, tmp_path / "out", num=3)
    index, _ = read(tmp_path / "out", tmp_path / "cache")
    assert Counter(index.shards.tolist()) == {0: 10, 1: 10, 2: 10}
    first = [key.split("/")[0] for key, shard in zip(index.keys, index.shards, strict=True) if shard == 0]
    assert len(set(first)) > 1


def test_names_that_would_be_one_key_are_kept_apart(tmp_path):
    folder = tmp_path / "wavs" / "yes"
    folder.mkdir(parents=True)
    for name in ("a.b.wav", "a_b.wav", "a b.WAV"):
        (folder / name).write_bytes(name.encode())
    write_shards(tmp_path / "wavs", tmp_path / "out", num=1)
    index, samples = read(tmp_path / "out", tmp_path / "cache")
    assert len(set(index.keys)) == len(index) == 3
    assert {wav for wav, _ in samples} == {b"a.b.wav", b"a_b.wav", b"a b.WAV"}


def test_there_is_a_file_at_least_in_each_shard(source, tmp_path):
    with pytest.raises(ConfigError, match="--num 0"):
        write_shards(source, tmp_path / "out", num=0)
    assert len(write_shards(source, tmp_path / "out", num=31).shards) == 30


def test_a_folder_that_holds_something_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        write_shards(source, tmp_path / "out", num=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_no_files_are_told_with_what_is_there(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"1")
    with pytest.raises(DataError, match=r"no \*\.wav in folders of classes"):
        write_shards(tmp_path, tmp_path / "out", num=1)
    with pytest.raises(DataError, match="does not exist"):
        write_shards(tmp_path / "nowhere", tmp_path / "out", num=1)


def test_an_interrupted_packing_leaves_nothing(source, tmp_path):
    def stop(done, total):
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(source, tmp_path / "out", num=2, on_file=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wavs"]


def test_splits_become_folders_of_shards_whose_classes_have_the_same_numbers(tmp_path):
    for name in ("train/no", "train/yes", "test/yes", "valid/yes"):
        (tmp_path / "wavs" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "wavs" / name / f"{number}.wav").write_bytes(name.encode())
    written = write_shards(tmp_path / "wavs", tmp_path / "out", num=2)
    assert written.classes == ("no", "yes")
    assert [path.relative_to(tmp_path / "out").as_posix() for path in written.shards] == [
        f"{split}/000{number}.tar" for split in ("test", "train") for number in range(2)
    ]
    _, samples = read(tmp_path / "out" / "test", tmp_path / "cache")
    assert samples == [(b"test/yes", b"1")] * 3


def test_lists_of_splits_come_along_and_what_is_no_class_does_not(source, tmp_path):
    (source / "_background_noise_").mkdir()
    (source / "_background_noise_" / "rain.wav").write_bytes(b"1")
    (source / "empty").mkdir()
    (source / "testing_list.txt").write_text("yes/1.wav")
    written = write_shards(source, tmp_path / "out")
    assert written.classes == ("no", "up.down", "yes")
    assert (tmp_path / "out" / "testing_list.txt").read_text() == "yes/1.wav"

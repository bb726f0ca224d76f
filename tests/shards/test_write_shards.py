import json
from collections import Counter

import numpy as np
import pytest

from wellfed.errors import ConfigError, DataError
from wellfed.shards.shard_index import find_shards, index_shards
from wellfed.shards.shard_reader import ShardReader
from wellfed.shards.write_shards import CLASSES, write_shards


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
    assert [reason.split(": ")[1] for reason in written.skipped] == ["not .wav"]
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


def test_the_same_again_is_the_same_and_another_seed_is_not(source, tmp_path):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_shards(source, tmp_path / out, num=2, seed=seed)
    a, b, c = ((tmp_path / out / "0000.tar").read_bytes() for out in "abc")
    assert a == b
    assert a != c


def test_names_that_would_be_one_key_are_kept_apart(tmp_path):
    folder = tmp_path / "wavs" / "yes"
    folder.mkdir(parents=True)
    for name in ("a.b.wav", "a_b.wav", "a b.WAV"):
        (folder / name).write_bytes(name.encode())
    write_shards(tmp_path / "wavs", tmp_path / "out", num=1)
    index, samples = read(tmp_path / "out", tmp_path / "cache")
    assert len(set(index.keys)) == len(index) == 3
    assert {wav for wav, _ in samples} == {b"a.b.wav", b"a_b.wav", b"a b.WAV"}


@pytest.mark.parametrize("num", [0, 31])
def test_a_number_of_shards_that_cannot_be_is_refused(source, tmp_path, num):
    with pytest.raises(ConfigError, match=f"--num {num}"):
        write_shards(source, tmp_path / "out", num=num)


def test_a_folder_that_holds_something_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is not empty"):
        write_shards(source, tmp_path / "out", num=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_no_files_are_told_with_what_is_there(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"1")
    with pytest.raises(DataError, match=r"no \*\.wav in folders of classes .*in no folder of a class"):
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

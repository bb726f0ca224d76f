import numpy as np
import pytest

from tests.workloads.speech.recordings import folder, shard, tone, wav
from wellfed import DataError
from wellfed.data.shards import write_shards
from workloads.speech.clip_files import find_clips


def sounds(found):
    sizes = [found.reader.size(row) for row in range(len(found.names))]
    targets = [np.empty(size, np.uint8) for size in sizes]
    found.reader.fill(np.arange(len(sizes)), targets)
    return [bytes(each) for each in targets]


def test_a_folder_of_classes(tmp_path):
    place = folder(tmp_path / "wavs")
    (place / "_background_noise_").mkdir()
    (place / "_background_noise_" / "rain.wav").write_bytes(wav(tone()))
    (place / "yes" / "notes.txt").write_text("x")
    (place / "lost.wav").write_bytes(wav(tone()))
    found = find_clips(place, tmp_path / "cache")
    assert found.names[0] == "no/s0_nohash_0"
    assert found.labels == ["no"] * 16 + ["yes"] * 16
    assert found.classes == ["no", "yes"]
    assert sounds(found)[0] == (place / "no" / "s0_nohash_0.wav").read_bytes()
    said = " ".join(found.notes)
    assert "_background_noise_" in said
    assert "1 recording in no folder of a class" in said
    assert "1 other file left out: .txt" in said


def test_lists_and_folders_of_splits_are_used_as_such(tmp_path):
    place = folder(tmp_path / "listed", of_each=1)
    (place / "testing_list.txt").write_text("yes/s0_nohash_0.wav\n")
    (place / "validation_list.txt").write_text("no/s1_nohash_0.wav\nno/gone.wav\n")
    found = find_clips(place, tmp_path)
    of_split = dict(zip(found.names, found.splits, strict=True))
    assert of_split["yes/s0_nohash_0"] == "test"
    assert of_split["no/s1_nohash_0"] == "val"
    assert list(of_split.values()).count("train") == 14
    for split in ("train", "test"):
        folder(tmp_path / "split" / split, of_each=1)
    found = find_clips(tmp_path / "split", tmp_path)
    assert found.splits == ["train"] * 16 + ["test"] * 16
    assert found.classes == ["no", "yes"]


def test_what_a_packer_is_given_a_reader_finds_again(tmp_path):
    place = folder(tmp_path / "a.b: wavs", classes=("up down", "no"), of_each=1)
    (place / "testing_list.txt").write_text("up down/s0_nohash_0.wav\r\nno/gone.wav\n")
    write_shards(place, tmp_path / "shards", num=2)
    for kind in (place, tmp_path / "shards"):
        found = find_clips(kind, tmp_path / "cache")
        split_of = dict(zip(found.names, found.splits, strict=True))
        assert [name.replace("_down", " down") for name in split_of if split_of[name] == "test"] == [
            "up down/s0_nohash_0"
        ]
        assert (sorted(found.labels), found.classes) == (["no"] * 8 + ["up down"] * 8, ["no", "up down"])
        assert found.notes == ["1 clip of validation_list.txt, testing_list.txt not there"]


def test_nothing_to_find(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        find_clips(tmp_path / "nowhere", tmp_path)
    (tmp_path / "a.wav").write_bytes(wav(tone()))
    with pytest.raises(DataError, match=r"neither a folder nor a \.tar"):
        find_clips(tmp_path / "a.wav", tmp_path)
    with pytest.raises(DataError, match=r"no recordings in folders of classes.* 1 recording in no folder"):
        find_clips(tmp_path, tmp_path)
    (tmp_path / "0.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.tar\.gz is compressed: unpack it"):
        find_clips(tmp_path, tmp_path)
    (tmp_path / "classes.json").write_text("{}")
    shard(tmp_path / "0.tar", [("1.wav", wav(tone())), ("1.cls", b"0")])
    with pytest.raises(DataError, match=r"classes\.json is no list of names"):
        find_clips(tmp_path, tmp_path)

import json
import os
import sys

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


def test_shards_of_each_split_may_have_names_of_their_own(tmp_path):
    for split, names in (("train", ["no", "yes"]), ("test", ["yes"])):
        shard(tmp_path / split / "0.tar", [("1.wav", wav(tone())), ("1.cls", b"0")])
        (tmp_path / split / "classes.json").write_text(json.dumps(names))
    (tmp_path / "valid").mkdir()
    found = find_clips(tmp_path, tmp_path / "cache")
    assert (found.labels, found.splits, found.classes) == (["no", "yes"], ["train", "test"], ["no", "yes"])
    assert found.notes == ["folders beside train, test left out: cache, valid"]


def test_names_of_classes_beside_one_split_alone_are_refused(tmp_path):
    shard(tmp_path / "train" / "0.tar", [("1.wav", wav(tone())), ("1.cls", b"no")])
    shard(tmp_path / "test" / "0.tar", [("1.wav", wav(tone())), ("1.cls", b"0")])
    (tmp_path / "test" / "classes.json").write_text('["yes"]')
    with pytest.raises(DataError, match=r"test/classes\.json names .* beside those of train there is no classes\.json"):
        find_clips(tmp_path, tmp_path / "cache")


def test_numbers_as_names_of_classes_are_in_the_order_of_their_size(tmp_path):
    place = folder(tmp_path / "wavs", classes=("2", "10", "1"), of_each=1)
    write_shards(place, tmp_path / "shards", num=1)
    for kind in (place, tmp_path / "shards"):
        assert find_clips(kind, tmp_path / "cache").classes == ["1", "2", "10"]


def test_what_lies_in_shards_and_beside_them_unused_is_said(tmp_path):
    shard(tmp_path / "0.tar", [("x.wav", wav(tone())), ("x.cls", b"0"), ("x.2.wav", wav(tone())), ("x.2.cls", b"1")])
    (tmp_path / "1.tar.gz").write_bytes(b"")
    found = find_clips(tmp_path, tmp_path / "cache")
    assert found.names == ["x"]
    assert found.notes[0].startswith("2 members with a dot within the name left out: ")
    assert found.notes[1] == f"compressed, and left out: {tmp_path / '1.tar.gz'}"
    with pytest.raises(DataError, match=r"1\.tar\.gz is compressed\. Unpack it"):
        find_clips(tmp_path / "1.tar.gz", tmp_path / "cache")


def test_facts_beside_a_label_do_not_hide_it(tmp_path):
    place = shard(tmp_path / "0.tar", [("x.wav", wav(tone())), ("x.json", b'{"sr": 16000}'), ("x.txt", b"yes")])
    found = find_clips(place, tmp_path / "cache")
    assert (found.labels, found.bad) == (["yes"], [])


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that not even root can read")
def test_a_list_that_can_not_be_read_is_told(tmp_path):
    place = folder(tmp_path / "wavs", of_each=1)
    (place / "testing_list.txt").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"testing_list\.txt can't be read: Input/output error"):
        find_clips(place, tmp_path / "cache")


def test_folders_beside_shards_are_said(tmp_path):
    shard(tmp_path / "0.tar", [("1.wav", wav(tone())), ("1.cls", b"0")])
    folder(tmp_path, classes=["yes"])
    assert find_clips(tmp_path, tmp_path / "yes" / "cache").notes == ["folders beside the shards left out: yes"]


def test_folders_that_are_empty_or_named_as_no_text_are_said(tmp_path):
    for name in (b"\xff", b"yes"):
        (tmp_path / os.fsdecode(name)).mkdir()
        (tmp_path / os.fsdecode(name) / "1.wav").write_bytes(wav(tone()))
    (tmp_path / "no").mkdir()
    (tmp_path / "yes" / "2.wav").symlink_to(tmp_path / "gone.wav")
    found = find_clips(tmp_path, tmp_path / "cache")
    assert found.classes == ["\\xff", "yes"]
    assert found.notes == ["folders without a recording: no", "1 other file left out: links to nothing"]


@pytest.mark.parametrize(
    ("part", "content"), [("cls", "1"), ("txt", " 1\n"), ("json", '{"label": 1, "x": 2}'), ("json", '"1"')]
)
def test_labels_of_shards(tmp_path, part, content):
    shard(tmp_path / "a" / "0.tar", [("x/1.wav", wav(tone())), (f"x/1.{part}", content.encode())])
    found = find_clips(tmp_path / "a", tmp_path / "cache")
    assert (found.names, found.labels, found.classes, found.bad) == (["x/1"], ["1"], ["1"], [])
    (tmp_path / "a" / "classes.json").write_text(json.dumps(["no", "yes"]))
    found = find_clips(tmp_path / "a", tmp_path / "cache")
    assert (found.labels, found.classes) == (["yes"], ["no", "yes"])


def test_what_a_sample_lacks_is_told_with_its_place(tmp_path):
    members = [("1.wav", wav(tone())), ("1.cls", b"0"), ("2.wav", wav(tone())), ("3.cls", b"0")]
    members += [("4.wav", wav(tone())), ("4.json", b"{}"), ("5.wav", wav(tone())), ("5.cls", b"7")]
    members += [("6.wav", wav(tone())), ("6.txt", b"maybe")]
    place = shard(tmp_path / "0.tar", members)
    (tmp_path / "classes.json").write_text('["no"]')
    found = find_clips(place, tmp_path / "cache")
    assert found.names == ["1"]
    assert [each.removeprefix(f"{place}: ") for each in found.bad] == [
        "3: no sound (wav, flac, ogg)",
        "2: no label (cls, json, txt)",
        "4.json: no class can be read from it",
        "5: its class is 7, and classes.json has 1",
        "6: its class is maybe, and classes.json has 1",
    ]


def test_a_damaged_shard_is_refused_by_its_name(tmp_path):
    place = shard(tmp_path / "0.tar", [(f"{number}.{part}", b"1") for number in range(9) for part in ("wav", "cls")])
    place.write_bytes(place.read_bytes()[: 4 * 1024])
    with pytest.raises(DataError, match=r"0\.tar"):
        find_clips(place, tmp_path / "cache")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("1.wav", b"RIFF")], "no sample has a label"),
        ([("1.cls", b"0")], "no sample has sound"),
        ([("1.png", b"0")], "no member of 1 shard ends in"),
    ],
)
def test_a_shard_that_has_nothing_to_use(tmp_path, members, said):
    shard(tmp_path / "0.tar", members)
    with pytest.raises(DataError, match=said):
        find_clips(tmp_path, tmp_path / "cache")


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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed import DataError
from workloads.speech.splits import SPEAKER, choose_splits


def chosen(names, told=None, val=0.1, test=0.1):
    return choose_splits(names, told, speaker=SPEAKER, val_frac=val, test_frac=test, seed=0)


@given(
    st.lists(st.integers(0, 30), min_size=40, max_size=120).filter(lambda found: len(set(found)) > 9), st.floats(0, 0.4)
)
def test_no_speaker_is_in_two_splits(speakers, frac):
    names = [f"yes/{speaker}_nohash_{number}" for number, speaker in enumerate(speakers)]
    splits, notes = chosen(names, val=frac, test=frac)
    of_speaker = {}
    for speaker, split in zip(speakers, splits, strict=True):
        assert of_speaker.setdefault(speaker, split) == split
    assert set(splits) == ({"train", "val", "test"} if frac else {"train"})
    assert bool(notes) == bool(frac)


def test_what_is_told_stays_and_what_is_missing_is_taken_from_training():
    names = [f"yes/{number}" for number in range(50)]
    told = ["test"] * 10 + ["train"] * 40
    splits, _ = chosen(names, told)
    assert splits[:10] == ["test"] * 10
    assert splits[10:].count("val") == 4
    assert splits.count("test") == 10


def test_too_few_to_split():
    with pytest.raises(DataError, match="2 speakers can't be split"):
        chosen(["a/x_nohash_0", "a/x_nohash_1", "a/y_nohash_0"])
    with pytest.raises(DataError, match="1 clip can't be split"):
        chosen(["a/x"])
    assert chosen(["a/x_nohash_0", "b/y_nohash_0", "a/z_nohash_0"])[0].count("train") == 1


def test_speakers_that_what_is_told_has_on_both_sides_are_said():
    names = [f"yes/{speaker}_nohash_{number}" for speaker in "abc" for number in range(4)]
    _, (note,) = chosen(names, ["train", "train", "test", "test"] * 3, val=0.3)
    assert note.startswith("3 speakers of 3 in more than one split, a among them")
    _, (note,) = chosen(names, ["train"] * 8 + ["test"] * 4, val=0.3)
    assert note == "split by speaker: 3 speakers, none in two splits"

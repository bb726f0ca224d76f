from pathlib import Path

import pytest
from hypothesis import strategies as st

from wellfed import DataError
from workloads.recsys.movielens import read_movielens


def test_both_layouts_give_the_same_interactions(ml_1m: Path, ml_100k: Path):
    for folder in (ml_1m, ml_100k):
        read = read_movielens(folder, 0)
        assert read.users.tolist() == [0, 0, 0, 1, 1, 1]
        assert read.items.tolist() == [0, 1, 2, 2, 0, 1]
        assert read.ratings.tolist() == [5, 3, 4, 1, 2, 5]
        assert read.times.tolist() == [100, 101, 102, 50, 60, 70]
        assert read.user_texts == ["female, age group 25, programmer", "male, age group 56, other"]
        assert read.item_texts == [
            "Heat, 1990s. Action, Crime",
            "Les Misérables, 1990s. Drama",
            "The American President, 1990s. Comedy",
        ]
        assert read.notes == ()


BAD_RATINGS = [
    ("1\t10\t5", "3 fields instead of 4"),
    ("1\t10\t5\t1\t1", "5 fields instead of 4"),
    ("1\t10\tx\t1", "a field is no whole number"),
    ("1\t10\t-1\t1", "a field is no whole number"),
    ("1\t10\t5\t" + "9" * 30, "a field is no whole number"),
    ("9\t10\t5\t1", "unknown user id"),
    ("1\t99\t5\t1", "unknown item id"),
    ("1\t10\t6\t1", "rating outside 1..5"),
    ("1\t10\t0\t1", "rating outside 1..5"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_RATINGS)
def test_a_bad_rating_is_skipped_with_a_note_of_its_place(ml_100k: Path, line: str, reason: str):
    file = ml_100k / "u.data"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    read = read_movielens(ml_100k, 1)
    assert len(read.users) == 6
    assert read.notes == (f"1 bad line skipped, the first: {file}, line 3: {reason}: {line[:80]!r}",)


def test_too_many_bad_lines_stop_the_reading_and_name_the_first(ml_100k: Path):
    file = ml_100k / "u.data"
    file.write_text(file.read_text() + "first bad\n" + "bad\n" * 2)
    assert read_movielens(ml_100k, 3).notes[0].startswith("3 bad lines")
    with pytest.raises(DataError) as caught:
        read_movielens(ml_100k, 2)
    assert "max_bad_lines=2" in str(caught.value)
    assert f"{file}, line 7: 1 field instead of 4: 'first bad'" in str(caught.value)
    assert "(python -m workloads.recsys.download ml-100k)" in str(caught.value)


field = st.one_of(st.integers(0, 10**6).map(str), st.sampled_from(["", "x", "-1", "1 ", "٣", "1.5", "9" * 25]))
lines = st.lists(st.lists(field, min_size=3, max_size=5).map("\t".join), max_size=8)

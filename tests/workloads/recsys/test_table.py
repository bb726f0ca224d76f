from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wellfed import Datasets, SampleRng
from workloads.recsys.data import datasets
from workloads.recsys.table import read_table

ROWS = [
    ("ann", "tea", 5, 30),
    ("ann", "milk", 3, 10),
    ("ann", "rice", 4, 20),
    ("bo", "rice", 1, 3),
    ("bo", "tea", 2, 2),
]
ROWS += [("bo", "salt", 2, 1), ("bo", "milk", 5, 4)]


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows of text into a file, below the names if there are any."""

    def writing(names: str = "user,item,rating,time", rows=ROWS, separator: str = ",", name: str = "t.csv") -> Path:
        lines = [names.replace(",", separator)] if names else []
        lines += [separator.join(map(str, row)) for row in rows]
        file = tmp_path / name
        file.write_text("\n".join(lines) + "\n")
        return file

    return writing


def held_out(data: Datasets) -> list[tuple[int, int]]:
    val, test = data.val.fetch(torch.arange(2)), data.test.fetch(torch.arange(2))
    return list(zip(val["target"].tolist(), test["target"].tolist(), strict=True))


@pytest.mark.parametrize(
    ("names", "separator"),
    [
        ("user,item,rating,time", ","),
        ("User ID,Item_Id,Stars,Timestamp", "\t"),
        ("user_id:token,item_id:token,rating:float,timestamp:float", "\t"),
        ("customer,product,score,date", ";"),
        ("userId,movieId,rating,timestamp", ","),
    ],
)
def test_columns_are_found_by_usual_names(put: Callable[..., Path], names: str, separator: str):
    found = read_table(put(names, separator=separator), 0, 0)
    assert (len(found.user_texts), len(found.item_texts), len(found.users)) == (2, 4, 7)
    made = datasets(str(put(names, separator=separator)))
    assert held_out(made) == [(1, 3), (1, 0)]  # items by name: milk, rice, salt, tea
    assert made.derived["workload.model.text"] == ("none", "users and items have no sentences")


@pytest.mark.parametrize(
    ("ratings", "least"), [([-3, 0, 2.5, 4], 2.5), ([0, 1, 1, 1], 1.0), ([1, 2, 3, 4], None), ([0.5, 1, 2, 3], None)]
)
def test_ratings_of_0_and_below_are_no_choice(put: Callable[..., Path], ratings: list[float], least: float | None):
    rows = [(user, item, ratings[item % 4]) for user in range(5) for item in range(20)]
    made = datasets(str(put("user,item,rating", rows)), passes=1)
    assert made.derived.get("workload.data.min_rating", (None,))[0] == least
    kept = sum(rating >= (least or -9) for rating in ratings) * 5
    typed = datasets(str(put("user,item,rating", rows)), passes=1, min_rating=least or 0)
    assert "workload.data.min_rating" not in typed.derived
    for each in (made, typed):
        items = each.train.fetch(torch.arange(len(each.train)), SampleRng(0, 0))["pos"]
        assert len(items) == 5 * (kept - 2)


def test_bad_rows_are_counted(put: Callable[..., Path]):
    made = datasets(str(put(rows=[*ROWS, ("ann", "", 1, 1), ("bo", "tea", 4, "soon")])), max_bad_lines=2)
    assert made.notes[2] == "2 bad rows skipped, the first: row 8 after the names: no item: 'ann, , 1, 1'"

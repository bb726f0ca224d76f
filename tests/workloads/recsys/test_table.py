from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from wellfed import Datasets, SampleRng
from workloads.recsys.data import FULL_EPOCH, build, datasets
from workloads.recsys.interactions import Interactions
from workloads.recsys.table import read_table

ROWS = [
    ("ann", "tea", 5, 30),
    ("ann", "milk", 3, 10),
    ("ann", "rice", 4, 20),
    ("bo", "rice", 1, 3),
    ("bo", "tea", 2, 2),
]
ROWS += [("bo", "salt", 2, 1), ("bo", "milk", 5, 4)]
Read = Callable[..., Interactions]


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


def test_dates_are_times(put: Callable[..., Path]):
    rows = [(user, item, f"2024-01-{time:02}T10:00:00") for user, item, _, time in ROWS]
    assert held_out(datasets(str(put("user,item,date", rows)))) == [(1, 3), (1, 0)]


def test_without_times_the_last_item_is_drawn(put: Callable[..., Path]):
    rows = [(user, item) for user in range(40) for item in range(12)]
    tests = [datasets(str(put("user,item", rows[:-1])), seed=seed) for seed in (0, 0, 1)]
    targets = [made.test.fetch(torch.arange(40))["target"].tolist() for made in tests]
    assert targets[0] == targets[1] != targets[2]
    assert len(set(targets[0])) > 5
    assert "no column of times: a random item of each user is the last one" in "".join(tests[0].notes)


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


@pytest.mark.parametrize(
    ("size", "l2", "of_text"),
    [(30, 0.05, 0.05), (300, 0.0071, 0.0141), (3000, 0.0025, 0.005), (FULL_EPOCH, 0.0025, 0.005)],
)
def test_fewer_interactions_are_passed_more_often_and_regularised_more(size: int, l2: float, of_text: float):
    users, items = np.arange(size + 60) % 30, np.arange(size + 60) // 30
    found = Interactions(users, items, None, np.arange(size + 60), [""] * 30, [""] * (size // 30 + 3))
    made = build(found)
    passes, reason = made.derived["workload.data.passes"]
    assert passes == round((FULL_EPOCH / size) ** 0.5)
    assert f"{size:,} training interactions" in reason
    value, reason = made.derived["workload.model.l2"]
    assert value == l2
    assert f"no sentences; {size / 30:.1f} training interactions a user" in reason
    with_texts = replace(found, user_texts=["a student"] * 30)
    value, reason = build(with_texts).derived["workload.model.l2"]
    assert value == of_text
    assert reason.startswith("sentences; ")
    value, reason = build(with_texts, text="none").derived["workload.model.l2"]
    assert value == l2
    assert reason.startswith("sentences unused; ")
    assert len(made.train) == passes * size
    again = made.train.fetch(torch.tensor([1, 1 + size]) % len(made.train), SampleRng(0, 0))
    assert again["pos"][0] == again["pos"][1]
    assert again["user"][0] == again["user"][1]
    typed = build(found, passes=2)
    assert len(typed.train) == 2 * size
    assert "workload.data.passes" not in typed.derived


def test_bad_rows_are_counted(put: Callable[..., Path]):
    made = datasets(str(put(rows=[*ROWS, ("ann", "", 1, 1), ("bo", "tea", 4, "soon")])), max_bad_lines=2)
    assert made.notes[2] == "2 bad rows skipped, the first: row 8 after the names: no item: 'ann, , 1, 1'"

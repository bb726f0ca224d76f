import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed import DataError
from workloads.recsys.interactions import Interactions, leave_last_out


def make(rows: list[tuple[int, int, int, int]], users: int = 4, items: int = 5) -> Interactions:
    """Rows of user, item, rating, time."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Interactions(*table.T, user_texts=["u"] * users, item_texts=["i"] * items)


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5), st.integers(0, 3)), max_size=30)


@given(rows=rows, min_rating=st.sampled_from([None, 3]))
def test_split_agrees_with_a_plain_one(rows, min_rating):
    train, held = [], []
    for user in range(4):
        mine = [
            (time, place, item) for place, (u, item, r, time) in enumerate(rows) if u == user and r >= (min_rating or 0)
        ]
        latest = {item: (time, place) for time, place, item in sorted(mine)}
        items = sorted(latest, key=lambda item: latest[item])
        if len(items) >= 3:
            held.append((user, items[-2], items[-1]))
            items = items[:-2]
        train += [(user, item) for item in items]
    if not held:
        with pytest.raises(DataError, match="no user has 3 interactions"):
            leave_last_out(make(rows), min_rating)
        return
    split = leave_last_out(make(rows), min_rating)
    assert list(zip(split.users, split.items, strict=True)) == train
    assert list(zip(split.evaluated_users, split.val_items, split.test_items, strict=True)) == held


def test_equal_times_are_ordered_by_their_place_in_the_file():
    split = leave_last_out(make([(0, 4, 5, 7), (0, 2, 5, 7), (0, 3, 5, 7)]), None)
    assert (split.items.tolist(), split.val_items.tolist(), split.test_items.tolist()) == ([4], [2], [3])


def test_what_is_left_out_is_counted():
    rows = [(0, i, 5, i) for i in range(4)] + [(0, 0, 5, 0), (1, 0, 5, 0), (1, 1, 2, 1), (2, 1, 1, 1)]
    split = leave_last_out(make(rows), 2)
    assert split.notes == (
        "7 of 8 ratings are >= 2",
        "1 repeated (user, item) pair: the latest of each is kept",
        "1 user with fewer than 3 interactions: trained on, not evaluated",
    )


def test_nobody_left_names_the_threshold():
    with pytest.raises(DataError, match=r"or lower workload\.data\.min_rating=5"):
        leave_last_out(make([(0, i, 4, i) for i in range(4)]), 5)

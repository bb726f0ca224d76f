import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed import DataError, SampleRng
from workloads.recsys.triplets import NegativeSampler, TripletData


class Given(SampleRng):
    """Hands out the index itself as its random integer, and notes the bound."""

    def randint_at(self, indices, high, draw=0):
        assert (indices < high).all()
        return indices.clone()


chosen_by_user = st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=5)


@given(chosen=chosen_by_user, table_cells=st.sampled_from([0, 1000]))
def test_every_item_not_chosen_is_drawn_by_exactly_one_random_number(chosen: list[set[int]], table_cells: int):
    pairs = np.array([(u, i) for u, items in enumerate(chosen) for i in items], dtype=np.int64).reshape(-1, 2)
    sampler = NegativeSampler(*pairs.T, num_users=len(chosen), num_items=7, table_cells=table_cells)
    assert sampler.num_free_U.tolist() == [7 - len(items) for items in chosen]
    for user, items in enumerate(chosen):
        numbers = torch.arange(7 - len(items))
        drawn = sampler.draw(torch.full_like(numbers, user), numbers, Given(0, 0))
        assert drawn.tolist() == sorted(set(range(7)) - items)


@pytest.fixture
def data() -> TripletData:
    rng = np.random.default_rng(0)
    pair = rng.choice(20 * 30, size=200, replace=False)
    return TripletData(pair // 30, pair % 30, num_users=20, num_items=30)


def test_a_negative_is_a_function_of_seed_epoch_and_index(data: TripletData):
    everything = data.fetch(torch.arange(200), SampleRng(1, 2))
    some = torch.tensor([150, 3, 77])
    batch = data.fetch(some, SampleRng(1, 2, 9, 3))
    for name in ("user", "pos", "neg"):
        assert torch.equal(batch[name], everything[name][some])
    for other in (SampleRng(1, 3), SampleRng(2, 2)):
        assert (data.fetch(torch.arange(200), other)["neg"] != everything["neg"]).float().mean() > 0.8


def test_users_who_chose_everything_are_left_out_with_a_note():
    user, item = np.array([0, 0, 0, 1]), np.array([0, 1, 2, 1])
    data = TripletData(user, item, num_users=2, num_items=3)
    assert len(data) == 1
    assert data.fetch(torch.tensor([0]), SampleRng(0, 0))["user"].tolist() == [1]
    assert data.notes[0].startswith("3 interactions of users who chose every item")
    one = TripletData(
        np.array([0, 1]), np.array([0, 1]), num_users=2, num_items=2, avoid=(user[[0, 0, 3]], item[[0, 1, 3]])
    )
    assert one.notes == ("1 interaction of users who chose every item, left out of training: no negatives",)
    with pytest.raises(DataError, match="All 3 training interactions are of users who chose every one of the 3 items"):
        TripletData(user[:3], item[:3], num_users=1, num_items=3)

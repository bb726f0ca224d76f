import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed.data.epoch_order import LISTED, EpochOrder
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.sample_rng import seed_from

sizes = {"num_samples": st.integers(1, 60), "batch_size": st.integers(1, 20), "world_size": st.integers(1, 5)}


def orders(num_samples, batch_size, *, world_size=1, **more):
    return [
        EpochOrder(num_samples, batch_size, seed=3, rank=rank, world_size=world_size, **more)
        for rank in range(world_size)
    ]


@given(**sizes, drop_last=st.booleans(), shuffle=st.booleans(), skip=st.sets(st.integers(-3, 70), max_size=10))
def test_over_all_ranks_an_epoch_is_every_kept_sample_once(
    num_samples, batch_size, world_size, drop_last, shuffle, skip
):
    ranks = orders(
        num_samples, batch_size, world_size=world_size, drop_last=drop_last, shuffle=shuffle, skip_ids=tuple(skip)
    )
    kept = sorted(set(range(num_samples)) - skip)
    seen = []
    for batch in range(ranks[0].num_batches):
        shares = [order.share(5, batch) for order in ranks]
        real = [share for share in shares if not share.is_padding]
        indices = torch.cat([share.indices for share in real]).tolist()
        assert all(len(share.indices) >= 1 for share in shares)
        assert {share.total for share in shares} == {len(indices)}
        if len(indices) >= world_size:
            assert len(real) == world_size
            assert max(len(share.indices) for share in real) - min(len(share.indices) for share in real) <= 1
        assert all(share.indices.tolist()[0] in indices for share in shares)  # padding is a sample of the step
        seen += indices
    whole = len(kept) - len(kept) % batch_size if drop_last else len(kept)
    assert len(seen) == len(set(seen)) == whole
    assert set(seen) <= set(kept)
    if not shuffle:
        assert seen == kept[:whole]


@given(**sizes)
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(num_samples, batch_size, world_size):
    (alone,) = orders(num_samples, batch_size)
    ranks = orders(num_samples, batch_size, world_size=world_size)
    for batch in range(alone.num_batches):
        shares = [order.share(2, batch) for order in ranks]
        together = torch.cat([share.indices for share in shares if not share.is_padding])
        assert together.equal(alone.share(2, batch).indices)


def test_epochs_and_seeds_have_orders_of_their_own_and_each_stays_the_same():
    one = EpochOrder(50, 10, seed=1)
    first, second = one.order(0).clone(), one.order(1).clone()
    assert not first.equal(second)
    assert one.order(0).equal(first)
    assert EpochOrder(50, 7, seed=1).order(1).equal(second)
    assert not EpochOrder(50, 10, seed=2).order(0).equal(first)


def test_unshuffled_every_epoch_is_the_first():
    order = EpochOrder(5, 2, seed=1, shuffle=False)
    assert order.order(0).tolist() == order.order(7).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("limit", "number"), [(None, 5), (2, 2), (99, 5)])
def test_a_limit_on_batches(limit, number):
    assert EpochOrder(10, 2, seed=1, limit_batches=limit).num_batches == number


def test_ids_that_are_none_of_the_data_skip_nothing():
    assert EpochOrder(4, 2, seed=1, skip_ids=(-1, 4, 9)).num_batches == 2
    assert EpochOrder(4, 2, seed=1, skip_ids=(3, 3)).order(0).numel() == 3


def test_the_order_of_a_seed_stays_as_it_was_in_earlier_versions():
    drawn = torch.randperm(1000, generator=torch.Generator().manual_seed(seed_from(7, 3)))
    assert EpochOrder(1000, 10, seed=7).order(3).tolist() == drawn.tolist()


LARGE = LISTED + 5


@pytest.fixture(scope="module")
def whole():
    return EpochOrder(LARGE, 7, seed=1).order(2)


def test_a_large_set_has_each_sample_once_in_an_order_of_its_epoch(whole):
    seen = torch.zeros(LARGE, dtype=torch.bool)
    seen[whole.long()] = True
    assert len(whole) == LARGE
    assert seen.all()
    assert not whole[:4096].equal(EpochOrder(LARGE, 4096, seed=1).share(1, 0).indices)
    middles = whole[:LISTED].view(64, -1).double().mean(1) / LARGE
    assert ((middles - 0.5).abs() < 0.005).all()  # each part of the epoch has samples from all of the set
    assert (whole[1:] - whole[:-1]).abs().double().mean() > 0.3 * LARGE  # neighbours are apart


def test_steps_of_a_large_set_are_read_one_by_one_as_its_whole_order_is(whole):
    ranks = [EpochOrder(LARGE, 1000, seed=1, rank=rank, world_size=3) for rank in range(3)]
    for batch in (0, 1, 2, 9000, 20, ranks[0].num_batches - 1):
        found = torch.cat([order.share(2, batch).indices for order in ranks])
        assert found.equal(whole[1000 * batch : 1000 * (batch + 1)])


def test_a_large_set_without_shuffle_is_in_order_and_may_skip_samples():
    assert EpochOrder(LARGE, 8, seed=1, shuffle=False).share(4, 1000).indices.tolist() == [*range(8000, 8008)]
    kept = EpochOrder(LARGE, 8, seed=1, skip_ids=(3, 5))
    order = kept.order(0)
    assert len(order) == LARGE - 2
    assert not ((order == 3) | (order == 5)).any()


def test_an_epoch_of_a_large_set_that_began_in_an_earlier_version_ends_in_its_order():
    made = loader(Numbers(LARGE), batch_size=512)
    state = made.state_dict()
    assert state["is_computed"]
    made.load_state_dict({"epoch": 2, "batch": 9})
    drawn = torch.randperm(LARGE, generator=torch.Generator().manual_seed(seed_from(1, 2)))
    assert next(iter(made)).batch.tolist() == drawn[9 * 512 : 10 * 512].tolist()
    again = made.state_dict()
    assert "is_computed" not in again
    made.load_state_dict(again)
    assert next(iter(made)).batch.tolist() == drawn[10 * 512 : 11 * 512].tolist()
    made.load_state_dict({"epoch": 2, "batch": len(made)})
    assert next(iter(made)).epoch == 3
    assert made.state_dict()["is_computed"]


class Numbers:
    """Sample i is i."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return index

    def fetch(self, indices, rng):
        assert indices.dtype is torch.int64
        return indices


def loader(data, batch_size):
    return train_loader(data, LoaderSettings(), batch_size=batch_size, seed=1)

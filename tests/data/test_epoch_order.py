import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed.data.epoch_order import EpochOrder
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

import random
import statistics
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellfed.sample_rng import SampleRng, rng_of_batch, seed_from

INDICES = torch.arange(20_000)
small = st.integers(0, 2**40)


def correlation(first, second):
    return torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1].abs().item()


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_a_mixed_seed_is_one_that_every_generator_takes(parts):
    assert 0 <= seed_from(*parts) < 2**63
    assert seed_from(*parts) == seed_from(*parts)


def test_mixed_seeds_differ_by_value_place_and_number_of_parts():
    cases = [(), (0,), (0, 0), (0, 0, 0), (1, 2), (2, 1), (1, 2, 0), (12,), (-1,)]
    cases += [(seed, epoch, index) for seed in range(12) for epoch in range(12) for index in range(12)]
    assert len({seed_from(*case) for case in set(cases)}) == len(set(cases))


def test_each_bit_of_a_mixed_seed_is_set_half_of_the_time():
    values = [seed_from(1, epoch, index) for epoch in range(50) for index in range(100)]
    for bit in range(63):
        assert 0.45 < statistics.fmean(value >> bit & 1 for value in values) < 0.55


@given(seed=small, epoch=small, indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=20), draw=small)
def test_a_draw_belongs_to_the_index_whatever_the_batch(seed, epoch, indices, draw):
    together = SampleRng(seed, epoch, 3, 1).bits_at(torch.tensor(indices), draw)
    shuffled = random.Random(0).sample(range(len(indices)), len(indices))
    elsewhere = SampleRng(seed, epoch, 99)
    apart = elsewhere.bits_at(torch.tensor([indices[place] for place in shuffled]), draw)
    assert together[shuffled].tolist() == apart.tolist()
    assert together[:1].tolist() == elsewhere.bits_at(torch.tensor(indices[:1]), draw).tolist()
    assert int(together.min()) >= 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_the_type_of_the_index_does_not_matter(dtype):
    rng, indices = SampleRng(1, 2), torch.arange(100)
    assert rng.bits_at(indices.to(dtype)).equal(rng.bits_at(indices))


class Elsewhere(torch.Tensor):
    """Takes the path of tensors on a device."""


def test_host_and_device_draw_the_same():
    rng, indices = SampleRng(3, 2), torch.cat([INDICES, torch.tensor([2**62, 0])])
    assert rng.bits_at(indices, 5).equal(rng.bits_at(indices.as_subclass(Elsewhere), 5).as_subclass(torch.Tensor))
    assert rng.bits_at(indices[3]).equal(rng.bits_at(indices)[3])


def test_uniform_is_uniform():
    values = SampleRng(1, 0).uniform_at(INDICES)
    assert values.dtype == torch.float32
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi squared, 19 degrees of freedom, 0.1 %


def test_randint_stays_below_its_bound_and_takes_one_for_each_index():
    rng = SampleRng(1, 0)
    values = rng.randint_at(INDICES, 7)
    assert torch.bincount(values, minlength=7).min() > 2500
    assert values.max() == 6
    bounds = torch.randint(1, 50, (len(INDICES),))
    assert (rng.randint_at(INDICES, bounds) < bounds).all()
    assert rng.randint_at(torch.arange(6).view(2, 3), 5).shape == (2, 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 0, 0), (2, 0, 0)), ((1, 0, 0), (1, 1, 0)), ((1, 0, 0), (1, 0, 1)), ((0, 1, 0), (1, 0, 0))],
    ids=["seed", "epoch", "draw", "swapped"],
)
def test_streams_are_unrelated(first, second):
    one, two = (SampleRng(seed, epoch).uniform_at(INDICES, draw) for seed, epoch, draw in (first, second))
    assert correlation(one, two) < 0.03
    assert correlation(one[:-1], two[1:]) < 0.03


def test_neighbouring_indices_are_unrelated():
    values = SampleRng(1, 0).uniform_at(INDICES)
    for lag in (1, 2, 64):
        assert correlation(values[:-lag], values[lag:]) < 0.03


def test_draws_in_sequence_belong_to_the_batch():
    def draws(*place):
        return torch.rand(4, generator=SampleRng(*place)).tolist()

    assert draws(1, 2, 3, 4) == draws(1, 2, 3, 4)
    places = [(1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)]
    assert len({tuple(draws(*place)) for place in places}) == 5


def test_the_generator_of_a_batch_is_used_again_and_equals_a_new_one():
    first = rng_of_batch(1, 2, 3, 4)
    first.kept = "of this batch"
    torch.rand(5, generator=first), torch.randn(1, generator=first)  # half of a pair of normal numbers is left
    identity = id(first)
    del first
    second = rng_of_batch(1, 2, 4, 4)
    assert id(second) == identity
    assert not hasattr(second, "kept")
    new = SampleRng(1, 2, 4, 4)
    assert second.epoch_seed == new.epoch_seed
    assert torch.randn(5, generator=second).equal(torch.randn(5, generator=new))


def test_a_generator_that_is_kept_is_not_used_again():
    kept = rng_of_batch(1, 2, 3, 4)
    before, other = kept.get_state(), rng_of_batch(1, 2, 4, 4)
    assert other is not kept
    assert kept.get_state().equal(before)
    assert rng_of_batch(1, 2, 3, 4, torch.device("cpu")) is not other


def test_each_thread_has_its_own_generator():
    own, found = rng_of_batch(1, 2, 3, 4), []
    number = id(own)
    del own
    thread = threading.Thread(target=lambda: found.append(id(rng_of_batch(1, 2, 3, 4))))
    thread.start()
    thread.join()
    assert found != [number]
    assert id(rng_of_batch(1, 2, 3, 4)) == number

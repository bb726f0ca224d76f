import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from wellfed.batches import Delivery
from wellfed.data.longest_batch import MOST_BATCHES, longest_batch
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader


def instant():
    return 0.0


class Texts:
    """Sample ``late`` is long, all others are of 5 tokens."""

    def __init__(self, late, num=400, long=50):
        self.late, self.num, self.long = late, num, long

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((self.long if index == self.late else 5,), index)


def padded(samples):
    ids = pad_sequence(samples, batch_first=True)
    return {"ids": ids, "mask": ids > 0}


def in_order(dataset, collate=padded, size=4):
    return iter(train_loader(dataset, LoaderSettings(), batch_size=size, seed=1, collate=collate, shuffle=False))


class Taking:
    """A clock that moves on by ``s`` seconds with each batch that is taken."""

    def __init__(self, deliveries, s):
        self._deliveries, self._s, self.now_s, self.taken = deliveries, s, 0.0, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.taken += 1
        self.now_s += self._s
        return next(self._deliveries)

    def __call__(self):
        return self.now_s


def test_a_later_longer_batch_is_found():
    found = longest_batch(in_order(Texts(late=100)), instant)
    assert found.batch["ids"].shape == (4, 50)
    assert 100 in found.batch["ids"]
    assert (found.num_batches, found.shortest_bytes, found.longest_bytes) == (MOST_BATCHES, 5 * 9, 50 * 9)
    assert found.is_longer


def test_one_that_is_later_than_the_look_is_not():
    found = longest_batch(in_order(Texts(late=4 * MOST_BATCHES)), instant)
    assert not found.is_longer
    assert found.batch["ids"][0, 0] == 0


def test_bytes_of_a_sample_count_so_a_last_batch_of_few_is_found_too():
    found = longest_batch(in_order(Texts(late=8, num=9)), instant)
    assert found.batch["ids"].shape == (1, 50)
    assert found.num_batches == 3


@pytest.mark.parametrize(
    ("late", "seconds", "taken"),
    [
        (None, 0.001, 32),
        (None, 0.01, 4),  # all alike: 4 more are expected to end after 0.07 s
        (None, 0.3, 2),
        (1, 0.01, 32),
        (1, 0.05, 8),
        (1, 3.0, 2),
    ],
)
def test_time_is_bounded_and_the_number_of_batches_a_power_of_two(late, seconds, taken):
    clock = Taking(in_order(Texts(late)), seconds)
    assert longest_batch(clock, clock).num_batches == clock.taken == taken
    assert clock.now_s - seconds <= max(seconds, 0.5)


def test_a_speed_a_little_other_looks_at_the_same_batches():
    clocks = [Taking(in_order(Texts(late=1)), seconds) for seconds in (0.035, 0.05, 0.065)]
    assert {longest_batch(clock, clock).num_batches for clock in clocks} == {8}


def test_a_later_batch_that_cannot_be_built_ends_the_look():
    class Broken(Texts):
        def __getitem__(self, index):
            if index == 30:
                raise OSError("no such file")
            return super().__getitem__(index)

    found = longest_batch(in_order(Broken(late=10)), instant)
    assert (found.num_batches, found.batch["ids"].shape[1]) == (7, 50)


def test_a_first_batch_that_cannot_be_built_is_told():
    def broken():
        raise OSError("no such file")
        yield

    with pytest.raises(OSError, match="no such file"):
        longest_batch(broken())


def test_of_equal_ones_the_first_is_taken():
    made = (Delivery({"x": torch.full((2, 3), number)}, 0, number, 2) for number in range(5))
    found = longest_batch(made, instant)
    assert found.batch["x"][0, 0] == 0
    assert found.num_batches == 5

"""What a sampler gives in an epoch is the same whenever it is asked for."""

import logging
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from tests.kit.few import few
from wellfed import generators
from wellfed.data.sampled_epochs import SampledEpochs
from wellfed.errors import DataError

SIZE = 20


class Own(Sampler[int]):
    """Draws by ``kind``."""

    def __init__(self, kind="torch", length=SIZE):
        self.kind, self.length, self.epoch = kind, length, 0
        self.generator = torch.Generator().manual_seed(7)

    def __len__(self):
        return self.length

    def __iter__(self):
        if self.kind == "own":
            return iter(torch.randperm(SIZE, generator=self.generator)[: self.length].tolist())
        if self.kind == "numpy":
            return iter(np.random.permutation(SIZE))
        if self.kind == "python":
            return iter(random.sample(range(SIZE), SIZE))
        return iter(torch.randperm(SIZE))


class ByEpoch(Own):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Lists:
    """A batch sampler without a length."""

    def __init__(self, sizes=(3, 1, 2)):
        self.sizes = sizes

    def __iter__(self):
        for size in self.sizes:
            yield random.sample(range(SIZE), size)


def epochs(sampler, **more):
    return SampledEpochs(sampler, 3, SIZE, **more)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 10 + [9.0] * 10, 15),
    "replacing": lambda: RandomSampler(range(SIZE), replacement=True, generator=torch.Generator().manual_seed(1)),
    "subset": lambda: SubsetRandomSampler([3, 5, 8, 13]),
    "by epoch": ByEpoch,
    "own generator": lambda: Own("own"),
    "torch": Own,
    "numpy": lambda: Own("numpy"),
    "python": lambda: Own("python"),
    "list": lambda: [4, 2, 0],
}


@pytest.mark.parametrize("name", few(SAMPLERS, 4))
@settings(max_examples=40)
@given(asked=st.lists(st.integers(0, 4), max_size=5))
def test_an_epoch_is_the_same_in_a_run_that_begins_with_it(name, asked):
    whole = epochs(SAMPLERS[name]())
    wanted = [whole.indices(epoch).tolist() for epoch in range(5)]
    other = epochs(SAMPLERS[name]())
    for epoch in sorted(asked):
        assert other.indices(epoch).tolist() == wanted[epoch]
    if name != "list":
        assert wanted[0] != wanted[1]


def test_what_a_sampler_draws_leaves_the_generators_as_they_were():
    before = str(generators.state())
    epochs(SAMPLERS["numpy"]()).indices(2)
    epochs(SAMPLERS["weighted"]()).indices(2)
    assert str(generators.state()) == before


def test_a_batch_sampler_gives_lists():
    sampled = epochs(Lists(), in_batches=True)
    assert [len(batch) for batch in sampled.batches(1)] == [3, 1, 2]
    assert sampled.indices(1).tolist() == [index for batch in sampled.batches(1) for index in batch.tolist()]
    assert sampled.batches(0) is sampled.batches(0)


def test_epochs_of_different_lengths_are_refused():
    for sizes in ([2] * 5, [1]):
        sampler = Lists([1, 1, 1])
        sampled = epochs(sampler, in_batches=True)
        sampled.batches(0)
        sampler.sizes = sizes
        with pytest.raises(DataError, match=rf"Lists gave 3 for the first epoch and {len(sizes)} for .*loader=own"):
            sampled.batches(3)


class Unending:
    def __iter__(self):
        while True:
            yield 1


class Endless(Unending):
    def __len__(self):
        return 6


@pytest.mark.parametrize(("kind", "figure"), [(Unending, "over 2,000"), (Endless, "over 6")])
def test_a_sampler_that_does_not_end_is_refused(kind, figure):
    with pytest.raises(DataError, match=f"{kind.__name__} gave .*{figure}.*loader=own"):
        epochs(kind()).indices(0)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ([(1, 224)], r"list gave \(1, 224\) \(tuple\), and only whole numbers .*loader=own"),
        ([0.5], r"list gave 0\.5"),
        ([20], r"list gave index 20, and there are 20 samples"),
        ([-1], r"list gave index -1"),
        ([], r"list gave no indices"),
    ],
)
def test_what_is_no_index_is_told(sampler, told):
    with pytest.raises(DataError, match=told):
        epochs(sampler).indices(0)


def test_an_order_that_can_not_be_had_again_is_told(caplog):
    sampled = epochs(Own("own"))
    sampled.compare(2, sampled.checksum(2))
    assert not caplog.records
    other, events = epochs(SAMPLERS["weighted"]()), []
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # Lightning puts a loader back twice
            other.compare(2, sampled.checksum(2), lambda kind, **more: events.append((kind, more)))
    assert len(caplog.records) == 1
    assert "WeightedRandomSampler gives other samples for epoch 2 than" in caplog.text
    assert events == [("resume_inexact", {"epoch": 2})]


def test_epochs_that_were_looked_at_before_training_are_the_same_in_it():
    ahead, plain = epochs(Own("own")), epochs(Own("own"))
    for epoch in (0, 1, 2, 3, 0, 1, 2):  # loaders are timed over a few epochs, each from the first on
        ahead.indices(epoch)
    for epoch in range(5):
        assert ahead.indices(epoch).tolist() == plain.indices(epoch).tolist()


def test_few_epochs_are_kept():
    sampled = epochs(Own("own"))
    for epoch in range(9):
        sampled.indices(epoch)
    assert sorted(sampled._kept) == [0, 4, 5, 6, 7, 8]

import errno
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from tests.kit import sets
from wellfed import generators
from wellfed.data.backends.batch_builder import BatchBuilder, is_of_the_machine
from wellfed.data.backends.batch_request import BatchRequest
from wellfed.errors import DataError
from wellfed.sample_rng import SampleRng


def test_global_draws_differ_by_seed_epoch_and_index():
    def draw(seed, epoch, index):
        return BatchBuilder(sets.Global(), seed).item(epoch, index).tolist()[1:]

    assert draw(1, 0, 0) == draw(1, 0, 0)
    others = [draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1)]
    for values in zip(draw(1, 0, 0), *others, strict=True):
        assert len(set(values)) == 4


def test_a_collate_that_draws_depends_on_seed_epoch_and_batch_alone():
    def masked(samples):
        return torch.rand(len(samples))

    def draw(seed, epoch, batch, rank=0):
        request = BatchRequest(epoch, batch, torch.arange(4))
        return BatchBuilder(sets.Global(), seed, rank, masked)(request).batch.tolist()

    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = draw(1, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)  # training draws from it too
    torch.manual_seed(8)
    assert draw(1, 0, 0) == first
    others = [draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1), draw(1, 0, 0, rank=1)]
    for values in zip(first, *others, strict=True):
        assert len(set(values)) == 5


@pytest.mark.parametrize("takes_rng", [False, True])
def test_the_sample_that_took_longest_is_known(takes_rng):
    class Slow(list):
        def __getitem__(self, index, rng=None):
            if index == 6:
                time.sleep(0.02)
            return torch.tensor(index)

    class SlowWithRng(Slow):
        def __getitem__(self, index, rng: SampleRng):
            return super().__getitem__(index)

    data = (SlowWithRng if takes_rng else Slow)(range(9))
    took = BatchBuilder(data, 0)(BatchRequest(0, 0, torch.tensor([2, 6, 8]))).took
    assert took.slowest_index == 6
    assert 20 <= took.slowest_ms <= took.wall_ms


def test_of_whole_batches_no_sample_is_known_to_be_slow():
    took = BatchBuilder(sets.Fetching(), 0)(BatchRequest(0, 0, torch.arange(4))).took
    assert (took.slowest_ms, took.slowest_index) == (None, None)


class Ragged(sets.BreakingItems):
    """Sample i is of i numbers, and number 3 is none."""

    def __getitem__(self, index, rng):
        return {"x": torch.zeros(2 if index < 5 else index), "y": None if index == 3 else 1}


def pad(samples):
    return nn.utils.rnn.pad_sequence([sample["x"] + sample["y"] for sample in samples])


@pytest.mark.parametrize(
    ("indices", "parts"),
    [
        ([1, 6, 2], ["sample 6 ", "training batch 3 of epoch 2", "{x [6] float32, y int}", "x [2]", "Datasets.col"]),
        ([1, 2, 3], ["sample 3 ", "y NoneType", "sample 1 is {x [2] float32, y int}"]),
        ([3], ["sample 3 ", "NoneType"]),
    ],
)
def test_a_sample_that_can_not_be_collated_is_named(indices, parts):
    with pytest.raises(DataError) as caught:
        BatchBuilder(Ragged(""), 1)(BatchRequest(2, 3, torch.tensor(indices)))
    assert str(caught.value).startswith("Ragged: sample ")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_an_error_of_the_users_collate_names_the_batch():
    with pytest.raises(TypeError) as caught:
        BatchBuilder(Ragged(""), 1, collate=pad)(BatchRequest(2, 3, torch.tensor([1, 6, 3])))
    assert caught.value.__notes__ == ["while collating training batch 3 of epoch 2"]


def test_what_a_machine_runs_out_of():
    assert is_of_the_machine(MemoryError())
    assert is_of_the_machine(OSError(errno.EMFILE, "files"))
    assert not is_of_the_machine(OSError(errno.ENOENT, "no such file"))
    assert not is_of_the_machine(RuntimeError("bug"))


def test_a_request_goes_through_a_pipe_without_a_tensor():
    reduced = BatchRequest(1, 2, torch.tensor([3, 4])).__reduce__()
    assert not any(isinstance(part, torch.Tensor) for part in reduced[1])
    again = reduced[0](*reduced[1])
    assert (again.epoch, again.batch, again.indices.tolist()) == (1, 2, [3, 4])


class Sometimes:
    """Only every 16th sample draws."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.reads += 1
        drawn = [random.random(), np.random.random(), torch.rand(()).item()] if index % 16 == 9 else [0.0] * 3
        return torch.tensor([float(index), *drawn])


def test_a_sample_that_draws_now_and_then_draws_the_same_whatever_came_before():
    def built(builder, *batches):
        return [builder(BatchRequest(0, batch, torch.arange(4 * batch, 4 * batch + 4))).batch for batch in batches]

    in_order = built(BatchBuilder(Sometimes(), 1), *range(8))
    for batch in (2, 6):
        (alone,) = built(BatchBuilder(Sometimes(), 1), batch)
        assert torch.equal(alone, in_order[batch])
        assert torch.equal(alone, built(BatchBuilder(Sometimes(), 1), 6, 2, batch)[-1])


def test_samples_that_draw_nothing_are_read_once_and_the_generators_stay():
    dataset, before = Sometimes(), generators.numbers()
    builder = BatchBuilder(dataset, 1)
    for batch in (0, 1):
        builder(BatchRequest(0, batch, torch.arange(4 * batch, 4 * batch + 4)))
    assert dataset.reads == 8
    for _ in range(2):
        builder(BatchRequest(0, 2, torch.arange(8, 12)))
    assert dataset.reads == 8 + 2 * 4 + 4  # the batch that was seen to draw is read again
    assert generators.numbers() == before

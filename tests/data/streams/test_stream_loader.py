"""A stream gives each sample once an epoch, whoever reads it, and goes on from wherever it was left."""

import io
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.kit import streams
from tests.kit.few import few, slow
from tests.kit.streams import SIZE, loader_of
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.data.settings import LoaderSettings
from wellfed.data.streams.stream import Stream
from wellfed.data.streams.stream_loader import EvalStream, StreamReading
from wellfed.errors import DataError

INLINE = LoaderSettings()
ONE = LoaderSettings("processes", 1, 2)
TWO = LoaderSettings("processes", 2, 2, persistent_workers=True)
THREE = LoaderSettings("torch", 3, 1)
ALL = [INLINE, ONE, TWO, THREE]


def named(value):
    return value.__name__ if isinstance(value, type) else f"{value.backend}-{value.num_workers}"


def ids(delivery):
    batch = delivery.batch
    return [int(row) for row in (batch[:, 0] if batch.dim() > 1 else batch)]


def epochs(made, number=2):
    try:
        return [[ids(delivery) for delivery in made] for _ in range(number)]
    finally:
        made.close()


KINDS = [streams.Plain, streams.Sharded, streams.InShards, streams.ByWorker, streams.Stateful]
PAIRS = [  # the other pairs of those with worker processes are slow ones
    pytest.param(kind, plan, marks=[pytest.mark.slow] * (plan in (ONE, TWO, THREE) and (number + other) % 2))
    for number, kind in enumerate(KINDS)
    for other, plan in enumerate(ALL)
]


@pytest.mark.parametrize(("kind", "plan"), few(PAIRS, 6), ids=named)
def test_each_sample_comes_once_an_epoch_in_batches_of_the_asked_size(kind, plan):
    made = loader_of(kind(), plan)
    found = epochs(made)
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch) == list(range(SIZE))
        assert max(len(batch) for batch in epoch) == 4
        assert sum(len(batch) < 4 for batch in epoch) <= max(plan.num_workers, 3)


@pytest.mark.parametrize("kind", [streams.Plain, streams.InShards])
def test_the_order_is_the_same_for_any_number_of_workers_where_the_parts_are(kind):
    expected = epochs(loader_of(kind()))
    assert all(epochs(loader_of(kind(), plan)) == expected for plan in ALL[1:])


def test_drop_last_leaves_out_the_small_batch_of_each_part():
    for plan in ALL:
        assert {len(batch) for batch in epochs(loader_of(streams.Sharded(), plan, drop_last=True), 1)[0]} == {4}


def test_the_last_batch_of_an_epoch_says_so():
    for size in (SIZE, 1, 24):
        found = [delivery.is_last for delivery in loader_of(streams.Sharded(range(size)))]
        assert found == [False] * (len(found) - 1) + [True]


def saved(state):
    """As a checkpoint has it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("plan", [INLINE, slow(TWO)], ids=named)
@pytest.mark.parametrize("kind", few([streams.Sharded, streams.InShards, streams.Stateful, streams.Drawing], 2))
def test_it_goes_on_from_any_batch_as_if_it_had_not_been_left(kind, plan):
    whole = loader_of(kind(), plan)
    expected = [delivery.batch.tolist() for _ in range(2) for delivery in whole]
    whole.close()
    assert len(expected) >= 12
    for stop in range(1, len(expected)) if plan is INLINE else (4, 6, 11):
        first, seen = loader_of(kind(), plan), []
        while len(seen) < stop:
            for delivery in first:
                seen.append(delivery.batch.tolist())
                if len(seen) == stop:
                    break
        state = saved(first.state_dict())
        first.close()
        assert state == saved({**delivery.position})
        second = loader_of(kind(), plan)
        second.load_state_dict(state)
        while len(seen) < len(expected):
            seen += [delivery.batch.tolist() for delivery in second]
        second.close()
        assert seen == expected, stop


@pytest.mark.parametrize("plan", ALL, ids=named)
def test_batches_of_the_streams_own_are_handed_on_as_they_are(plan):
    made = loader_of(streams.Batches(5), plan)
    assert [(d.epoch, d.index, d.total, ids(d)) for _ in range(2) for d in made] == [
        (epoch, number, 2, [number, number]) for epoch in (0, 1) for number in range(5)
    ]
    made.load_state_dict({"epoch": 1, "batch": 3, "stream": {**made.state_dict()["stream"], "asked": 3}})
    made.close()
    assert made.steps_per_epoch == 5


def test_a_limit_ends_each_epoch():
    made = loader_of(streams.Batches(5), limit_batches=2)
    assert [[(d.epoch, d.index, d.is_last) for d in made] for _ in range(2)] == [
        [(epoch, 0, False), (epoch, 1, True)] for epoch in (0, 1)
    ]
    assert made.steps_per_epoch == 2


@pytest.mark.parametrize(("said", "given"), [(5, 3), (3, 5)])
def test_an_epoch_ends_where_the_stream_does(said, given):
    made = loader_of(streams.Batches(said, given), batch_size=2)
    assert [[d.is_last for d in made] for _ in range(2)] == 2 * [[False] * (given - 1) + [True]]


def test_a_stream_that_gives_nothing_is_told():
    with pytest.raises(DataError, match=r"^Sharded gave no batch in epoch 0\. Check workload\.data, and with"):
        epochs(loader_of(streams.Sharded([])))
    with pytest.raises(DataError, match=r"^Batches makes no step: its __len__ is 0\. Check workload\.data"):
        loader_of(streams.Batches(0))
    with pytest.raises(DataError, match=r"^Once gave no batch in epoch 1\. An epoch is one reading: let each iter"):
        epochs(loader_of(Once()))


class Once(IterableDataset):
    def __init__(self):
        self.numbers = iter(range(SIZE))

    def __iter__(self):
        return map(torch.tensor, self.numbers)


class Broken(streams.Sharded):
    def __iter__(self):
        yield from (torch.tensor(number) for number in range(6))
        raise KeyError("no such member")


@pytest.mark.parametrize("plan", [INLINE, ONE], ids=named)
def test_what_a_stream_raises_is_told_with_the_batch(plan):
    made, seen = loader_of(Broken(), plan), []
    with pytest.raises(DataError, match=r"^Broken: training batch 1 of epoch 0 could not be read: KeyError"):
        seen.extend(ids(delivery) for delivery in made)
    made.close()
    assert seen == [[0, 1, 2, 3]]


class Odd(streams.Stateful):
    def state_dict(self):
        return {**super().state_dict(), "rng": np.random.RandomState(3).get_state()}


def test_states_that_no_checkpoint_can_hold_are_left_out_whole(caplog):
    first, second = loader_of(Odd()), loader_of(Odd())
    for delivery in first:
        if delivery.index == 2:
            break
    assert first.state_dict()["stream"]["states"] is None
    second.load_state_dict(first.state_dict())
    assert [delivery.index for delivery in second] == [3, 4, 5]
    message, *_ = caplog.messages
    assert message.startswith("Odd.state_dict() holds more than")


def test_the_trainings_own_generators_are_left_alone():
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    epochs(loader_of(streams.Drawing()))
    assert torch.rand(3).equal(before)


def test_noise_is_the_same_for_any_number_of_workers_and_order_by_the_epoch():
    class Numbered(streams.Drawing):
        num_shards = 3

    def values(plan):
        made = loader_of(Numbered(), plan)
        found = [[delivery.batch.tolist() for delivery in made] for _ in range(2)]
        made.close()
        return found

    first, second = values(INLINE)
    assert sorted(row[0] for batch in first for row in batch) == list(range(SIZE))
    assert first != second
    assert values(TWO) == values(THREE) == [first, second]


@pytest.mark.parametrize("plan", [INLINE, TWO], ids=named)
def test_an_evaluation_is_every_sample_once_in_any_pass(plan):
    for kind in (streams.Sharded, streams.ByWorker, streams.Plain):
        reading = StreamReading(Stream.of(kind()), plan, batch_size=4, seed=1, purpose="evaluation")
        made = EvalStream(reading)
        for _ in range(2):
            found = [ids(delivery) for delivery in made]
            assert sorted(chain(*found)) == list(range(SIZE))
            assert max(len(batch) for batch in found) == 4
        made.close()
        assert len(EvalStream(reading, limit_batches=2)) == 2
        made.close()


def test_an_evaluation_of_an_empty_stream_is_an_error():
    class Nothing(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    made = EvalStream(StreamReading(Stream.of(Nothing()), INLINE, batch_size=4, seed=1, purpose="evaluation"))
    with pytest.raises(DataError, match=r"^Nothing gave no sample to evaluate\. Check workload\.data"):
        next(iter(made))


def test_what_is_copied_ahead_is_not_in_the_position():
    expected = list(chain(*epochs(loader_of(streams.Stateful()))))
    for stop in (1, 4, 6, 7):
        made = DevicePrefetcher(loader_of(streams.Stateful()), torch.device("cpu"), 2)
        seen = []
        while len(seen) < stop:
            for delivery in made:
                seen.append(ids(delivery))
                if len(seen) == stop:
                    break
        state = saved(made.state_dict())
        made.close()
        again = DevicePrefetcher(loader_of(streams.Stateful()), torch.device("cpu"), 2)
        again.load_state_dict(state)
        assert again.state_dict() == state
        while len(seen) < 12:
            seen += [ids(delivery) for delivery in again]
        again.close()
        assert seen == expected


def initialised(part):
    told = get_worker_info()
    told.dataset.numbers = list(range(SIZE))[part :: told.num_workers]


class Whole(streams.Plain):
    """Is told its part by ``worker_init_fn``, as in torch's documentation."""

    def __init__(self):
        self.numbers = list(range(SIZE))

    def __iter__(self):
        return map(torch.tensor, self.numbers)


@pytest.mark.parametrize("plan", ALL, ids=named)
def test_a_worker_init_of_the_users_may_share_it(plan):
    stream = Stream(Whole(), worker_init=initialised)
    assert stream.shared_by == "worker info"
    (found,) = epochs(loader_of(stream, plan), 1)
    assert sorted(chain(*found)) == list(range(SIZE))
    assert stream.dataset.numbers == list(range(SIZE))

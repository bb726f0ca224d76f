"""A stream gives each sample once an epoch, whoever reads it, and goes on from wherever it was left."""

import io

import pytest
import torch

from tests.loading import streams
from tests.loading.streams import SIZE, loader_of
from wellfed.loading.settings import LoaderSettings

INLINE = LoaderSettings()
ONE = LoaderSettings("processes", 1, 2)
TWO = LoaderSettings("processes", 2, 2, persistent_workers=True)
THREE = LoaderSettings("torch", 3, 1)
THREADS = LoaderSettings("threads", 3, 2)
ALL = [INLINE, ONE, TWO, THREE, THREADS]


def named(plan):
    return f"{plan.backend}-{plan.num_workers}"


def ids(delivery):
    batch = delivery.batch
    return [int(row) for row in (batch[:, 0] if batch.dim() > 1 else batch)]


def epochs(made, number=2):
    try:
        return [[ids(delivery) for delivery in made] for _ in range(number)]
    finally:
        made.close()


@pytest.mark.parametrize("plan", ALL, ids=named)
@pytest.mark.parametrize("kind", [streams.Plain, streams.Sharded, streams.InShards, streams.ByWorker, streams.Stateful])
def test_each_sample_comes_once_an_epoch_in_batches_of_the_asked_size(kind, plan):
    made = loader_of(kind(), plan)
    found = epochs(made)
    for epoch in found:
        assert sorted(number for batch in epoch for number in batch) == list(range(SIZE))
        assert [len(batch) for batch in epoch] == [4, 4, 4, 4, 4, 3]


@pytest.mark.parametrize("kind", [streams.Plain, streams.InShards])
def test_the_order_is_the_same_for_any_number_of_workers_where_the_parts_are(kind):
    expected = epochs(loader_of(kind()))
    assert all(epochs(loader_of(kind(), plan)) == expected for plan in ALL[1:])


def test_drop_last_drops_less_than_a_batch_however_many_read():
    for plan in ALL:
        assert [len(batch) for batch in epochs(loader_of(streams.Sharded(), plan, drop_last=True), 1)[0]] == [4] * 5


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


@pytest.mark.parametrize("plan", [INLINE, TWO, THREADS], ids=named)
@pytest.mark.parametrize("kind", [streams.Sharded, streams.InShards, streams.Stateful, streams.Drawing])
@pytest.mark.parametrize("buffer", [None, 5])
def test_it_goes_on_from_any_batch_as_if_it_had_not_been_left(kind, plan, buffer):
    if plan is THREADS and kind is streams.Drawing:
        pytest.skip("what it draws there can't be repeated")
    settings = LoaderSettings(**{**vars(plan), "shuffle_buffer": buffer})
    whole = loader_of(kind(), settings)
    expected = [delivery.batch.tolist() for _ in range(2) for delivery in whole]
    whole.close()
    assert len(expected) == 12
    for stop in range(1, 12) if plan is INLINE else (4, 6, 11):
        first, seen = loader_of(kind(), settings), []
        while len(seen) < stop:
            for delivery in first:
                seen.append(delivery.batch.tolist())
                if len(seen) == stop:
                    break
        state = saved(first.state_dict())
        first.close()
        assert state == saved({**delivery.position})
        second = loader_of(kind(), settings)
        second.load_state_dict(state)
        while len(seen) < 12:
            seen += [delivery.batch.tolist() for delivery in second]
        second.close()
        assert seen == expected, stop

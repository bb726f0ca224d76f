"""What is a stream, what it gives, and how several may read it."""

import pytest
import torch
from torch.utils.data import Dataset

from tests.kit import sets, streams
from wellfed.data.streams.stream import Stream, as_worker, is_stream
from wellfed.errors import DataError


class OnlyItems(Dataset):
    def __getitem__(self, index):
        return index


def test_what_is_read_in_order():
    assert is_stream(streams.Plain())
    assert is_stream(streams.Batches(3))
    assert is_stream(x for x in ())
    assert not any(map(is_stream, (OnlyItems(), sets.Fetching(), [1, 2], Dataset())))
    assert Stream.of(stream := Stream(streams.Plain())) is stream


class Own(streams.Plain):
    gives_batches = True

    def weight(self, batch):
        return 1


def test_samples_or_batches():
    assert not Stream(streams.Plain()).gives_batches
    assert Stream(streams.Plain(), gives_batches=True).gives_batches
    assert Stream(Own()).gives_batches
    assert Stream(streams.Batches(3)).gives_batches
    assert Stream(Own()).weight(None) == 1
    assert not hasattr(Stream(streams.Plain()), "weight")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (streams.Plain, None),
        (streams.Sharded, "shard"),
        (streams.Stateful, "shard"),
        (streams.ByWorker, "worker info"),
        (streams.ByNumber, "worker info"),
    ],
)
def test_how_it_is_shared_is_asked_of_the_data_itself(kind, expected):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    stream = Stream(kind())
    assert stream.shared_by == expected
    assert torch.random.get_rng_state().equal(before)
    assert torch.utils.data.get_worker_info() is None


def test_what_can_be_read_once_only_is_refused():
    with pytest.raises(DataError, match="generator.*once only"):
        Stream(number for number in range(5))


def test_parts():
    assert [Stream(streams.Plain()).num_parts(workers) for workers in (0, 1)] == [1, 1]
    assert [Stream(streams.Sharded()).num_parts(workers) for workers in (0, 1, 4)] == [1, 1, 4]
    assert [Stream(streams.InShards()).num_parts(workers) for workers in (0, 1, 4)] == [3, 3, 3]
    assert Stream(streams.InShards()).num_parts(4, world_size=2) == 1

    class Many(streams.Sharded):
        num_shards = 1000

    assert Stream(Many()).num_parts(2) == 16


class AsInDatasets(streams.Sharded):
    def shard(self, num_shards, index, contiguous=True):
        return streams.Sharded.shard(self, index, num_shards)


def test_the_arguments_of_hugging_faces_shard_come_in_their_order():
    data, told = Stream(AsInDatasets()).part(1, 5, is_alone=True)
    assert (data.numbers, told) == ([1, 6, 11, 16, 21], None)


def test_each_reading_begins_as_the_data_set_was():
    data = streams.Stateful()
    stream = Stream(data)
    next(iter(data))
    assert stream.anew().place == 0
    assert data.place == 1


def test_who_reads_is_told_and_put_back():
    info = Stream(streams.ByWorker()).part(1, 3, is_alone=False)[1]
    with as_worker(info):
        assert (torch.utils.data.get_worker_info().id, torch.utils.data.get_worker_info().num_workers) == (1, 3)
    assert torch.utils.data.get_worker_info() is None

"""One order over all shards: each clip once an epoch, whoever reads it, and on from where it was left."""

import pytest
import torch

from wellfed.data.settings import LoaderSettings
from wellfed.data.shards import write_shards
from wellfed.data.train_loader import train_loader
from workloads.speech.data import datasets

READERS = {
    "inline": LoaderSettings(),
    "threads": LoaderSettings("threads", num_workers=2, prefetch_factor=2),
    "processes": LoaderSettings("processes", num_workers=2, prefetch_factor=2),
}


@pytest.fixture(scope="module")
def train(tones, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shuffled")
    write_shards(tones, folder / "shards", num=3)
    return datasets(str(folder / "shards"), passes=1, cache_dir=str(folder / "cache")).train


def loader(train, name="inline", **more):
    return train_loader(train, batch_size=5, seed=0, settings=READERS[name], **more)


def clips(delivery):
    return delivery.batch["clip"].tolist()


def together(deliveries):
    return [clip for each in deliveries for clip in clips(each)]


def sound(deliveries):
    return [each.batch["audio"] for each in deliveries]


@pytest.mark.parametrize("name", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_each_clip_comes_once_an_epoch_in_the_same_order_for_any_readers(train, name):
    with_others = loader(train, name)
    alone = loader(train)
    for _ in range(2):
        expected, found = list(alone), list(with_others)
        assert [clips(each) for each in found] == [clips(each) for each in expected]
        assert sorted(together(found)) == sorted(train.clip_S.tolist())
        assert all(torch.equal(one, other) for one, other in zip(sound(found), sound(expected), strict=True))
    with_others.close()


def test_each_epoch_draws_a_batch_from_many_shards(train):
    reading = loader(train)
    first, second = ([clips(each) for each in reading] for _ in range(2))
    assert first != second
    shard = train.table.waveforms.reader.index.shards
    assert len({int(shard[clip]) for clip in first[0] + second[0]}) == 3

"""A DataLoader is taken apart, and its batches come again from our own loaders."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from wellfed.contract import Datasets
from wellfed.data.loader_parts import take_apart, without_loaders
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.errors import ConfigError


class Numbers(Dataset):
    split = "train"
    """As in torchvision: its name."""

    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class Five(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Buckets(Sampler[list[int]]):
    def __iter__(self):
        yield from ([0, 1, 2], [9], [4, 5])

    def __len__(self):
        return 3


def negative(samples):
    return -torch.stack(samples)


def parts(**more):
    return take_apart(DataLoader(Numbers(), **{"batch_size": 4, **more}), "train", seed=1)


def steps(found, epochs=1, **more):
    """The batches of some epochs, as lists."""
    settings = more.pop("settings", LoaderSettings())
    loader = train_loader(
        found.dataset,
        settings,
        batch_size=found.batch_size,
        seed=1,
        drop_last=found.drop_last,
        collate=found.collate,
        shuffle=found.shuffle or found.sampled is not None,
        sampled=found.sampled,
        worker_init=found.worker_init,
        **more,
    )
    given = [[delivery.batch.tolist() for delivery in loader] for _ in range(epochs)]
    loader.close()
    return given


def flat(epoch):
    return [index for batch in epoch for index in batch]


def test_its_own_order_is_ours_unshuffled():
    found = parts(batch_size=8, collate_fn=negative)
    assert (found.sampled, found.shuffle, found.batch_size) == (None, False, 8)
    (epoch,) = steps(found)
    assert epoch == [[-index for index in range(low, min(low + 8, 20))] for low in (0, 8, 16)]


def test_shuffle_is_ours_anew_in_each_epoch():
    found = parts(shuffle=True, drop_last=True, batch_size=8)
    assert (found.sampled, found.shuffle, found.drop_last) == (None, True, True)
    first, second = steps(found, epochs=2)
    assert [len(batch) for batch in first] == [8, 8]
    assert first != second


@pytest.mark.parametrize(
    ("sampler", "of"),
    [
        (lambda: WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 12), range(10, 20)),
        (lambda: SubsetRandomSampler([1, 2, 3]), range(1, 4)),
        (lambda: RandomSampler(Numbers(), num_samples=6), range(20)),
        (lambda: SequentialSampler(Numbers(5)), range(5)),
        (lambda: RandomSampler(Numbers(5)), range(5)),
        (lambda: [3, 1], [3, 1]),
    ],
)
def test_what_a_sampler_chooses_is_kept(sampler, of):
    found = parts(sampler=sampler())
    assert found.sampled is not None
    for epoch in steps(found, epochs=2):
        assert set(flat(epoch)) <= set(of)
        assert len(flat(epoch)) == len(sampler())


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_gives_way_to_our_own_shares(shuffle):
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, shuffle=shuffle)
    found = parts(sampler=sampler)
    assert (found.sampled, found.shuffle) == (None, shuffle)
    assert sorted(flat(steps(found)[0])) == list(range(20))


def test_a_sampler_of_the_users_that_shares_out_by_itself_is_refused():
    class Mine(DistributedSampler):
        pass

    with pytest.raises(ConfigError, match=r"the train DataLoader's Mine gives one of 2 ranks its share"):
        parts(sampler=Mine(Numbers(), num_replicas=2, rank=0))
    assert parts(sampler=Mine(Numbers(), num_replicas=1, rank=0)).sampled is not None


def test_a_batch_sampler_of_torch_is_a_batch_size():
    found = take_apart(DataLoader(Numbers(), batch_sampler=BatchSampler([5, 6, 7], 2, drop_last=True)), "train", 1)
    assert (found.batch_size, found.drop_last, found.has_own_batches) == (2, True, False)
    assert steps(found) == [[[5, 6]]]


def test_the_lists_of_a_batch_sampler_are_steps():
    found = take_apart(DataLoader(Numbers(), batch_sampler=Buckets()), "train", 1)
    assert (found.batch_size, found.step_size(), found.has_own_batches) == (None, 3, True)
    assert steps(found, epochs=2) == [[[0, 1, 2], [9], [4, 5]]] * 2
    assert steps(found, settings=LoaderSettings(skip_ids=(1,)))[0] == [[0, 2], [9], [4, 5]]
    assert steps(found, limit_batches=2) == [[[0, 1, 2], [9]]]
    shares = [steps(found, rank=rank, world_size=2)[0] for rank in range(2)]
    assert shares == [[[0], [9], [4]], [[1, 2], [9], [5]]]  # of the list with one, rank 0's is padding


def test_an_iterable_data_set_keeps_what_makes_its_batches():
    found = take_apart(DataLoader(Five(), batch_size=2, drop_last=True, collate_fn=negative), "train", 1)
    assert (found.batch_size, found.drop_last, found.collate, found.sampled) == (2, True, negative, None)
    assert take_apart(DataLoader(Five(), batch_size=None), "train", 1).gives_batches


def test_what_can_not_be_built_again_says_why():
    class Mine(DataLoader):
        def __iter__(self):
            yield torch.zeros(1)

    found = take_apart(Mine(Numbers(), batch_size=4), "train", 1)
    assert found.problem == "Mine has an __iter__ of its own"
    assert isinstance(found.dataset, Mine)
    assert "batch_size=None" in take_apart(DataLoader(Numbers(), batch_size=None), "train", 1).problem

    class Plain(DataLoader):
        pass

    assert not take_apart(Plain(Numbers()), "train", 1).problem


def as_mapping(loaders):
    return dict(zip("ab", loaders, strict=True))


@pytest.mark.parametrize("several", [list, as_mapping])
def test_several_loaders_of_a_split_are_refused(several):
    two = several([DataLoader(Numbers()), DataLoader(Numbers())])
    with pytest.raises(ConfigError, match=r"gives 2 loaders for val, and a split is one.*ConcatDataset"):
        without_loaders(Datasets(Numbers(), val=two), 1)


class Opened(Numbers):
    where = "nowhere"

    def __getitem__(self, index):
        return torch.tensor([index, 1 if self.where == "worker" else 0])


def open_in_worker(worker):
    torch.utils.data.get_worker_info().dataset.where = "worker"


def test_workers_are_begun_as_the_loader_says():
    found = take_apart(DataLoader(Opened(4), batch_size=4, worker_init_fn=open_in_worker), "train", 1)
    settings = LoaderSettings(backend="processes", num_workers=1, prefetch_factor=1)
    assert steps(found, settings=settings) == [[[[0, 1], [1, 1], [2, 1], [3, 1]]]]
    assert steps(found) == [[[[0, 0], [1, 0], [2, 0], [3, 0]]]]

"""Batches from worker processes equal those built in place, however long they are kept; their memory is reused."""

import gc
import os
import resource
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.kit import sets
from wellfed.data.backends import shared_blocks
from wellfed.data.backends.process_backend import WorkerLost
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

ROWS, BATCH = 1600, 16
WIDE = 2048
"""Values of a sample; a batch of them is too large for the pipe."""
PLAN = LoaderSettings("processes", 2, 2, persistent_workers=True)
MOST = 2 * (2 + shared_blocks._HELD)


def values_of(indices):
    """Values that differ in every sample and column."""
    return indices[:, None] * 10_000 + torch.arange(WIDE)


class Wide:
    """Batches that exceed what goes through the pipe."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"index": index, "values": values_of(torch.tensor([index]))[0]}

    def fetch(self, indices, rng):
        return {"index": indices, "values": values_of(indices)}


def made(dataset=None, plan=PLAN, batch_size=BATCH, **more):
    return train_loader(dataset or Wide(), plan, batch_size=batch_size, seed=3, **more)


def is_right(batch):
    return torch.equal(batch["values"], values_of(batch["index"]))


def blocks_of(loader):
    return loader._source._processes._inbox._blocks


def processes_of(loader):
    return loader._source._processes._iterator._workers


def test_blocks_are_reused():
    loader, seen = made(), set()
    for delivery in loader:
        assert is_right(delivery.batch)
        seen.add(delivery.batch["values"].data_ptr())
    assert len(loader) == 100
    assert 2 <= len(seen) <= MOST
    assert len(blocks_of(loader)) <= MOST
    loader.close()


@pytest.mark.parametrize("is_persistent", [True, False])
def test_batches_that_are_kept_are_never_overwritten(is_persistent):
    loader = made(plan=LoaderSettings("processes", 2, 2, persistent_workers=is_persistent))
    kept = [delivery.batch for _ in range(2) for delivery in loader]
    assert len(kept) == len({batch["values"].data_ptr() for batch in kept}) == 200
    assert len(blocks_of(loader)) == (MOST if is_persistent else 0)
    loader.close()
    assert all(map(is_right, kept))


class Mixed(Wide):
    """Batches of everything that a batch may hold."""

    def __len__(self):
        return 64

    def fetch(self, indices, rng):
        wide = values_of(indices)
        table = wide.repeat(1, 20)  # a storage much larger than one column
        images = wide[:, :768].reshape(-1, 3, 16, 16).float().contiguous(memory_format=torch.channels_last)
        with_default = defaultdict(list, {"wide": wide, "text": ["a"] * len(indices)})
        return {
            "again": wide, "part": wide[:, :900], "turned": wide.T, "column": table[:, 7], "images": images,
            "half": wide.bfloat16(), "truth": wide > 5, "complex": torch.complex(wide.float(), wide.float()).conj(),
            "empty": wide[:, :0], "none": None, "number": 3, "scalar": torch.tensor(2.5), "text": "text",
            "array": wide.numpy() + 1, "fixed": np.frombuffer(wide.numpy().tobytes()), "texts": np.array(["x", "yz"]),
            "nested": [(with_default, sets.Record((wide.double(), indices))), {"deep": (wide[0].clone(),)}],
            "sparse": torch.eye(200).to_sparse(), "parameter": torch.nn.Parameter(wide.double()),
        }  # fmt: skip


def assert_same(mine, theirs, name="batch"):
    assert type(mine) is type(theirs), name
    if isinstance(theirs, torch.Tensor):
        assert (mine.dtype, mine.shape, mine.requires_grad, mine.layout) == (
            theirs.dtype, theirs.shape, theirs.requires_grad, theirs.layout), name  # fmt: skip
        if theirs.layout is torch.strided and name != "batch.column":
            assert mine.stride() == theirs.stride(), name
        assert torch.equal(mine.to_dense(), theirs.to_dense()), name
    elif isinstance(theirs, np.ndarray):
        assert mine.flags.writeable == theirs.flags.writeable, name
        assert mine.dtype == theirs.dtype
        assert (mine == theirs).all(), name
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs)
        for key in theirs:
            assert_same(mine[key], theirs[key], f"{name}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{name}.{number}")
    elif isinstance(theirs, sets.Record):
        assert_same(vars(mine), vars(theirs), f"{name}.record")
    else:
        assert mine == theirs, name


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_every_kind_of_member_arrives_as_it_was_built():
    loader = made(Mixed())
    expected = list(made(Mixed(), LoaderSettings()))
    for delivery, in_place in zip(loader, expected, strict=True):
        assert_same(delivery.batch, in_place.batch)
        batch = delivery.batch
        assert batch["nested"][0][0]["wide"] is batch["again"]
        batch["again"][0, 0] = -1
        assert batch["part"][0, 0] == -1  # views of one tensor stay views of one
    loader.close()


class Cramped(Wide):
    """A worker that can't make files above 40 KB, shared memory included."""

    def fetch(self, indices, rng):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        return super().fetch(indices, rng)


def test_without_shared_memory_batches_go_through_the_pipe():
    loader = made(Cramped(), limit_batches=10)
    for _ in range(2):
        assert [is_right(delivery.batch) for delivery in loader] == [True] * 10
    assert not blocks_of(loader)
    left = [file for each in processes_of(loader) for file in Path("/dev/shm").glob(f"torch_{each.pid}_*")]
    loader.close()
    for file in left:  # torch leaves an empty file when it fails
        file.unlink()
    assert len(left) <= PLAN.num_workers


class Dying(Wide):
    """A worker that is killed at its fifth batch."""

    count = 0

    def fetch(self, indices, rng):
        self.count += 1
        if self.count == 5:
            os.kill(os.getpid(), 9)
        return super().fetch(indices, rng)


def test_batches_of_a_killed_worker_stay():
    loader, kept = made(Dying()), []
    for _ in range(2):
        with pytest.raises(WorkerLost):
            kept.extend(delivery.batch for delivery in loader)
        assert not blocks_of(loader)
    loader.close()
    assert kept
    assert all(map(is_right, kept))


def test_an_abandoned_pass_leaves_no_block_in_use():
    loader = made()
    for _ in range(8):
        assert is_right(next(iter(loader)).batch)
    assert all(is_right(delivery.batch) for delivery in loader)
    gc.collect()
    used = [key for key, lent in loader._source._processes._inbox._lent.items() if lent() is not None]
    assert not used
    assert len(blocks_of(loader)) <= MOST
    loader.close()


def collated(samples):
    batch = default_collate(samples)
    return {**batch, "is_shared": batch["values"].is_shared()}


def test_samples_are_collated_without_new_shared_memory():
    class Items(Wide):
        fetch = None

    loader = made(Items(), limit_batches=10, collate=collated)
    for delivery in loader:
        assert is_right(delivery.batch)
        assert not delivery.batch["is_shared"]
    assert 0 < len(blocks_of(loader)) <= MOST
    loader.close()

"""What a step learns from is the same for any number of ranks: shown for up to 4,096, each of which does its real part.

No process is started: what a rank does is a function of its number, and here one process does what each would do.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kit.examples import examples
from tests.kit.few import slow
from wellfed.batches import Delivery
from wellfed.config.rules import batch_split
from wellfed.config.schema import RunConfig, TrainerConfig, WorkloadConfig
from wellfed.data.epoch_order import EpochOrder
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.sample_rng import SampleRng
from wellfed.train.memory.step_down import MicroBatches

many = st.integers(1, 5000)


class Rows:
    """Samples with noise that belongs to each of them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def fetch(self, indices: torch.Tensor, rng: SampleRng) -> dict[str, torch.Tensor]:
        return {"index": indices, "noise": rng.uniform_at(indices), "item": rng.randint_at(indices, 10**6, draw=1)}

    def __getitem__(self, index: int) -> int:
        raise AssertionError("data with `fetch` is asked for whole batches")


@pytest.mark.parametrize("world", [8, 64, 512, slow(4096)])
def test_each_rank_takes_its_part_of_the_order_that_one_would_have(world: int) -> None:
    size = world + 5
    common: Any = {"num_samples": 3 * size + 7, "batch_size": size, "seed": 3}
    alone = EpochOrder(**common)
    parts: list[list[torch.Tensor]] = [[] for _ in range(alone.num_batches)]
    lengths: set[int] = set()
    for rank in range(world):  # each draws the order itself
        own = EpochOrder(**common, rank=rank, world_size=world)
        for batch in range(3):
            share = own.share(2, batch)
            assert share.total == size
            assert not share.is_padding
            lengths.add(len(share.indices))
            parts[batch].append(share.indices)
        rest = own.share(2, 3)
        if not rest.is_padding:
            parts[3].append(rest.indices)
    assert lengths == {1, 2}
    for batch, shares in enumerate(parts):
        assert torch.cat(shares).equal(alone.share(2, batch).indices), batch


@examples(20)
@given(world=many, batch_size=many, num_samples=st.integers(1, 20_000), micro=st.integers(1, 64))
@example(world=4096, batch_size=4096, num_samples=20_000, micro=64)
@example(world=4096, batch_size=4097, num_samples=12_291, micro=1)
@example(world=5, batch_size=2, num_samples=1, micro=1)
def test_shares_and_micro_batches_add_up_to_the_step(world: int, batch_size: int, num_samples: int, micro: int) -> None:
    """The first step and the last are checked, whose shares may be empty."""
    order = EpochOrder(num_samples, batch_size, seed=1, shuffle=False)
    for batch in {0, order.num_batches - 1}:
        whole, seen, sizes = order.share(0, batch), 0, set()
        for rank in range(world):
            order._rank, order._world_size = rank, world
            share = order.share(0, batch)
            assert len(share.indices) >= 1  # also where it is none of its own: all ranks compute something
            if share.is_padding:
                assert whole.total < world
                sizes.add(0)
                continue
            own = len(share.indices)
            assert int(share.indices[0]) == batch * batch_size + seen
            assert sum(MicroBatches(micro).sizes(own)) == own
            seen += own
            sizes.add(own)
        order._rank, order._world_size = 0, 1
        assert seen == whole.total == min(batch_size, num_samples - batch * batch_size)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world", [8, 512, slow(4096)])
def test_batches_of_all_ranks_are_those_of_one(world: int) -> None:
    """Loaders as in training, with what is drawn for each sample; and where they go on."""
    data, size = Rows(2 * (world + 7) + world // 2), world + 7
    common: Any = {"batch_size": size, "seed": 5}

    def delivered(**more: Any) -> tuple[list[Delivery], dict[str, Any]]:
        loader = train_loader(data, LoaderSettings(), **common, **more)
        found = list(itertools.islice(loader, 3))
        return found, loader.state_dict()

    alone, position = delivered()
    of_ranks = []
    for rank in range(world):
        found, own_position = delivered(rank=rank, world_size=world)
        assert own_position == position  # a checkpoint of rank 0's is good for any number of ranks
        of_ranks.append(found)
    for whole, parts in zip(alone, zip(*of_ranks, strict=True), strict=True):
        real = [part for part in parts if not part.is_padding]
        assert len(real) == min(world, whole.total)
        for name, values in whole.batch.items():
            assert torch.cat([part.batch[name] for part in real]).equal(values)


@given(effective=st.integers(1, 10**6), nodes=st.integers(1, 600), devices=st.integers(1, 16))
@example(effective=4095, nodes=512, devices=8)
@example(effective=4096, nodes=512, devices=8)
def test_a_step_of_fewer_samples_than_ranks_is_refused_with_a_way_out(effective: int, nodes: int, devices: int) -> None:
    def with_ranks(**trainer: int) -> RunConfig:
        workload = WorkloadConfig(effective_batch_size=effective)
        return RunConfig(workload=workload, trainer=TrainerConfig(**trainer))

    faults = list(batch_split(with_ranks(num_nodes=nodes, devices=devices)))
    assert bool(faults) == (effective < nodes * devices)
    if faults:
        assert faults[0].where == f"workload.effective_batch_size={effective}"
        typed = re.findall(r"trainer\.(\w+)=(\d+)", faults[0].way_out)
        there = {"num_nodes": nodes, "devices": devices} | {knob: int(value) for knob, value in typed}
        assert list(batch_split(with_ranks(**there))) == []

"""What a step learns from is the same for any number of ranks: shown for up to 4,096, each of which does its real part.

No process is started: what a rank does is a function of its number, and here one process does what each would do.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests.kit.examples import examples
from tests.kit.few import few, slow
from tests.kit.machines import card, machine
from wellfed.batches import Delivery
from wellfed.config.compose import compose
from wellfed.config.rules import batch_split
from wellfed.config.schema import RunConfig
from wellfed.data.epoch_order import EpochOrder
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.errors import ConfigError
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, RunPlan, StreamFacts
from wellfed.sample_rng import SampleRng
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.step_passes import StepPasses

WORLDS = (8, 64, 512, 4096)
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


class ManyRanks(Ranks):
    """Is asked for nothing but its size."""

    def __init__(self, size: int, *, has_equal_parts: bool = False) -> None:
        self.size, self.has_equal_parts = size, has_equal_parts


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_what_micro_batches_of_all_ranks_count_is_one_step(world: int, is_sharded: bool) -> None:
    """With a sharded model all ranks make equally many passes, since each is a collective."""
    size = 5 * world + 3
    step = StepPasses.__new__(StepPasses)  # of which only the split is asked
    step._ranks, step._micro = ManyRanks(world, has_equal_parts=is_sharded), MicroBatches(2)
    step._prepare = Preparation(None, seed=1)
    order, numbers, shares = EpochOrder(size, size, seed=1), set(), []
    for rank in range(world):
        order._rank, order._world_size = rank, world
        share = order.share(0, 0)
        parts = step.split(Delivery({"x": share.indices}, 0, 0, share.total, share.is_padding))
        numbers.add(len(parts))
        assert sum(part.size for part in parts) == len(share.indices)
        shares += [part.share for part in parts]
    assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert numbers == {3}


def test_no_two_ranks_draw_alike_and_all_draw_alike_of_a_sample() -> None:
    indices = torch.arange(100)
    seeds, of_samples = set(), []
    for part in range(2 * WORLDS[-1]):  # as `TrainStep` numbers two micro-batches of each rank
        rng = SampleRng(7, 3, 11, part)
        seeds.add(rng.initial_seed())
        if part % 1000 == 0:
            of_samples.append(rng.uniform_at(indices))
    assert len(seeds) == 2 * WORLDS[-1]
    assert all(each.equal(of_samples[0]) for each in of_samples)


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


@pytest.mark.parametrize("num_batches", few([1, 100, 4097], 1))
def test_an_evaluation_is_shared_out_whole_and_all_ranks_have_as_many_batches(num_batches: int) -> None:
    data = Rows(2 * num_batches - 1)
    for world in (8, 4096):
        seen: list[tuple[int, list[int]]] = []
        lengths = set()
        for rank in range(world):
            own = EvalLoader(data, 2, seed=1, rank=rank, world_size=world)
            lengths.add(len(own))
            if rank < 3 or rank >= world - 3 or rank in (num_batches - 1, num_batches):
                taken = list(own)
                assert len(taken) == len(own)
                seen += [(one.index, one.batch["index"].tolist()) for one in taken if not one.is_padding]
        assert lengths == {-(-num_batches // world)}
        assert len({index for index, _ in seen}) == len(seen)
        assert all(indices == [2 * index, 2 * index + 1][: len(indices)] for index, indices in seen)


def config_of(*, effective: int, world: int, **memory: int | None) -> RunConfig:
    base = compose([]).config
    return replace(
        base,
        workload=replace(base.workload, effective_batch_size=effective),
        trainer=replace(base.trainer, devices=min(world, 8), num_nodes=-(-world // 8)),
        memory=replace(base.memory, micro_batch=memory.get("micro"), accumulate=memory.get("accumulate")),
    )


BASE = config_of(effective=1, world=1)


@given(effective=st.integers(1, 10**6), nodes=st.integers(1, 600), devices=st.integers(1, 16))
@example(effective=4095, nodes=512, devices=8)
@example(effective=4096, nodes=512, devices=8)
def test_a_step_of_fewer_samples_than_ranks_is_refused_with_a_way_out(effective: int, nodes: int, devices: int) -> None:
    def with_ranks(**trainer: int) -> RunConfig:
        workload = replace(BASE.workload, effective_batch_size=effective)
        return replace(BASE, workload=workload, trainer=replace(BASE.trainer, **trainer))

    faults = list(batch_split(with_ranks(num_nodes=nodes, devices=devices)))
    assert bool(faults) == (effective < nodes * devices)
    if faults:
        assert faults[0].where == f"workload.effective_batch_size={effective}"
        typed = re.findall(r"trainer\.(\w+)=(\d+)", faults[0].way_out)
        there = {"num_nodes": nodes, "devices": devices} | {knob: int(value) for knob, value in typed}
        assert list(batch_split(with_ranks(**there))) == []


def planned(world: int, effective: int, data: DataFacts, **memory: int) -> RunPlan:
    """Each node has eight cards."""
    facts = machine(*map(card, range(8)), cores=64.0)
    config = config_of(effective=effective, world=world, **memory)
    device = plan_device(config, {}, facts)
    return plan_run(config, {}, facts, device, data, ModelFacts(10**9, 10**9, 2 * 10**9))


@pytest.mark.parametrize("world", few(WORLDS, 2))
@pytest.mark.parametrize("memory", [{}, {"micro": 3}, {"accumulate": 2}], ids=str)
def test_the_plan_of_a_rank_holds_its_share(world: int, memory: dict[str, int]) -> None:
    effective = 10 * world + 1
    plan = planned(world, effective, DataFacts(num_train=10**6, has_fetch=True), **memory)
    largest = -(-effective // world)
    assert plan.workload.effective_batch_size == effective
    assert (plan.memory.accumulate - 1) * plan.memory.micro_batch < largest
    assert plan.memory.accumulate * plan.memory.micro_batch >= largest


def stream_facts(num_shards: int | None) -> StreamFacts:
    return StreamFacts(
        "Clips",
        has_length=True,
        gives_batches=False,
        shared_by="shard",
        num_shards=num_shards,
    )


@pytest.mark.parametrize(("world", "num_shards"), [(8, 7), (512, 100), (4096, 4095)])
def test_a_stream_of_fewer_shards_than_ranks_is_refused_before_a_rank_has_nothing(world: int, num_shards: int) -> None:
    data = DataFacts(num_train=10**6, has_fetch=False, stream=stream_facts(num_shards))
    with pytest.raises(ConfigError) as raised:
        planned(world, 10 * world, data)
    assert f"Clips, which can be read in {num_shards:,} parts" in str(raised.value)
    assert f"{world // 8} x trainer.devices=8" in str(raised.value) or world == 8
    if world == 8:
        assert f"Set trainer.devices={num_shards}" in str(raised.value)


@pytest.mark.parametrize(
    ("world", "num_shards", "idle"),
    few([(8, 16, ""), (8, 8, ""), (8, 12, "25.0 %"), (64, 200, "21.9 %"), (512, 1000, "")], 2),
)
def test_ranks_that_run_out_before_others_are_warned_of(world: int, num_shards: int | None, idle: str) -> None:
    plan = planned(world, 10 * world, DataFacts(10**6, has_fetch=False, stream=stream_facts(num_shards)))
    told = [warning for warning in plan.warnings if "without samples" in warning]
    assert bool(told) == bool(idle)
    assert all(idle in warning for warning in told)


class InShards(IterableDataset[int]):
    """Three numbers a shard."""

    def __init__(self, shards: list[int]) -> None:
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, index: int, count: int) -> InShards:
        return InShards(self.shards[index::count])

    def __iter__(self) -> Any:
        return iter([3 * shard + number for shard in self.shards for number in range(3)])


@pytest.mark.parametrize(("world", "num_shards"), [(8, 8), (64, 200)])
def test_ranks_read_a_stream_in_disjoint_parts_and_the_whole_of_it(world: int, num_shards: int) -> None:
    data, seen, lengths = InShards(list(range(num_shards))), [], set()
    for rank in range(world):
        loader = train_loader(data, LoaderSettings(), batch_size=world, seed=1, rank=rank, world_size=world)
        own = [number for delivery in loader for number in delivery.batch.tolist()]
        lengths.add(len(own) // 3)
        seen += own
    assert sorted(seen) == list(range(3 * num_shards))
    assert max(lengths) - min(lengths) <= 1  # no rank waits longer than it must

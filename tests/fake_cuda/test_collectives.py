"""The process group "nccl" of the simulated cards: what DistributedDataParallel and FSDP ask of it."""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

TIMEOUT_S = 100


def on_ranks(num: int, store: Path, work: Callable[[int], None], card_of: Callable[[int], int] = int) -> list[str]:
    """What each rank failed with, or an empty text. Ranks are forks of this process, which has not used its cards."""
    context = multiprocessing.get_context("fork")
    said: multiprocessing.SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    all_done = context.Barrier(num)

    def run(rank: int) -> None:
        text = ""
        try:
            torch.cuda.set_device(card_of(rank))
            dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=num)
            work(rank)
        except BaseException:  # noqa: BLE001  told to the parent
            text = traceback.format_exc()
        said.put((rank, text))
        all_done.wait(TIMEOUT_S)  # who leaves sooner breaks the connections that others still make

    ranks = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(num)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
    assert [rank.is_alive() for rank in ranks] == [False] * num
    return [text for _, text in sorted(said.get() for _ in ranks)]


def train(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).cuda(), device_ids=[torch.cuda.current_device()])
    model(torch.full((2, 4), rank + 1.0, device="cuda")).sum().backward()
    num = dist.get_world_size()
    mean = 2 * sum(range(1, num + 1)) / num
    assert model.module.weight.grad.tolist() == [[mean] * 4]
    gathered = [torch.empty(4, device="cuda") for _ in range(num)]
    dist.all_gather(gathered, model.module.weight[0].detach())
    assert all(torch.equal(weight, gathered[0]) for weight in gathered)


@pytest.mark.simulated(cards=4)
@pytest.mark.parametrize("num", [2, 4])
def test_ddp_starts_alike_and_learns_from_all_ranks(num: int, tmp_path: Path) -> None:
    assert on_ranks(num, tmp_path / "store", train) == [""] * num


def shard(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).cuda()
    alone = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model)
    model(torch.full((3, 4), rank + 1.0, device="cuda")).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).cuda()
    for parameter, value in zip(same.parameters(), alone, strict=True):
        parameter.data = value
    (sum(same(torch.full((3, 4), each + 1.0, device="cuda")).sum() for each in range(2)) / 2).backward()
    torch.optim.SGD(same.parameters(), lr=0.1).step()
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.allclose(one.to_local(), other.chunk(2)[rank], atol=1e-5)


@pytest.mark.simulated(cards=2)
def test_fsdp_learns_what_one_card_learns(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "store", shard) == [""] * 2


@pytest.mark.simulated(cards=2)
def test_two_ranks_on_one_card_are_refused(tmp_path: Path) -> None:
    for text in on_ranks(2, tmp_path / "store", train, card_of=lambda rank: 0):
        assert "Duplicate GPU detected" in text


def reduce_on_host(rank: int) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))


@pytest.mark.simulated(cards=2)
def test_tensors_of_the_host_are_refused(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "store", reduce_on_host) == [""] * 2


def reduce_many(rank: int) -> None:
    held = torch.tensor([rank + 1.0, -rank], device="cuda")
    for op, expected in {
        dist.ReduceOp.SUM: [3.0, -1.0],
        dist.ReduceOp.AVG: [1.5, -0.5],
        dist.ReduceOp.MAX: [2.0, 0.0],
    }.items():
        given = held.clone()
        dist.all_reduce(given, op)
        assert given.tolist() == expected
    given = held.clone()
    dist.broadcast(given, src=1)
    assert given.tolist() == [2.0, -1.0]
    dist.barrier(device_ids=[rank])


@pytest.mark.simulated(cards=2)
def test_reductions_are_right(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "store", reduce_many) == [""] * 2


def reduce_costly(rank: int) -> None:
    held, began_s = torch.ones(2, device="cuda"), time.monotonic()
    for _ in range(10):
        dist.all_reduce(held)
    assert time.monotonic() - began_s >= 10 * 0.01


@pytest.mark.simulated(cards=2, launch_us=10_000)
def test_a_collective_is_a_launch(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path / "store", reduce_costly) == [""] * 2


def reduce_beside_a_slow_card(rank: int) -> None:
    """Card 1 has 400 ms of work before a reduction. Card 0 has none, and its host comes 300 ms later."""
    held = torch.ones(2, device="cuda")
    dist.all_reduce(held)
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    if rank == 0:
        time.sleep(0.3)
    else:
        for _ in range(10):
            held + 1
    dist.all_reduce(held)
    ended.record()
    torch.cuda.synchronize()
    assert 350 < began.elapsed_time(ended) < 600


@pytest.mark.simulated(cards=2, kernel_us=40_000)
def test_a_card_waits_for_a_slower_one_in_a_reduction(tmp_path: Path) -> None:
    """Neither card waits for the other host beside that."""
    assert on_ranks(2, tmp_path / "store", reduce_beside_a_slow_card) == [""] * 2

"""A reference script of DistributedDataParallel under torchrun, whose ranks may differ."""

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 8


class Rows(Dataset):
    """Rows whose reading takes ``read_ms``."""

    def __init__(self, number, read_ms):
        self.number, self.read_ms = number, read_ms

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        time.sleep(self.read_ms / 1e3)
        return torch.full((16,), index % 7 / 7), index % 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--read-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank-1", choices=["raises", "leaves early"])
    parser.add_argument("--compute-ms", type=float, default=10.0)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    how = args.rank_1 if rank == 1 else None
    data = Rows(args.steps * BATCH * ranks, args.read_ms if rank == args.slow_rank else 0.0)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join() if args.rank_1 == "leaves early" else nullcontext():
        for number, (x, y) in enumerate(loader):
            if number == args.steps // 2 and how == "raises":
                raise ValueError("of rank 1")
            if number == args.steps // 2 and how == "leaves early":
                break
            loss = nn.functional.cross_entropy(model(x), y)
            time.sleep(args.compute_ms / 1e3)  # as a device would compute
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"{sum(one.abs().sum().item() for one in model.parameters()):.6f}")
    dist.barrier()  # else the first to end may close a connection that the other still reads from
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

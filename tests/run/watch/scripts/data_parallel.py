"""A reference script of one process that drives all GPUs, whose data come from a storage that may stall."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 128


class Rows(Dataset):
    """Rows from a storage that stands still for the second half of each period."""

    def __init__(self, number, period_s):
        self.rows, self.period_s, self.began_s = torch.randn(number, WIDTH), period_s, time.monotonic()

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, indices):
        since_s = (time.monotonic() - self.began_s) % self.period_s if self.period_s else 0.0
        if since_s > self.period_s / 2:
            time.sleep(self.period_s - since_s)
        return [(self.rows[index], index % 2) for index in indices]


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.layers(x).relu())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--period-s", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--inner", action="store_true", help="a part of the model alone is a DataParallel")
    parser.add_argument("--one-gpu", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = Net(args.layers).cuda()
    if args.inner:
        net.layers = nn.DataParallel(net.layers)
    elif not args.one_gpu:
        net = nn.DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = DataLoader(Rows(64 * args.batch_size, args.period_s), batch_size=args.batch_size, shuffle=True)
    ends_s = time.monotonic() + args.seconds
    while time.monotonic() < ends_s:
        for x, target in loader:
            loss = nn.functional.cross_entropy(net(x.cuda()), target.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            if time.monotonic() > ends_s:
                break


if __name__ == "__main__":
    main()

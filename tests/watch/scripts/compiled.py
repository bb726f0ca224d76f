"""Compiles a model in several ways, keeps an average of it, saves, scripts and traces it; prints what was compiled."""

import copy
import io

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def run(kind):
    net = Net()
    model = torch.compile(net, backend="eager") if kind == "wrapper" else net
    if kind == "in place":
        model.compile(backend="eager")

    def loss_of(x):
        return model(x).mean()

    loss_of = torch.compile(loss_of, backend="eager") if kind == "function" else loss_of
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    average = copy.deepcopy(net)
    for _epoch in range(2):
        for (x,) in DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss_of(x).backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
                average(x)
    torch.save(net, buffer := io.BytesIO())
    copies = [torch.jit.script(net), torch.fx.symbolic_trace(net), copy.deepcopy(net), average]
    print(kind, [one(x).sum().item() for one in copies], len(buffer.getvalue()), b"wellfed" in buffer.getvalue())
    print({name: dict(found) for name, found in counters.items() if name in ("frames", "stats", "graph_break")})
    counters.clear()
    torch._dynamo.reset()


for kind in ("none", "wrapper", "in place", "function"):
    run(kind)

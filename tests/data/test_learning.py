"""What is learned does not depend on who builds the batches."""

import pytest
import torch
from torch import nn

from tests.kit import sets
from tests.kit.few import few
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

PLANS = {
    "threads": LoaderSettings("threads", 2, 2),
    "processes": LoaderSettings("processes", 2, 2),
    "persistent": LoaderSettings("processes", 2, 2, persistent_workers=True),
    "torch": LoaderSettings("torch"),
    "torch, workers": LoaderSettings("torch", 1, 2),
    "torch, persistent": LoaderSettings("torch", 2, 2, persistent_workers=True),
}


def learned(plan: LoaderSettings, num_epochs: int = 2) -> list[float]:
    """Weights after 12 steps with dropout, which draws from the process's generator."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = train_loader(sets.Fetching(), batch_size=4, seed=1, settings=plan)
    for _ in range(num_epochs):
        for delivery in made:
            rows = torch.stack([values.float() for values in delivery.batch.values()], dim=1)
            optimizer.zero_grad()
            model(rows / 1000).square().mean().backward()
            optimizer.step()
    made.close()
    return [weight for parameter in model.parameters() for weight in parameter.flatten().tolist()]


@pytest.mark.parametrize("name", few(PLANS, 4))
def test_the_backend_changes_nothing_that_is_learned(name: str) -> None:
    assert learned(PLANS[name]) == learned(LoaderSettings())

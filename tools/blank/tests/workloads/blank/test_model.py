from __future__ import annotations

import pytest
import torch

from workloads.blank.data import NUM_FEATURES, datasets
from workloads.blank.model import Regressor


@pytest.fixture
def model() -> Regressor:
    torch.manual_seed(0)
    return Regressor(NUM_FEATURES, hidden=32)


def test_the_loss_is_a_mean_over_the_batch(model: Regressor):
    """The engine cuts a step into micro-batches and weights their losses: only a mean adds up to the same."""
    inputs, targets = datasets(60).train[:60]
    whole = model.loss((inputs, targets)).loss
    parts = [model.loss((inputs[part], targets[part])).loss * len(inputs[part]) for part in (slice(45), slice(45, 60))]
    assert torch.allclose(sum(parts) / 60, whole)


def test_it_learns_more_than_the_mean(model: Regressor):
    data = datasets(1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        model.loss(data.train[:1000]).loss.backward()
        optimizer.step()
    held_out = data.test[:100]
    assert model.loss(held_out).loss < 0.3 * held_out[1].var()

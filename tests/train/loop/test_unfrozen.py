from typing import Any

import torch
from torch import nn

from tests.kit import loop
from wellfed import LossOutput


class Two(nn.Module):
    """Two layers, of which the first may be frozen."""

    def __init__(self, *, train_body: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.body.requires_grad_(train_body)

    def loss(self, batch: Any) -> LossOutput:
        return LossOutput(self.head(self.body(batch)).mean())


def test_weights_that_were_frozen_join_an_optimizers_state_without_one() -> None:
    before, now = (loop.model(model=Two(train_body=on)) for on in (False, True))
    trained = [weight for weight in before.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.5)
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    resumed = torch.optim.AdamW(now.model.parameters(), lr=0.1)
    now.load_optimizer_state(resumed, optimizer.state_dict(), before.trained())
    assert resumed.param_groups[0]["lr"] == 0.5
    stepped = {name for name, weight in now.model.named_parameters() if weight in resumed.state}
    assert stepped == {"head.weight", "head.bias"}
    old, new = optimizer.state[before.model.head.weight], resumed.state[now.model.head.weight]
    assert torch.equal(old["exp_avg"], new["exp_avg"])

"""What is looked at before a checkpoint."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from tests.lit import tiny
from wellfed.lit.callbacks.checkpoints import is_finite, no_longer_finite


class Odd(pl.LightningModule):
    """Weights of many kinds, and what is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.small = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2,), 3e4, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.empty, self.lazy = nn.Parameter(torch.ones(0)), nn.LazyLinear(2)
        self.frozen = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
        self.register_buffer("mask", torch.full((2,), -math.inf))


def test_masks_and_frozen_weights_may_be_infinite() -> None:
    assert is_finite(Odd())
    assert is_finite(pl.LightningModule())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["full", "small", "brain"])
def test_a_single_weight_is_seen(name: str, value: float) -> None:
    module = Odd()
    getattr(module, name).data.view(-1)[-1] = value
    assert not is_finite(module)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_so_is_a_loss_since_the_last_row(value: float) -> None:
    module = tiny.module()
    module.totals.add("loss", torch.tensor(value), 1)
    assert is_finite(module)  # not yet known to count
    module.totals.commit()
    assert not is_finite(module)
    module.totals.take()
    assert is_finite(module)


@pytest.mark.parametrize(("steps", "words"), [((3, 5), "within the steps 3 to 5;"), ((5, 5), "in step 5;")])
def test_it_is_said_when(steps: tuple[int, int], words: str) -> None:
    assert words in no_longer_finite(*steps)


@pytest.mark.simulated(cards=1)
def test_a_card_is_waited_for_once() -> None:
    import fake_cuda

    module = tiny.module().cuda()
    before = fake_cuda.driver.counts()
    assert is_finite(module)
    after = fake_cuda.driver.counts()
    assert after["synchronisations"] - before["synchronisations"] == 1

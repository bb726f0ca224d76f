"""One step without Lightning does what plain PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.lit import tiny
from wellfed.batches import Delivery
from wellfed.memory.ladder import MicroBatches
from wellfed.step.compiled import Loss
from wellfed.step.micro_batches import Preparation
from wellfed.step.precision import Precision
from wellfed.step.train_step import TrainStep

CPU = torch.device("cpu")


def made(optimizer: Any, micro: int, **more: Any) -> TrainStep:
    torch.manual_seed(3)
    model = tiny.TinyModel()
    return TrainStep(
        model,
        optimizer(model.parameters(), lr=0.1),
        loss=Loss(model, "none", print),
        prepare=Preparation(None, 0),
        micro=MicroBatches(micro),
        precision=Precision("32-true", "cpu"),
        device=CPU,
        **more,
    )


def delivery() -> Delivery:
    data = tiny.TinyData(16)
    return Delivery({"x": data.inputs, "y": data.targets}, epoch=0, index=0, total=16)


@pytest.mark.parametrize("micro", [16, 5])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_it_is_plain_pytorch(optimizer: Any, micro: int) -> None:
    """LBFGS asks for gradients as often as it likes, and goes by the loss of the whole step."""
    step = made(optimizer, micro, gradient_clip=None if optimizer is torch.optim.LBFGS else 0.1)
    losses = [float(step(delivery())) for _ in range(3)]
    torch.manual_seed(3)
    model = tiny.TinyModel()
    plain = optimizer(model.parameters(), lr=0.1)
    batch = delivery().batch

    def closure() -> torch.Tensor:
        plain.zero_grad()
        loss = model.loss(batch).loss
        loss.backward()
        if optimizer is not torch.optim.LBFGS:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss.detach()

    expected = [float(plain.step(closure)) for _ in range(3)]
    ours, others = (torch.cat([weight.flatten() for weight in one.parameters()]) for one in (step._model, model))
    if micro == 16:
        assert losses == expected
        assert torch.equal(ours, others)
    else:
        assert losses == pytest.approx(expected, rel=1e-3)
        assert (ours - others).norm() / others.norm() < 1e-3


def test_without_a_ladder_errors_of_memory_pass_as_they_are() -> None:
    step = made(torch.optim.SGD, 16)
    step._model.fail = lambda size, call: torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError):
        step(delivery())


def test_what_was_done_is_noted() -> None:
    step = made(torch.optim.SGD, 6)
    step(delivery())
    assert (step.number, step.num_micro_batches, step.largest, step.samples) == (1, 3, 6, 16)
    assert step.totals.count == 1

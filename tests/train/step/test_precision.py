from contextlib import nullcontext

import pytest
import torch
from torch import nn

from wellfed.train.step.precision import Precision

CPU = "cpu"


@pytest.mark.parametrize(
    ("name", "weights", "forward", "made"),
    [
        ("32-true", torch.float32, torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
        ("16-mixed", torch.float32, torch.float16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_types_of_weights_results_and_new_tensors(name, weights, forward, made):
    precision = Precision.for_training(name, CPU)
    model = precision.convert(nn.Linear(2, 2))
    x = torch.ones(3, 2)
    with precision.forward() or nullcontext():
        result, new = model(x.to(precision.dtype_of(x))), torch.ones(1)
    assert (model.weight.dtype, result.dtype, new.dtype) == (weights, forward, made)
    assert torch.ones(1).dtype == torch.float32
    assert precision.dtype_of(torch.ones(2, dtype=torch.long)) == torch.long
    assert (precision.scaler is not None) == (name == "16-mixed")


def scaled(optimizer):
    return Precision("16-mixed", CPU, torch.amp.GradScaler(CPU, init_scale=2.0**4)), optimizer(
        [nn.Parameter(torch.ones(2))]
    )


class OutOfMemoryOnce(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.5)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


def test_a_scaled_step_can_be_done_again_where_memory_did_not_suffice():
    precision, optimizer = scaled(OutOfMemoryOnce)
    (weight,) = optimizer.param_groups[0]["params"]

    def gradients():
        weight.grad = None
        loss = weight.sum()
        precision.scale(loss).backward()
        precision.unscale(optimizer, clips=False)
        return loss

    with pytest.raises(torch.OutOfMemoryError):
        precision.scaled_step(optimizer, gradients)
    precision.scaled_step(optimizer, gradients)
    assert weight.tolist() == [0.5, 0.5]
    assert precision.scaler.get_scale() == 2.0**4


def test_an_optimizer_that_asks_often_cant_be_scaled():
    precision, optimizer = scaled(torch.optim.LBFGS)
    with pytest.raises(TypeError, match="LBFGS can't be used with gpu.precision=16-mixed"):
        precision.scaled_step(optimizer, lambda: torch.zeros(()))

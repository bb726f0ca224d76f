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
    with precision.forward():
        result, new = model(x.to(precision.dtype_of(x))), torch.ones(1)
    assert (model.weight.dtype, result.dtype, new.dtype) == (weights, forward, made)
    assert torch.ones(1).dtype == torch.float32
    assert precision.dtype_of(torch.ones(2, dtype=torch.long)) == torch.long
    assert (precision.scaler is not None) == (name == "16-mixed")

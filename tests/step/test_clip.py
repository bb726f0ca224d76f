from __future__ import annotations

import pytest
import torch
from torch import nn

from wellfed.step.clip import are_of_one_kind, clip_by_norm


def network(dtype=torch.float32):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5), nn.Linear(5, 5)).to(dtype)
    for parameter in list(made.parameters())[:-2]:  # the last layer has no gradients
        parameter.grad = torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 7.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_those_of_torchs_own_clipping_bit_for_bit(max_norm, dtype):
    ours, torchs = network(dtype), network(dtype)
    groups = [{"params": list(ours[0].parameters())}, {"params": list(ours[1:].parameters())}]
    clip_by_norm(torch.optim.SGD(groups, lr=0.1), max_norm)
    nn.utils.clip_grad_norm_(torchs.parameters(), max_norm)
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_does_what_it_does_in_torch(value):
    ours, torchs = network(), network()
    for made in (ours, torchs):
        made[0].weight.grad[0, 0] = value
    clip_by_norm(torch.optim.SGD(ours.parameters(), lr=0.1), 1.0)
    nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
    assert torch.equal(ours[1].weight.grad.isnan(), torchs[1].weight.grad.isnan())
    assert torch.equal(ours[1].weight.grad.nan_to_num(), torchs[1].weight.grad.nan_to_num())


def test_no_gradients_are_no_error():
    clip_by_norm(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1.0)


def test_kinds_differ_by_type_and_device():
    plain = nn.Linear(2, 2)
    assert are_of_one_kind(list(plain.parameters()))
    assert not are_of_one_kind([*plain.parameters(), *nn.Linear(2, 2, dtype=torch.bfloat16).parameters()])
    assert not are_of_one_kind([*plain.parameters(), *nn.Linear(2, 2, device="meta").parameters()])
    assert not are_of_one_kind([])

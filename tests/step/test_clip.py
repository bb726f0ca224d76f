from __future__ import annotations

import pytest
import torch
from torch import nn

from wellfed.step.clip import ClipByNorm


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
    ClipByNorm(torch.optim.SGD(groups, lr=0.1), max_norm)()
    nn.utils.clip_grad_norm_(torchs.parameters(), max_norm)
    for one, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_does_what_it_does_in_torch(value):
    ours, torchs = network(), network()
    for made in (ours, torchs):
        made[0].weight.grad[0, 0] = value
    ClipByNorm(torch.optim.SGD(ours.parameters(), lr=0.1), 1.0)()
    nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
    assert torch.equal(ours[1].weight.grad.isnan(), torchs[1].weight.grad.isnan())
    assert torch.equal(ours[1].weight.grad.nan_to_num(), torchs[1].weight.grad.nan_to_num())


def test_no_gradients_are_no_error():
    ClipByNorm(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 1.0)()


def test_kinds_differ_by_type_and_device():
    def is_of_one_kind(*layers):
        return ClipByNorm(torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1), 1.0).is_of_one_kind

    assert is_of_one_kind(nn.Linear(2, 2))
    assert not is_of_one_kind(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    assert not is_of_one_kind(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def test_what_an_optimizer_loads_is_clipped():
    """A checkpoint is loaded when clipping has been set up; loading exchanges the groups."""
    made = network()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    clip = ClipByNorm(optimizer, 1e-3)
    optimizer.load_state_dict(torch.optim.SGD(network().parameters(), lr=0.1).state_dict())
    clip()
    assert torch.stack([one.grad.norm() for one in made.parameters() if one.grad is not None]).norm() < 2e-3

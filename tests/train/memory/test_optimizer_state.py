import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

from wellfed.train.memory.optimizer_state import BeforeStep, allocate, one_weight_at_a_time

BEGUN: dict[str, Any] = {
    "adam": lambda weights: optim.Adam(weights, weight_decay=0.1, amsgrad=True),
    "adamw": lambda weights: optim.AdamW(weights, lr=torch.tensor(0.01), weight_decay=0.1),
    "fused": lambda weights: optim.AdamW(weights, fused=True),
    "sgd": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda weights: optim.RMSprop(weights, centered=True, momentum=0.1),
    "adafactor": optim.Adafactor,
}


class KeepsItsFirstGradient(optim.Optimizer):
    """As some do: a zero gradient before the first is another start."""

    def __init__(self, weights: Any, lr: float = 0.1) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("first", weight.grad.clone())
                weight.sub_(group["lr"] * (weight.grad - 0.5 * state["first"]))


LEFT: dict[str, Any] = {
    "dampening": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5),
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "lbfgs": optim.LBFGS,
    "own": KeepsItsFirstGradient,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


def three_steps(model: nn.Module, optimizer: Any) -> torch.Tensor:
    torch.manual_seed(1)
    for _ in range(3):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.linspace(0, 1, 8).view(2, 4)).square().sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, optim.LBFGS) else optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("name", [*BEGUN, *LEFT])
def test_later_steps_are_the_same_bit_for_bit(name: str) -> None:
    make = {**BEGUN, **LEFT}[name]
    model, untouched = net(), net()
    optimizer = make(list(model.parameters()))
    rates = [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    assert allocate(optimizer, model) is (name in BEGUN)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), untouched.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())
    assert len(optimizer.state) == (4 if name in BEGUN else 0)
    assert [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups] == rates
    assert torch.equal(three_steps(model, optimizer), three_steps(untouched, make(list(untouched.parameters()))))


def test_sparse_gradients_stay_sparse() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())
    assert allocate(optimizer, model)
    assert optimizer.state[model.weight]["exp_avg"].shape == (10, 3)
    mixed = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3))
    momentum = optim.SGD(mixed.parameters(), lr=0.1, momentum=0.9)
    assert allocate(momentum, mixed)
    assert momentum.state[mixed[0].weight]["momentum_buffer"].is_sparse


def test_a_state_that_is_there_stays() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    three_steps(model, optimizer)
    before = {name: value.clone() for name, value in optimizer.state[model[0].weight].items()}
    assert not allocate(optimizer, model)
    assert all(torch.equal(before[name], value) for name, value in optimizer.state[model[0].weight].items())


def test_a_step_that_has_begun_is_told_from_none() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    allocate(optimizer, model)
    before = BeforeStep(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    assert before.is_as_it_was()
    optimizer.state[model[0].weight]["exp_avg"].mul_(0.9)  # as far as a step may come before memory runs out
    assert not before.is_as_it_was()
    before = BeforeStep(optimizer)
    optimizer.state[model[0].weight]["count"] = 1
    assert not before.is_as_it_was()


@pytest.mark.parametrize("make", [optim.NAdam, optim.Rprop, optim.RAdam])
def test_states_that_a_first_step_was_about_to_make_are_no_change(make: Any) -> None:
    """Half made they would be taken for whole by the next step."""
    model, untouched = net(), net()
    optimizer, other = make(model.parameters()), make(untouched.parameters())
    before = BeforeStep(optimizer)
    optimizer.state[model[0].weight]["step"] = torch.zeros(())
    assert before.is_as_it_was()
    assert torch.equal(three_steps(model, optimizer), three_steps(untouched, other))


class NoRoomForMany(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_small_copy_without_room_is_no_optimizer_that_starts_otherwise() -> None:
    model = net()
    with pytest.raises(torch.OutOfMemoryError):
        allocate(NoRoomForMany(model.parameters(), lr=0.1, momentum=0.9), model)


def test_one_weight_at_a_time() -> None:
    weights = list(net().parameters())
    optimizer = optim.Adam(weights, foreach=True)
    assert one_weight_at_a_time(optimizer)
    assert optimizer.param_groups[0]["foreach"] is False
    assert not one_weight_at_a_time(optimizer)
    assert not one_weight_at_a_time(optim.Adam(weights, fused=True))


@pytest.mark.simulated(cards=1, mib=64)
def test_without_the_room_for_it_nothing_has_changed() -> None:
    model = nn.Linear(2048, 2048, bias=False, device="cuda")  # 16 MiB; Adam wants 32 more, and gradients
    before = model.weight.detach().cpu()
    optimizer = optim.AdamW(model.parameters(), weight_decay=0.1)
    ballast = torch.empty(10 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        allocate(optimizer, model)
    assert not optimizer.state
    assert model.weight.grad is None
    assert torch.equal(model.weight.detach().cpu(), before)
    del ballast
    torch.cuda.empty_cache()
    assert one_weight_at_a_time(optimizer)
    assert torch.cuda.memory_allocated() == 16 << 20


@pytest.mark.parametrize("name", BEGUN)
def test_weights_that_join_later_get_a_state_and_the_others_keep_theirs(name: str) -> None:
    model, untouched = net(), net()
    first, second = model
    optimizer = BEGUN[name](model.parameters())
    second.requires_grad_(False)
    allocate(optimizer, model)
    three_steps(model, optimizer)
    assert set(optimizer.state) == set(first.parameters())
    second.requires_grad_(True)
    before = {
        weight: {key: copy.deepcopy(value) for key, value in state.items()} for weight, state in optimizer.state.items()
    }
    kept = [weight.detach().clone() for weight in model.parameters()]
    assert allocate(optimizer, model)
    assert set(optimizer.state) == set(model.parameters())
    for weight, state in before.items():
        assert all(
            torch.equal(torch.as_tensor(optimizer.state[weight][key]), torch.as_tensor(state[key])) for key in state
        )
    assert all(torch.equal(weight, value) for weight, value in zip(model.parameters(), kept, strict=True))
    assert all(torch.as_tensor(optimizer.state[weight].get("step", 0)) == 0 for weight in second.parameters())
    assert torch.equal(second.weight, untouched[1].weight)
    assert not allocate(optimizer, model)

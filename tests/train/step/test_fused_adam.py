"""A fused Adam steps as torch's own does, bit for bit, and torch steps where something has to see it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from wellfed.train.step.fused_adam import FusedAdam, step_of


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 2))


def trained(made, optimizer, step, unused=(), steps=6):
    """Weights and states after steps on random data, without gradients for the layers ``unused`` in odd steps."""
    torch.manual_seed(1)

    def closure(without):
        for weight in made.parameters():
            weight.grad = None
        loss = made(torch.randn(4, 5)).square().mean()
        loss.backward()
        for layer in without:
            made[layer].weight.grad = None
        return loss

    for number in range(steps):
        step(partial(closure, unused if number % 2 else ()))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as a schedule does
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [weight.detach() for weight in made.parameters()] + states


def alike(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "betas": (0.8, 0.99)}, {"amsgrad": True}, {"maximize": True}]
)
@pytest.mark.parametrize("unused", [(), (2,)])
def test_steps_are_those_of_torch(kind, options, unused):
    found = []
    for is_ours in (True, False):
        made = network()
        groups = [{"params": made[0].parameters()}, {"params": [*made[2:].parameters()], "lr": 0.03}]
        optimizer = kind(groups, lr=0.01, fused=True, **options)
        step = step_of(optimizer) if is_ours else optimizer.step
        assert isinstance(step, FusedAdam) == is_ours
        found.append(trained(made, optimizer, step, unused))
    assert alike(*found)


def test_a_usual_step_does_without_torchs_python(monkeypatch):
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    step = step_of(optimizer)
    trained(made, optimizer, step, steps=1)  # makes the states
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    trained(made, optimizer, step, steps=2)


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_see_each_step(of_all):
    made, seen = network(), []
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    step = step_of(optimizer)
    trained(made, optimizer, step, steps=2)
    register = torch_optimizer.register_optimizer_step_post_hook if of_all else optimizer.register_step_post_hook
    handle = register(lambda *arguments: seen.append(arguments[0]))
    try:
        trained(made, optimizer, step, steps=3)
    finally:
        handle.remove()
    trained(made, optimizer, step, steps=2)
    assert seen == [optimizer] * 3


def test_a_profiler_sees_the_step_by_its_name():
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    step = step_of(optimizer)
    trained(made, optimizer, step, steps=2)
    with torch.profiler.profile() as profiler:
        trained(made, optimizer, step, steps=1)
    assert any(event.name.startswith("Optimizer.step#AdamW") for event in profiler.events())


def test_a_loaded_state_counts_from_the_next_step_on():
    """A checkpoint replaces states and groups, with their options, after the step was made."""
    for fused in (True, False):
        found = []
        for is_ours in (True, False):
            made = network()
            earlier = torch.optim.AdamW(made.parameters(), lr=0.02, fused=fused, amsgrad=not fused)
            trained(made, earlier, earlier.step, steps=2)
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
            step = step_of(optimizer) if is_ours else optimizer.step
            optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
            found.append(trained(made, optimizer, step))
        assert alike(*found)


def test_schedulers_of_torch_know_of_the_step(recwarn):
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = step_of(optimizer)
    assert isinstance(step, FusedAdam)
    trained(made, optimizer, step, steps=2)
    scheduler.step()
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]


def test_others_step_by_themselves():
    class Own(torch.optim.AdamW):
        pass

    weights = list(network().parameters())
    for optimizer in (torch.optim.SGD(weights, lr=0.1), Own(weights, lr=0.1, fused=True)):
        assert step_of(optimizer) == optimizer.step
    replaced = torch.optim.AdamW(weights, lr=0.1, fused=True)
    replaced.step = lambda closure: closure()
    assert step_of(replaced) is replaced.step
    mixed = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], fused=True)
    for weight in mixed.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    for _ in range(2):
        step_of(mixed)(lambda: torch.zeros(()))
    assert [float(state["step"]) for state in mixed.state.values()] == [2.0, 2.0]

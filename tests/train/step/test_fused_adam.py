"""A fused Adam steps as torch's own does, bit for bit, and torch steps where something has to see it."""

from __future__ import annotations

import copy
import types
from functools import partial

import pytest
import torch
from torch import nn

from wellfed.train.step.fused_adam import make_step


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


def stepping(optimizer):
    """A function that computes gradients, then makes the step of ours."""

    def step(closure):
        closure()
        make_step(optimizer)

    return step


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
        found.append(trained(made, optimizer, stepping(optimizer) if is_ours else optimizer.step, unused))
    assert alike(*found)


def test_a_usual_step_does_without_torchs_python(monkeypatch):
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trained(made, optimizer, stepping(optimizer), steps=1)  # makes the states
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", None)
    trained(made, optimizer, stepping(optimizer), steps=2)


def test_hooks_and_profilers_see_the_step():
    made, seen = network(), []
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
    step = stepping(optimizer)
    trained(made, optimizer, step, steps=2)
    handle = optimizer.register_step_post_hook(lambda *arguments: seen.append(arguments[0]))
    trained(made, optimizer, step, steps=3)
    handle.remove()
    with torch.profiler.profile() as profiler:
        trained(made, optimizer, step, steps=1)
    assert seen == [optimizer] * 3
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
            step = stepping(optimizer) if is_ours else optimizer.step
            optimizer.load_state_dict(copy.deepcopy(earlier.state_dict()))
            found.append(trained(made, optimizer, step))
        assert alike(*found)


def test_weights_of_two_types_are_torchs_to_step():
    mixed = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], fused=True)
    for weight in mixed.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    for _ in range(2):
        make_step(mixed)
    assert [float(state["step"]) for state in mixed.state.values()] == [2.0, 2.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_a_user_has_replaced_is_called(kind):
    optimizer = kind(network().parameters(), lr=0.1)
    called = []
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.step = types.MethodType(lambda self, closure=None: called.append(closure), optimizer)
    make_step(optimizer)
    assert called == [None]


def test_sparse_gradients_are_torchs_to_refuse():
    table = nn.Embedding(4, 2)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1, fused=True)
    table(torch.tensor([1])).sum().backward()
    make_step(optimizer)
    table.sparse = True
    table.weight.grad = None
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        make_step(optimizer)

"""A fused Adam steps as torch's own does, bit for bit, and torch steps where something has to see it."""

from __future__ import annotations

import copy
import functools
import types
from functools import partial
from unittest.mock import Mock

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
        assert not isinstance(step_of(optimizer), FusedAdam)
        closure = Mock(return_value=torch.zeros(()))
        step_of(optimizer)(closure)
        closure.assert_called_once_with()
    mixed = torch.optim.AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], fused=True)
    for weight in mixed.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    for _ in range(2):
        step_of(mixed)(lambda: torch.zeros(()))
    assert [float(state["step"]) for state in mixed.state.values()] == [2.0, 2.0]


@pytest.mark.parametrize("has_schedule", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_step_that_a_user_has_replaced_is_called(has_schedule, when):
    optimizer = torch.optim.AdamW(network().parameters(), lr=0.1, fused=True)
    own, called = optimizer.step, []

    def mine(self, closure=None):
        called.append(closure())

    if when == "before":
        optimizer.step = types.MethodType(mine, optimizer)
    if has_schedule:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if when == "after":
        optimizer.step = functools.wraps(own)(functools.partial(mine, optimizer))
    step = step_of(optimizer)
    if when == "later":
        optimizer.step = types.MethodType(mine, optimizer)
    step(lambda: torch.tensor(3.0))
    assert called == [3.0]


def stepped_alike(change, kind=torch.optim.AdamW):
    """Whether steps after a change of the optimizer are torch's; the change gets network and optimizer."""
    found = []
    for is_ours in (True, False):
        made = network()
        optimizer = kind(made[:3].parameters(), lr=0.01, fused=True)
        step = step_of(optimizer) if is_ours else lambda closure, optimizer=optimizer: optimizer.step(closure)
        trained(made, optimizer, step, steps=2)
        change(made, optimizer)
        found.append(trained(made, optimizer, step, steps=4))
    return alike(*found)


@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True}, {"fused": False}, {}])
def test_a_group_that_comes_later_has_its_options(options):
    assert stepped_alike(lambda made, optimizer: optimizer.add_param_group({"params": made[3].parameters(), **options}))


def test_an_option_that_is_changed_counts_from_the_next_step_on():
    assert stepped_alike(lambda _, optimizer: optimizer.param_groups[0].update(maximize=True))


def test_torch_2_6_has_no_key_for_decoupled_weight_decay():
    made, other = network(), network()
    ours, torchs = (torch.optim.AdamW(one.parameters(), lr=0.01, fused=True) for one in (made, other))
    step = step_of(ours)
    first = trained(made, ours, step), trained(other, torchs, torchs.step)
    assert alike(*first)
    for group in ours.param_groups:
        del group["decoupled_weight_decay"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ours), "step", None)  # torch itself would need the key
        steps = ours.state[next(made.parameters())]["step"].clone()
        for weight, its in zip(made.parameters(), other.parameters(), strict=True):
            weight.grad = its.grad = torch.ones_like(weight)
        step(lambda: torch.zeros(()))
    torchs.step()
    assert ours.state[next(made.parameters())]["step"] == steps + 1
    assert alike([*made.parameters()], [*other.parameters()])


def test_sparse_gradients_are_torchs_to_refuse():
    table = nn.Embedding(4, 2)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1, fused=True)
    step = step_of(optimizer)
    table(torch.tensor([1])).sum().backward()
    step(lambda: torch.zeros(()))
    table.sparse = True
    table.weight.grad = None
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        step(lambda: torch.zeros(()))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_fails_before_it_changes_anything_may_be_repeated(kind):
    made = network()
    optimizer = kind(made.parameters(), lr=0.1, **({"fused": True} if kind is torch.optim.AdamW else {}))
    step = step_of(optimizer)

    def fails():
        raise torch.OutOfMemoryError

    for _ in range(2):  # without states, then with states
        with pytest.raises(torch.OutOfMemoryError):
            step(fails)
        assert step.is_as_it_was()
        trained(made, optimizer, step, steps=1)
        assert not step.is_as_it_was()


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_step_that_fails_in_the_second_group_may_not_be_repeated(by_torch):
    made = network()
    optimizer = torch.optim.AdamW([{"params": made[0].parameters()}, {"params": made[2].parameters()}], 0.1, fused=True)
    step = step_of(optimizer)
    trained(made, optimizer, step, steps=1)
    optimizer.state[made[2].weight]["exp_avg"] = None
    if by_torch:
        optimizer.register_step_pre_hook(lambda *_: None)
    before = made[0].weight.detach().clone()
    with pytest.raises(TypeError):
        trained(made, optimizer, step, steps=1)
    assert not torch.equal(made[0].weight, before)
    assert not step.is_as_it_was()


def test_states_of_a_first_step_that_failed_are_deleted():
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
    step = step_of(optimizer)

    def fails():
        for weight in made.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.state[made[0].weight]["step"] = torch.zeros(())
        raise torch.OutOfMemoryError

    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError):
        step(fails)
    assert step.is_as_it_was()
    assert not optimizer.state

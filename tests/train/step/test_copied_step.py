"""A rank takes over what the optimizer's step has changed on another one, all of it or nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.gloo_ranks import join, leave, of_ranks
from wellfed.train.step.copied_step import SteppedState
from wellfed.train.step.ranks import RetryingReplicas


class Keeping(torch.optim.SGD):
    """Keeps numbers of each kind, of weights and of its group."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        group["is_warm"] = True
        for weight in group["params"]:
            state = self.state[weight]
            state["step"] = state.get("step", 0) + 1
            state["norm"] = state.get("norm", 0.0) + float(weight.detach().norm())
            state["seen"] = state.get("seen", torch.zeros((), dtype=torch.int64)) + 1
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda weights: Keeping(weights, lr=0.1, momentum=0.9),
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.01, amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01, centered=True),
    "lists": lambda weights: torch.optim.LBFGS(weights, lr=0.01),
}


def state_of(optimizer: torch.optim.Optimizer, layer: nn.Module) -> Any:
    return copy.deepcopy((optimizer.state_dict(), layer.state_dict()))


def stepped(name: str, steps: int, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).to(dtype)
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(steps):
        for weight in layer.parameters():
            weight.grad = torch.randn_like(weight)
        optimizer.step(lambda: 0.0)
    return layer, optimizer


def take_over(number: int, folder: Path) -> None:
    """Rank 1 has taken a step more; of some it has other parts than rank 0, or what can't be sent."""
    join(number, folder)
    found = {}
    for name, first in {"sgd": 1, "adam": 1, "rmsprop": 1, "lists": 1, "none before": 0}.items():
        kind = "adam" if name == "none before" else name
        layer, optimizer = stepped(kind, first + number)
        scale = torch.tensor([1.0 + number])
        before = state_of(optimizer, layer)
        ranks = RetryingReplicas(
            nn.parallel.DistributedDataParallel(layer), torch.device("cpu"), list(layer.parameters())
        )
        # DDP has made the weights of rank 0 those of all: rank 1 steps on from where it was.
        layer.load_state_dict(before[1])
        was_taken = ranks.take_step_of_another(optimizer, [scale], has_stepped=number == 1)
        found[name] = was_taken, before, state_of(optimizer, layer), scale
    leave(number, folder, found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return of_ranks(take_over, tmp_path_factory.mktemp("ranks"))


def test_weights_states_and_numbers_are_those_of_the_rank_that_has_stepped(found: list[Any]) -> None:
    lacking, source = found
    for name in ("sgd", "adam", "rmsprop"):
        (was_taken, before, after, scale), (_, _, wanted, _) = lacking[name], source[name]
        assert was_taken
        assert scale.tolist() == [2.0]
        torch.testing.assert_close(after, wanted, rtol=0, atol=0)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(before, wanted, rtol=0, atol=0)
    (state, _), (wanted, _) = lacking["sgd"][2], source["sgd"][2]
    for key in ("step", "norm"):
        assert type(state["state"][0][key]) is type(wanted["state"][0][key])
    assert state["param_groups"][0]["is_warm"] is True
    assert state["param_groups"][0]["k"] == 2


@pytest.mark.parametrize("name", ["lists", "none before"])
def test_where_not_all_can_be_copied_nothing_is(found: list[Any], name: str) -> None:
    for number, (was_taken, before, after, scale) in enumerate(each[name] for each in found):
        assert not was_taken
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert scale.tolist() == [1.0 + number]


def digest(name: str, steps: int, **more: Any) -> int:
    return SteppedState(stepped(name, steps, **more)[1]).digest


def test_the_digest_is_that_of_the_parts_and_not_of_their_values() -> None:
    assert digest("adam", 1) == digest("adam", 5)
    others = [digest("adam", 0), digest("sgd", 1), digest("rmsprop", 1), digest("adam", 1, dtype=torch.float64)]
    assert len({digest("adam", 1), *others}) == 5
    _, optimizer = stepped("adam", 1)
    assert SteppedState(optimizer, [torch.zeros(2)]).digest != SteppedState(optimizer).digest

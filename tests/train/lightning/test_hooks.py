from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.kit import tiny
from wellfed.train.lightning.hooks import IN_STEP, hooks_of

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Listens(pl.Callback):
    """A callback that records the hooks of a step in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.heard.append("zero")

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        assert loss.requires_grad
        self.heard.append("before")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        assert any(weight.grad is not None for weight in module.parameters())
        self.heard.append("after")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        self.heard.append("step")
        module.log("norm", self.norms[-1])


class Zeroes(pl.Callback):
    """A callback that changes the gradients."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for weight in module.parameters():
            weight.grad.zero_()


def test_a_callback_hears_of_a_step_at_its_places(tmp_path: Path) -> None:
    listens = Listens()
    module = tiny.module(micro=16)
    trainer = tiny.fit(module, tmp_path, users=[listens], max_steps=2, gradient_clip=1e-3)
    assert listens.heard == ["zero", *["before", "after"] * 2, "step"] * 2
    assert min(listens.norms) > 1e-3, "it was clipped before"
    assert float(trainer.callback_metrics["norm"]) == pytest.approx(listens.norms[-1])


def test_a_callback_that_listens_changes_nothing(tmp_path: Path) -> None:
    heard, unheard = tiny.module(), tiny.module()
    tiny.fit(heard, tmp_path, users=[Listens()], max_steps=5)
    tiny.fit(unheard, tmp_path, max_steps=5)
    assert torch.equal(tiny.weights(heard), tiny.weights(unheard))


def test_a_callback_may_change_gradients(tmp_path: Path) -> None:
    module = tiny.module(lr=0.1)
    before = tiny.weights(module)
    module.plain.make_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    tiny.fit(module, tmp_path, users=[Zeroes()], max_steps=2)
    assert torch.equal(before, tiny.weights(module))


def test_hooks_of_a_callback_are_those_that_it_has() -> None:
    assert hooks_of(Zeroes(), IN_STEP) == ["on_before_optimizer_step"]
    assert hooks_of(pl.Callback()) == []

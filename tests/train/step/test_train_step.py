"""One step without Lightning does what plain PyTorch does."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.kit import tiny
from wellfed.batches import Delivery
from wellfed.contract import LossOutput
from wellfed.errors import ConfigError, DataError
from wellfed.record.entries import ignore_event
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import StepOptions, TrainStep

CPU = torch.device("cpu")


def made(optimizer: Any, micro: int, **more: Any) -> TrainStep:
    torch.manual_seed(3)
    model = tiny.TinyModel()
    computation = Computation(model, Loss(model), Preparation(None, 0), Precision("32-true", "cpu"), CPU)
    settings = StepOptions(**more)
    return TrainStep(computation, optimizer(model.parameters(), lr=0.1), Fallbacks(MicroBatches(micro)), settings)


def delivery() -> Delivery:
    data = tiny.TinyData(16)
    return Delivery({"x": data.inputs, "y": data.targets}, epoch=0, index=0, total=16)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload\.optimizer: LBFGS computes the gradients .* LightningModule"):
        made(torch.optim.LBFGS, 16)


@pytest.mark.parametrize("micro", [16, 5])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_it_is_plain_pytorch(optimizer: Any, micro: int) -> None:
    step = made(optimizer, micro, gradient_clip=0.1)
    losses = [float(step(delivery())) for _ in range(3)]
    torch.manual_seed(3)
    model = tiny.TinyModel()
    plain = optimizer(model.parameters(), lr=0.1)
    batch = delivery().batch

    def closure() -> torch.Tensor:
        plain.zero_grad()
        loss = model.loss(batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss.detach()

    expected = [float(plain.step(closure)) for _ in range(3)]
    ours, others = (torch.cat([weight.flatten() for weight in one.parameters()]) for one in (step.passes.model, model))
    if micro == 16:
        assert losses == expected
        assert torch.equal(ours, others)
    else:
        assert losses == pytest.approx(expected, rel=1e-3)
        assert (ours - others).norm() / others.norm() < 1e-3


def test_what_was_done_is_noted() -> None:
    step = made(torch.optim.SGD, 6)
    step(delivery())
    passes = step.passes
    assert (step.number, passes.num_micro_batches, passes.largest, passes.samples) == (1, 3, 6, 16)
    assert step.totals.count == 1


def weights_of(step: TrainStep) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in step.passes.model.parameters()])


def step_on(model: nn.Module, micro: int = 16, lr: float = 0.1, data: Any = None, **more: Any) -> TrainStep:
    fallbacks = Fallbacks(MicroBatches(micro))
    precision, on_event = more.pop("precision", None) or Precision("32-true", "cpu"), more.pop("on_event", ignore_event)
    computation = Computation(model, Loss(model), Preparation(data, 0, model), precision, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return TrainStep(computation, optimizer, fallbacks, StepOptions(**more), on_event=on_event)


class OfTexts(nn.Module):
    """The targets are texts, one a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def loss(self, batch: Any) -> LossOutput:
        x, texts = batch
        targets = torch.tensor([float(text) for text, _ in zip(texts, x, strict=False)])
        return LossOutput((self.net(x).squeeze(1) - targets).square().mean())


@pytest.mark.parametrize("texts", [tuple, list, np.array])
def test_targets_that_are_no_tensors_are_those_of_their_samples(texts: Any) -> None:
    torch.manual_seed(1)
    batch = (torch.randn(8, 3), texts([str(i) for i in range(8)]))
    found = []
    for micro in (8, 3):
        step = step_on(OfTexts(), micro)
        step(Delivery(batch, epoch=0, index=0, total=8))
        found.append(weights_of(step))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"micro": 4}, True),
        ({"micro": 8, "on_oom": "retry"}, False),  # unless memory runs out
        ({"micro": 8}, False),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_before_the_first_step(settings: Any, is_refused: bool) -> None:
    class Data:
        """Nothing of it is asked for."""

    batch = (torch.randn(8, 3), [str(i) for i in range(9)])
    step = step_on(OfTexts(), data=Data(), **settings)
    before = weights_of(step)
    with pytest.raises(DataError, match=r"batch\[1\] can't be cut .* list of 9 str") if is_refused else nullcontext():
        step(Delivery(batch, epoch=0, index=0, total=8))
    assert torch.equal(weights_of(step), before) == is_refused


class Masked(nn.Module):
    """The loss is a mean over what the mask leaves: NaN where it leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def loss(self, batch: Any) -> LossOutput:
        x, mask = batch
        return LossOutput(self.net(x).squeeze(1)[mask].square().mean(), {"size": mask.float().sum()})

    def loss_weight(self, batch: Any) -> int:
        return int(batch[1].sum())


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_step_without_weight_changes_nothing(precision: str) -> None:
    model, events = Masked(), list[Any]()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if precision == "16-mixed" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss, prepare = Loss(model), Preparation(None, 0, model)
    step = TrainStep(
        Computation(model, loss, prepare, Precision(precision, "cpu", scaler), CPU),
        optimizer,
        Fallbacks(MicroBatches(2)),
        StepOptions(gradient_clip=1.0),
        on_event=lambda kind, **facts: events.append((kind, facts)),
    )
    x = torch.randn(4, 3)
    step(Delivery((x, torch.tensor([True] * 4)), epoch=0, index=0, total=4))
    before, state = weights_of(step), str(optimizer.state_dict())
    scale = None if scaler is None else scaler.state_dict()
    for index in range(1, 4):
        loss = step(Delivery((x, torch.tensor([False] * 4)), epoch=0, index=index, total=4))
        assert bool(torch.isfinite(loss))
    assert torch.equal(weights_of(step), before)
    assert str(optimizer.state_dict()) == state
    assert scale == (None if scaler is None else scaler.state_dict())
    assert (step.number, step.totals.count, step.passes.samples) == (4, 1, 0)
    assert events == [("empty_step", {"step": 2, "count": 1}), ("empty_step", {"step": 3, "count": 2})]
    step(Delivery((x, torch.tensor([True] * 4)), epoch=0, index=4, total=4))
    assert not torch.equal(weights_of(step), before)


class Normed(nn.Module):
    """BatchNorm, and gradients that are NaN where the first input is 0: the square root has none there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm, self.net = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def loss(self, batch: Any) -> LossOutput:
        root = (self.scale * batch["x"][:, 0]).square().sum().sqrt() * 1e-3
        return LossOutput(self.net(self.norm(batch["x"])).square().mean() + root)


BAD = {"loss": torch.full((4, 3), float("nan")), "gradient": torch.tensor([[0.0, 1.0, 2.0]] * 4)}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("retries", [False, True])
def test_a_step_that_is_left_out_changes_neither_weights_nor_buffers(bad: str, retries: bool) -> None:
    """A finite loss may have gradients that are not."""
    events: list[Any] = []
    more: dict[str, Any] = {"on_oom": "retry"} if retries else {}
    step = step_on(Normed(), 4, on_nan="skip", on_event=lambda kind, **facts: events.append((kind, facts)), **more)
    torch.manual_seed(2)
    good = torch.randn(4, 3)
    step(Delivery({"x": good}, epoch=0, index=0, total=4))
    before = {name: value.clone() for name, value in step.passes.model.state_dict().items()}
    step(Delivery({"x": BAD[bad]}, epoch=0, index=1, total=4))
    after = step.passes.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert events == [("nan", {"step": 2, "action": "skip"})]
    assert step.totals.count == 1
    step(Delivery({"x": good}, epoch=0, index=2, total=4))
    assert not torch.equal(
        weights_of(step), torch.cat([before[n].flatten() for n, _ in step.passes.model.named_parameters()])
    )


def test_a_scaler_deals_with_gradients_that_overflow() -> None:
    """It looks for a scale; the loss is finite, and no event is written."""
    events: list[Any] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    precision = Precision("16-mixed", "cpu", scaler)
    step = step_on(tiny.TinyModel(), 16, on_nan="skip", precision=precision, on_event=lambda *a, **f: events.append(a))
    step(delivery())
    assert scaler.get_scale() < 2.0**40
    assert events == []

"""A mistake in a user's loss ends in one message with what was given and the way out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellfed.batches import Delivery
from wellfed.contract import LossOutput
from wellfed.errors import ModelError
from wellfed.train.memory.step_down import Fallbacks, MicroBatches
from wellfed.train.step.loss import Loss, add_context
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.precision import Precision
from wellfed.train.step.step_passes import Computation
from wellfed.train.step.train_step import TrainStep

SAMPLES, CLASSES = 8, 3


def batch(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return {"pixels": torch.randn(SAMPLES, 4, generator=generator), "label": labels, **more}


class Model(nn.Module):
    """Returns ``given(loss, scores)`` of a batch, or what ``of(self, batch)`` does with it."""

    def __init__(self, given: Any = None, of: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        self.table = nn.Embedding(6, 4)
        self.given, self.of = given, of

    def loss(self, batch: Any) -> Any:
        if self.of is not None:
            return self.of(self, batch)
        scores = self.net(batch["pixels"])
        return self.given(cross_entropy(scores, batch["label"], reduction="none"), scores)


def message(model: nn.Module) -> str:
    """Of the fault, which is one line."""
    with pytest.raises(ModelError) as caught:
        Loss(model)(batch())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        lambda each, scores: each.mean(),
        lambda each, scores: each.mean()[None],
        lambda each, scores: {"loss": each.mean()},
        lambda each, scores: LossOutput(each.mean()),
    ],
)
def test_a_loss_is_a_number_however_it_is_returned(given: Any) -> None:
    torch.manual_seed(0)
    model = Model(given)
    expected = cross_entropy(model.net(batch()["pixels"]), batch()["label"])
    output = Loss(model)(batch())
    assert output.loss.shape == ()
    assert torch.equal(output.loss, expected)


def test_the_scalars_beside_a_loss_are_its_metrics() -> None:
    """A tensor of one sample's scores is none, or the name would come and go with the size of the batch."""
    others = {"accuracy": torch.tensor(0.5), "error": 0.25, "hits": 3, "last": True, "name": "a", "one": torch.ones(1)}
    model = Model(lambda each, scores: {"loss": each.mean(), "scores": scores, **others})
    metrics = Loss(model)(batch()).metrics
    assert {name: float(value) for name, value in metrics.items()} == {"accuracy": 0.5, "error": 0.25, "hits": 3}


@pytest.mark.simulated
@pytest.mark.parametrize("value", [0.5, 1, torch.tensor(0.5), torch.tensor([0.5])])
def test_a_metric_of_the_host_is_moved_to_the_device_of_the_loss(value: Any) -> None:
    model = Model(lambda each, scores: LossOutput(each.mean(), {"mine": value})).cuda()
    metrics = Loss(model)({name: each.cuda() for name, each in batch().items()}).metrics
    assert metrics["mine"].device.type == "cuda"
    assert float(metrics["mine"]) == float(value)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (lambda each, scores: each, ["Model.loss returned [8] float32 as the loss", "loss.mean()"]),
        (lambda each, scores: LossOutput(each), ["returned [8] float32 as the loss"]),
        (
            lambda each, scores: {"los": each.mean(), "acc": each[0]},
            ["returned {los [] float32, acc [] float32} as the loss", "a dict with 'loss'"],
        ),
        (lambda each, scores: (each.mean(), scores), ["returned tuple([] float32, [8, 3] float32)", "LossOutput(loss"]),
        (lambda each, scores: None, ["returned NoneType as the loss"]),
        (lambda each, scores: each.mean().item(), ["returned float as the loss", "without .item()"]),
        (lambda each, scores: each.mean().detach(), ["has no gradient", "torch.no_grad()"]),
        (lambda each, scores: (scores > 0).sum(), ["torch.int64", "from integers"]),
        (lambda each, scores: LossOutput(each.mean(), {"err": each}), ["the metric err is [8] float32", "its mean"]),
        (lambda each, scores: LossOutput(each.mean(), {"err": None}), ["the metric err is NoneType", "one number"]),
        (lambda each, scores: LossOutput(each.mean(), {"err": "low"}), ["the metric err is str"]),
        (lambda each, scores: LossOutput(each.mean(), {"loss": each.mean()}), ["the name loss", "such as own_loss"]),
        (lambda each, scores: {"loss": each.mean(), "lr": 0.1}, ["the name lr", "such as own_lr"]),
        (lambda each, scores: LossOutput(each.mean(), each[0]), ["the metrics are [] float32", "metrics={'accuracy'"]),
    ],
)
def test_what_is_no_loss_is_named(given: Any, parts: list[str]) -> None:
    found = message(Model(given))
    assert all(part in found for part in parts), found


def test_a_split_may_have_a_loss_without_a_gradient() -> None:
    model = Model(lambda each, scores: each.mean().detach())
    assert Loss(model, needs_gradient=False)(batch()).loss.shape == ()
    with torch.no_grad():
        Loss(model)(batch())


@pytest.mark.parametrize(
    ("of", "notes"),
    [
        (lambda model, batch: batch["image"], []),
        (lambda model, batch: model.net(batch["wide"]), ["It failed in the layer net.0, a Linear."]),
        (lambda model, batch: model.table(batch["label"] + 9), ["It failed in the layer table, a Embedding."]),
    ],
)
def test_an_error_in_a_loss_stays_with_shapes_layer_and_batch(of: Any, notes: list[str]) -> None:
    model = Model(of=of)
    loss, precision = Loss(model), Precision("32-true", "cpu", None)
    computation = Computation(model, loss, Preparation(None, 0, model), precision, torch.device("cpu"))
    step = TrainStep(computation, torch.optim.SGD(model.parameters(), lr=0.1), Fallbacks(MicroBatches(SAMPLES)))
    with pytest.raises((KeyError, RuntimeError, IndexError, ValueError)) as caught:
        step(Delivery(batch(wide=torch.ones(8, 5)), 2, 4, SAMPLES))
    shapes = "Model was given {pixels [8, 4] float32, label [8] int64, wide [8, 5] float32}."
    assert caught.value.__notes__ == [shapes, *notes, "in batch 4 of train, epoch 2"]


class Guest(nn.Module):
    """Is called by others, as a LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, CLASSES)

    def training_step(self, batch: Any) -> Tensor:
        return self.net(batch["wide"])  # type: ignore[no-any-return]


def test_an_error_in_a_step_that_a_trainer_calls_has_them_too() -> None:
    guest = Guest()
    with pytest.raises(RuntimeError) as caught:
        guest.training_step({"wide": torch.ones(8, 5)})
    add_context(caught.value, guest)
    assert caught.value.__notes__[-1] == "It failed in the layer net, a Linear."

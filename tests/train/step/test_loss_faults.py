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
from wellfed.train.step.compiled import Loss
from wellfed.train.step.loss_faults import explained_in_hooks
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


def message(model: nn.Module, given: Any = None) -> str:
    """Of the fault, which is one line."""
    with pytest.raises(ModelError) as caught:
        Loss(model, "none", lambda message: None)(batch() if given is None else given)
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
    output = Loss(model, "none", lambda message: None)(batch())
    assert output.loss.shape == ()
    assert torch.equal(output.loss, expected)


def test_the_scalars_beside_a_loss_are_its_metrics() -> None:
    """A tensor of one sample's scores is none, or the name would come and go with the size of the batch."""
    others = {"accuracy": torch.tensor(0.5), "error": 0.25, "hits": 3, "last": True, "name": "a", "one": torch.ones(1)}
    model = Model(lambda each, scores: {"loss": each.mean(), "scores": scores, **others})
    metrics = Loss(model, "none", lambda message: None)(batch()).metrics
    assert {name: float(value) for name, value in metrics.items()} == {"accuracy": 0.5, "error": 0.25, "hits": 3}


def test_no_metrics_may_be_none() -> None:
    model = Model(lambda each, scores: LossOutput(each.mean(), None))  # type: ignore[arg-type]
    assert Loss(model, "none", lambda message: None)(batch()).metrics == {}


@pytest.mark.simulated
@pytest.mark.parametrize("value", [0.5, 1, torch.tensor(0.5), torch.tensor([0.5])])
def test_a_metric_of_the_host_is_moved_to_the_device_of_the_loss(value: Any) -> None:
    model = Model(lambda each, scores: LossOutput(each.mean(), {"mine": value})).cuda()
    metrics = Loss(model, "none", lambda message: None)({name: each.cuda() for name, each in batch().items()}).metrics
    assert metrics["mine"].device.type == "cuda"
    assert float(metrics["mine"]) == float(value)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (lambda each, scores: each, ["Model.loss: the loss has shape [8]", "Return loss.mean()."]),
        (lambda each, scores: LossOutput(each), ["shape [8]", "Return loss.mean()."]),
        (lambda each, scores: {"los": each.mean(), "acc": each[0]}, ["without 'loss'; it has los, acc."]),
        (lambda each, scores: (each.mean(), scores), ["returned tuple([] float32, [8, 3] float32)", "LossOutput(loss"]),
        (lambda each, scores: None, ["returned None", "return statement"]),
        (lambda each, scores: each.mean().item(), ["returned a float", "Leave out .item()"]),
        (lambda each, scores: each.mean().detach(), ["the loss has no gradient", "torch.no_grad()"]),
        (lambda each, scores: (scores > 0).sum(), ["the loss is torch.int64", "Return a float tensor."]),
        (lambda each, scores: LossOutput(each.mean(), {"err": each}), ["the metric err has shape [8]", "its mean"]),
        (lambda each, scores: LossOutput(each.mean(), {"err": None}), ["the metric err is None", "one number"]),
        (lambda each, scores: LossOutput(each.mean(), {"err": "low"}), ["the metric err is a str"]),
        (lambda each, scores: LossOutput(each.mean(), {"loss": each.mean()}), ["the name loss", "such as own_loss"]),
        (lambda each, scores: {"loss": each.mean(), "lr": 0.1}, ["the name lr", "the learning rate is recorded"]),
        (lambda each, scores: LossOutput(each.mean(), each[0]), ["the metrics are a Tensor", "metrics={'accuracy'"]),
    ],
)
def test_what_is_no_loss_is_named(given: Any, parts: list[str]) -> None:
    found = message(Model(given))
    assert all(part in found for part in parts), found


def test_a_split_may_have_a_loss_without_a_gradient() -> None:
    model = Model(lambda each, scores: each.mean().detach())
    assert Loss(model, "none", lambda message: None, needs_gradient=False)(batch()).loss.shape == ()
    with torch.no_grad():
        Loss(model, "none", lambda message: None)(batch())


def scores_of(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model.net(given["pixels"])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("of", "given", "parts"),
    [
        (lambda model, batch: batch["image"], None, ["no key 'image'", "{pixels [8, 4] float32, label [8] int64}"]),
        (lambda model, batch: batch.pixels, None, ["a dict without pixels", "Write batch['pixels']."]),
        (lambda model, batch: batch["x"], [torch.ones(8)], ["a list and has no keys", "list([8] float32)"]),
        (lambda model, batch: [1 for x, y, z in [batch]], None, ["not enough values to unpack", "label [8] int64"]),
        (
            lambda model, batch: cross_entropy(scores_of(model, batch), batch["label"]),
            batch(label=torch.tensor([0, 1, 2, 0, 1, 7, 1, 0])),
            ["the target 7 is outside of the 3 classes (0 to 2)", "[8, 3]", "0 to 7", "sample 5 of it", "8 outputs"],
        ),
        (
            lambda model, batch: nn.NLLLoss()(scores_of(model, batch), batch["label"]),
            batch(label=torch.tensor([1, 3, 2, 1, 1, 1, 1, 2])),
            ["the target 3", "1 to 3", "begin at 1: subtract 1"],
        ),
        (
            lambda model, batch: cross_entropy(scores_of(model, batch), batch["label"]),
            batch(label=torch.tensor([0, -1, 2, -100, 1, 1, 1, 2])),
            ["the target -1", "-1 to 2", "sample 1", "ignore_index=-1"],
        ),
        (
            lambda model, batch: model.table(batch["label"]).mean(),
            batch(label=torch.tensor([0, 1, 2, 6, 1, 1, 1, 0])),
            ["6 rows (0 to 5)", "row 6", "sample 3", "num_embeddings 7"],
        ),
        (
            lambda model, batch: model.net(batch["pixels"]),
            batch(pixels=torch.ones(8, 9)),
            ["net.0 is Linear(in_features=4", "[8, 9] float32", "must be 4, and is 9", "set in_features=9"],
        ),
        (
            lambda model, batch: model.net(batch["pixels"]),
            batch(pixels=torch.ones(8, 4, dtype=torch.float64)),
            ["net.0", "[8, 4] float64", ".float()"],
        ),
        (
            lambda model, batch: cross_entropy(scores_of(model, batch), batch["label"].float()),
            None,
            ["cross_entropy(input [8, 3] float32, target [8] float32)"],
        ),
    ],
)
def test_a_mistake_is_told_with_what_was_given(of: Any, given: Any, parts: list[str]) -> None:
    found = message(Model(of=of), given)
    assert found.startswith("Model.loss (")
    assert "test_loss_faults.py:" in found
    assert all(part in found for part in parts), found


@pytest.mark.parametrize(
    ("layer", "shape", "parts"),
    [
        (nn.Conv2d(3, 4, 3), (8, 1, 9, 9), ["in_channels=1", "dimension 1 must be 3"]),
        (nn.BatchNorm1d(4), (8, 5), ["num_features=5"]),
        (nn.LSTM(4, 5), (8, 3, 6), ["input_size=6", "last dimension must be 4"]),
        (nn.LayerNorm(4), (8, 5), ["LayerNorm((4,)", "[8, 5] float32"]),
    ],
)
def test_a_layer_that_its_input_does_not_fit_is_named(layer: nn.Module, shape: tuple[int, ...], parts: Any) -> None:
    model = Model(of=lambda model, batch: model.net(batch["pixels"]))
    model.net = nn.Sequential(layer)
    found = message(model, batch(pixels=torch.ones(shape)))
    assert "the layer net.0 is " in found
    assert all(part in found for part in parts), found


def test_another_mistake_stays_as_it_is_and_says_what_was_given() -> None:
    def of(model: Any, batch: Any) -> Any:
        return {"known": 1}["other"] if "pixels" in batch else None

    with pytest.raises(KeyError, match="other") as caught:
        Loss(Model(of=of), "none", lambda message: None)(batch())
    assert caught.value.__notes__ == ["Model.loss was given {pixels [8, 4] float32, label [8] int64}."]


@pytest.mark.parametrize(("micro", "row"), [(SAMPLES, 5), (2, 5), (3, 7)])
def test_a_step_names_batch_and_sample(micro: int, row: int) -> None:
    given = batch()
    given["label"][row] = 7
    model = Model(lambda each, scores: each.mean())
    loss, precision = Loss(model, "none", lambda message: None), Precision("32-true", "cpu", None)
    computation = Computation(model, loss, Preparation(None, 0, model), precision, torch.device("cpu"))
    step = TrainStep(computation, torch.optim.SGD(model.parameters(), lr=0.1), Fallbacks(MicroBatches(micro)))
    with pytest.raises(ModelError) as caught:
        step(Delivery(given, 2, 4, SAMPLES, indices=torch.arange(100, 100 + SAMPLES)))
    assert caught.value.__notes__ == [f"in batch 4 of train, epoch 2, sample {100 + row} of the data set"]


class Guest(nn.Module):
    """Is called by others, as a LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, CLASSES)

    def training_step(self, batch: Any, key: str) -> Tensor:
        return self.net(batch[key])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("image", "no key 'image'. It has {pixels [8, 4] float32"),
        ("wide", "the layer net is Linear(in_features=4"),
        ("pixels", "the loss has shape [8, 3], and must be one number. Return loss.mean()."),
    ],
)
def test_a_step_that_a_trainer_calls_is_explained_too(key: str, words: str) -> None:
    guest = Guest()

    def step(loss: Any) -> None:
        tensor = loss(batch(wide=torch.ones(8, 5)), key)
        tensor.backward()

    with pytest.raises((KeyError, RuntimeError)) as caught:
        step(guest.training_step)
    caught.value.add_note("before training")
    told = explained_in_hooks(caught.value, guest)
    assert words in str(told)
    assert told.__notes__ == ["before training"]  # type: ignore[union-attr]

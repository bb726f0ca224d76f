"""Metrics of a split do not depend on its batches, nor on the rank that evaluates them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit import loop, tiny
from wellfed.contract import LossOutput
from wellfed.errors import ConfigError
from wellfed.train.plain_model.split_metrics import SplitMetrics, can_be_shared

CLASSES = 3


class Classes(nn.Module):
    """A model with predictions and targets for torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(tiny.WIDTH, CLASSES)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        scores, labels = self.net(batch["x"]), batch["label"]
        loss = nn.functional.cross_entropy(scores, labels)
        right = (scores.argmax(1) == labels).float().mean()
        return LossOutput(loss, {"right": right}, predictions=scores, targets=labels)


def batch(start: int, stop: int) -> dict[str, Tensor]:
    x = tiny.TinyData().inputs[start:stop]
    return {"x": x, "label": (x.sum(1).abs().long() % CLASSES)}


def seen(metrics: SplitMetrics, cuts: list[int]) -> SplitMetrics:
    """Evaluates 70 samples in batches that end at these indices."""
    metrics.reset()
    for start, stop in itertools.pairwise(cuts):
        with torch.no_grad():
            metrics.update(batch(start, stop), stop - start, None)
    return metrics


@pytest.fixture
def model() -> Classes:
    torch.manual_seed(1)
    return Classes()


def test_loss_and_metrics_are_means_over_samples(model: Classes) -> None:
    whole = seen(SplitMetrics(model), [0, 70]).compute()
    cut = seen(SplitMetrics(model), [0, 32, 64, 69, 70]).compute()
    assert list(whole) == ["right", "loss"]
    assert cut == pytest.approx(whole, rel=1e-6)


def test_what_weighs_nothing_counts_nothing(model: Classes) -> None:
    metrics = seen(SplitMetrics(model), [0, 70])
    before = metrics.compute()
    metrics.update({"x": torch.full((2, tiny.WIDTH), float("nan")), "label": torch.zeros(2).long()}, 0, None)
    assert metrics.compute() == before


def accuracy(average: str | None = "micro") -> Any:
    import torchmetrics  # not above: pytest asks names of a test file for attributes, which would import all metrics

    return torchmetrics.classification.MulticlassAccuracy(CLASSES, average=average)


def collection() -> Any:
    import torchmetrics

    return torchmetrics.MetricCollection({"accuracy": accuracy(), "each": accuracy(None)})


def test_torchmetrics_need_no_wrapper(model: Classes) -> None:
    found = [seen(SplitMetrics(model, collection()), cuts).compute() for cuts in ([0, 70], [0, 32, 64, 70])]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["accuracy"] == pytest.approx(found[0]["right"], rel=1e-6)
    assert {"each_0", "each_1", "each_2", "loss"} < set(found[0])
    alone = seen(SplitMetrics(model, None, accuracy()), [0, 70]).compute()
    assert alone["MulticlassAccuracy"] == found[0]["accuracy"]


def test_a_loss_without_predictions_is_a_fault(model: Classes) -> None:
    metrics = SplitMetrics(tiny.TinyModel(), collection())
    with pytest.raises(ConfigError, match=r"TinyModel.loss gives no predictions.*LossOutput\(loss, predictions"):
        metrics.update({"x": torch.zeros(2, tiny.WIDTH), "y": torch.zeros(2, 1)}, 2, None)


class Named(nn.Module):
    """A model with named predictions."""

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        given = {"preds": batch["x"][:, 0].sigmoid(), "target": batch["x"][:, 1] > 0, "indexes": batch["label"]}
        return LossOutput(batch["x"].mean(), predictions=given)


def test_predictions_may_have_names() -> None:
    import torchmetrics

    made = torchmetrics.retrieval.RetrievalMRR
    found = [seen(SplitMetrics(Named(), made()), cuts).compute() for cuts in ([0, 70], [0, 32, 64, 70])]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert set(found[0]) == {"RetrievalMRR", "loss"}


def test_a_metric_that_is_no_number_is_refused(model: Classes) -> None:
    import torchmetrics

    metrics = seen(SplitMetrics(model, None, torchmetrics.classification.MulticlassConfusionMatrix(CLASSES)), [0, 70])
    with pytest.raises(ConfigError, match=r"MulticlassConfusionMatrix is no number but of shape \[3, 3\]"):
        metrics.compute()


class Added:
    """An evaluation whose ranks can be merged."""

    best_metric, best_mode = "total", "min"

    def reset(self) -> None:
        self.total = 0.0

    def update(self, model: Any, batch: Any, *features: Any) -> None:
        self.total += float(batch["x"].sum())

    def compute(self) -> dict[str, float]:
        return {"total": self.total}

    def state(self) -> float:
        return self.total

    def merge(self, states: list[float]) -> None:
        self.total = sum(states)


@pytest.mark.parametrize("cuts", [[0, 32, 64, 70], [0, 70]])
def test_ranks_together_have_the_result_of_one(model: Classes, cuts: list[int]) -> None:
    whole = seen(SplitMetrics(model, Added()), cuts).compute()
    ranks = [SplitMetrics(model, Added()) for _ in range(2)]
    for rank, metrics in enumerate(ranks):
        metrics.reset()
        for start, stop in list(itertools.pairwise(cuts))[rank::2]:
            with torch.no_grad():
                metrics.update(batch(start, stop), stop - start, None)
    states = [metrics.state() for metrics in ranks]  # with one batch the second rank has seen nothing
    for metrics in ranks:
        metrics.merge(states)
        assert metrics.compute() == pytest.approx(whole, rel=1e-6)
    assert seen(ranks[0], [0, 32, 64, 70]).compute() == pytest.approx(whole, rel=1e-6)


class Evaluated:
    best_metric, best_mode = "mean", "min"

    def reset(self) -> None:
        import torchmetrics

        self.mean = torchmetrics.MeanMetric()

    def update(self, model: Any, batch: Any, *features: Any) -> None:
        self.mean.update(batch["x"])

    def compute(self) -> dict[str, float]:
        return {"mean": float(self.mean.compute())}

    def artifacts(self, folder: Path) -> dict[str, Path]:
        return {}


def test_the_loss_stands_beside_an_evaluation_of_the_workloads_own() -> None:
    assert set(loop.validated(loop.model(evaluation=Evaluated()))) == {"loss", "rmse", "mean"}


def test_a_split_of_another_kind_has_no_loss_if_its_evaluation_says_so(model: Classes) -> None:
    class Quiet(Evaluated):
        with_loss = False

    metrics = SplitMetrics(model, Quiet())
    metrics.reset()
    metrics.update({"x": torch.ones(4, 1)}, 4, None)
    metrics.update({"x": torch.ones(4, 1)}, 4, None)
    assert metrics.compute() == {"mean": 1.0}


def test_which_can_be_shared() -> None:
    assert can_be_shared(Added())
    assert not can_be_shared(collection())
    assert not can_be_shared(Evaluated())

from typing import Any

import pytest
import torch
from torch import nn

from wellfed.train.memory import snapshot
from wellfed.train.memory.snapshot import Snapshot

CPU = torch.device("cpu")


class Sums:
    weight: nn.Parameter
    latest: int

    def __init__(self, model: nn.Module) -> None:
        self.model, self.total, self.count = model, torch.zeros(3), 0
        self.parts: list[torch.Tensor] = []
        self.by_name: dict[str, Any] = {"a": torch.zeros(())}
        self.inner = Inner()


class Inner:
    def __init__(self) -> None:
        self.seen = torch.zeros(2)


def change(sums: Sums) -> None:
    sums.total += 1
    sums.count += 1
    sums.parts.append(torch.ones(1))
    sums.by_name["a"] += 1
    sums.by_name["b"] = torch.ones(())
    sums.inner.seen += 1
    sums.later = torch.ones(1)


def seen(sums: Sums) -> list[Any]:
    names = sorted(vars(sums))
    return [names, sums.total.tolist(), sums.count, len(sums.parts), str(sums.by_name), sums.inner.seen.tolist()]


@pytest.mark.parametrize("inference", [False, True])
def test_all_that_a_call_has_changed_is_put_back(inference: bool) -> None:
    model = nn.Linear(2, 2)
    sums = Sums(model)
    with torch.inference_mode(inference):
        change(sums)
        sums.total = torch.ones(3)
        before, inner = seen(sums), sums.inner
        kept = Snapshot(sums, CPU, leave_out=model)
        drawn = torch.rand(1)
        change(sums)
        sums.latest = 1
        assert seen(sums) != before
        assert kept.restore()
        assert seen(sums) == before
        assert torch.equal(torch.rand(1), drawn)
        assert sums.inner is inner
        assert sums.model is model


def test_a_large_tensor_that_has_changed_can_not_be_put_back() -> None:
    sums = Sums(nn.Linear(2, 2))
    sums.total = torch.zeros(snapshot.LARGE_BYTES // 4 + 1)
    assert Snapshot(sums, CPU).restore()
    kept = Snapshot(sums, CPU)
    sums.total[0] += 1
    assert not kept.restore()
    with torch.inference_mode():
        sums.total = torch.zeros(snapshot.LARGE_BYTES // 4 + 1)
    assert not Snapshot(sums, CPU).restore()  # torch does not count the changes of such a tensor


def test_the_model_and_weights_stay_as_they_are() -> None:
    """What is left out is not even looked at; a weight is no state of an evaluation."""
    model = nn.Linear(2, 2)
    sums = Sums(model)
    sums.weight = weight = nn.Parameter(torch.zeros(2))
    kept = Snapshot(sums, CPU, leave_out=model)
    model.calls = 1
    with torch.no_grad():
        weight += 1
    assert kept.restore()
    assert model.calls == 1
    assert sums.weight is weight
    assert weight.tolist() == [1, 1]


def test_of_an_object_without_attributes_nothing_can_be_told() -> None:
    class Slots:
        __slots__ = ("total",)

    assert not Snapshot(Slots(), CPU).restore()


def test_what_a_short_list_holds_is_put_back() -> None:
    sums = Sums(nn.Linear(2, 2))
    sums.parts = [torch.zeros(2), Sums(nn.Linear(2, 2))]
    kept = Snapshot(sums, CPU)
    sums.parts[0] += 1
    sums.parts[1].total = 9
    sums.parts.append(torch.ones(1))
    assert kept.restore()
    assert len(sums.parts) == 2
    assert sums.parts[0].tolist() == [0, 0]
    assert sums.parts[1].total.tolist() == [0, 0, 0]
    with torch.inference_mode():
        sums.parts = [torch.zeros(snapshot.LARGE_BYTES // 4 + 1)]  # predictions that were appended, say
    kept = Snapshot(sums, CPU)
    sums.parts.append(torch.ones(1))
    assert kept.restore()
    assert len(sums.parts) == 1


def test_metrics_within_metrics_are_put_back() -> None:
    import torchmetrics

    inner = torchmetrics.MeanMetric()
    outer = torchmetrics.MetricCollection({"spread": torchmetrics.wrappers.MultioutputWrapper(inner, 2)})
    sums = Sums(nn.Linear(2, 2))
    sums.metrics = outer
    outer.update(torch.ones(3, 2))
    before = outer.compute()
    kept = Snapshot(sums, CPU)
    outer.update(torch.zeros(3, 2))
    assert kept.restore()
    for metric in outer["spread"].metrics:
        metric._computed = None
    assert all(torch.equal(value, before[name]) for name, value in outer.compute().items())


def test_a_long_list_goes_by_its_length() -> None:
    sums = Sums(nn.Linear(2, 2))
    sums.parts = [torch.zeros(1)] * (snapshot.MANY + 1)
    kept = Snapshot(sums, CPU)
    assert kept.restore()
    sums.parts.append(torch.zeros(1))
    assert not kept.restore()

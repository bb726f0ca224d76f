"""Weights of micro-batches, and layouts of their own."""

from typing import Any

import pytest
import torch

from tests.kit import loop, tiny
from wellfed.contract import LossOutput
from wellfed.data.eval_loader import EvalLoader
from wellfed.train.loop.place import Place
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Watchers
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.train_step import StepOptions

# -- layouts of the data's own ---------------------------------------------------------------------------------------


class Flat(tiny.TinyData):
    """Samples one after the other in one long row, with their lengths; no shared first dimension."""

    def fetch(self, indices: Any, rng: Any) -> Any:
        lengths = indices % 3 + 1
        return {
            "x": self.inputs.index_select(0, indices.repeat_interleave(lengths)),
            "y": self.targets.index_select(0, indices.repeat_interleave(lengths)),
            "lengths": lengths,
        }

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        lengths = batch["lengths"].split(sizes)
        rows = [int(part.sum()) for part in lengths]
        return [
            dict(zip(("x", "y", "lengths"), part, strict=True))
            for part in zip(batch["x"].split(rows), batch["y"].split(rows), lengths, strict=True)
        ]

    def weight(self, batch: Any) -> int:
        return int(batch["lengths"].sum())


class CountsRows(tiny.TinyModel):
    def loss(self, batch: Any) -> LossOutput:
        output = super().loss(batch)
        return LossOutput(output.loss, output.metrics, num_samples=len(batch["lengths"]))


def flat_model(micro: int, data: Any = None, model: Any = None, accelerator: Any = "cpu") -> PlacedModel:
    torch.manual_seed(3)
    return PlacedModel(
        (model or CountsRows)(),
        Place(accelerator),
        StepOptions(seed=1, on_oom="retry"),
        train_data=data or Flat(),
        eval_data={"val": data or Flat(), "test": Flat()},
        micro=MicroBatches(micro),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        lr_factor=lambda step: 1.0,
        on_event=lambda kind, **facts: None,
    )


def test_a_layout_without_a_shared_first_dimension_is_trained_and_timed() -> None:
    results = []
    for micro in (32, 5):
        placed, rows = flat_model(micro), []
        loop.fit(placed, tiny.loader(data=Flat()), watchers=Watchers(take_rows=rows.extend), max_steps=6)
        assert [row.samples for row in rows[:3]] == [32, 32, 6]
        assert [row.num_micro for row in rows[:3]] == [-(-size // micro) for size in (32, 32, 6)]
        results.append(loop.weights(placed))
    assert (results[0] - results[1]).norm() / results[0].norm() < 1e-5


# -- weights ---------------------------------------------------------------------------------------------------------


class Weighted(tiny.TinyData):
    """Counts what is not masked; notes where it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def fetch(self, indices: Any, rng: Any) -> Any:
        return {**super().fetch(indices, rng), "mask": (indices % 4 > 0).float().unsqueeze(1)}

    def weight(self, batch: Any) -> int:
        self.asked.append(batch["mask"].device.type)
        return int(batch["mask"].sum())


class Masked(tiny.TinyModel):
    def loss(self, batch: Any) -> LossOutput:
        error = (self(batch) - batch["y"]).square() * batch["mask"]
        return LossOutput(error.sum() / batch["mask"].sum().clamp(min=1))


@pytest.mark.parametrize("data", [Flat, Weighted])
def test_the_mean_loss_of_a_split_is_the_same_for_any_batch_size(data: Any) -> None:
    found = []
    for size in (70, 32, 9, 1):
        placed = flat_model(32, data(), Masked if data is Weighted else None)
        found.append(loop.validated(placed, EvalLoader(data(), size, seed=1))["loss"])
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)


@pytest.mark.simulated(cards=1, slowdown=2)
@pytest.mark.parametrize("ahead", [0, 2])
def test_the_weight_is_asked_on_the_host_and_waits_for_nothing(ahead: int) -> None:
    import fake_cuda

    synchronised = []
    for data in (Weighted(), tiny.TinyData()):
        placed = flat_model(8, data, Masked if isinstance(data, Weighted) else tiny.TinyModel, "gpu")
        before = fake_cuda.driver.counts()["synchronisations"]
        with placed.prefetched(tiny.loader(data=data), ahead, is_training=True) as batches:
            loop.fit(placed, batches, max_steps=6)
        synchronised.append(fake_cuda.driver.counts()["synchronisations"] - before)
        if isinstance(data, Weighted):
            assert set(data.asked) == {"cpu"}
    assert synchronised[0] - synchronised[1] < 12  # 22 micro-batches
    assert not fake_cuda.driver.violations()

"""Batches of validation and test tried before training: they show errors and change no state."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit import loop, tiny
from wellfed.contract import LossOutput
from wellfed.train.loop.figures import Figures
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Watchers


class Draws(tiny.TinyModel):
    """A model that draws random numbers and counts its calls."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("asked", torch.zeros(()))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        self.asked += 1
        output = super().loss(batch)
        return LossOutput(output.loss * (1 + 0.1 * torch.rand(())), output.metrics)


def trained(splits: list[str], found: Any = lambda *_: None, model: Any = None) -> tuple[PlacedModel, list[Any]]:
    rows: list[Any] = []
    torch.manual_seed(3)
    placed = loop.model(model=model or Draws())
    figures = Figures(lambda split, values, **at: rows.append((split, dict(values), at)), every=5, stops_on_nan=True)

    def sanity() -> None:
        for split in splits:
            found(split, placed.try_split(split, islice(tiny.eval_loader(), 1)))

    watchers = Watchers(sanity=sanity)
    loop.fit(placed, figures=figures, validation=tiny.eval_loader(), watchers=watchers)
    return placed, rows


def test_training_is_the_same_to_the_bit() -> None:
    found: list[Any] = []
    placed, rows = trained(["val", "test"], lambda split, metrics: found.append((split, set(metrics))))
    other, other_rows = trained([])
    assert found == [("val", {"loss", "rmse"}), ("test", {"loss", "rmse"})]
    assert torch.equal(loop.weights(placed), loop.weights(other))
    assert placed.model.asked == other.model.asked
    assert rows == other_rows
    assert placed.model.calls == other.model.calls + 2


def test_what_is_broken_shows_before_the_first_step() -> None:
    def fails(size: int, calls: int) -> Exception | None:
        return KeyError("no such entry")

    with pytest.raises(KeyError, match="no such entry") as caught:
        trained(["test"], model=tiny.TinyModel(fail=fails))
    assert caught.value.__notes__[-1] == (
        "in the test batches that are tried before training; trainer.sanity_batches=0 tries none"
    )


def test_a_run_that_goes_on_has_been_through_it(tmp_path: Path) -> None:
    loop.fit(loop.model(), checkpoints=loop.checkpoints(tmp_path), max_steps=4)
    watchers = Watchers(sanity=lambda: pytest.fail("tried again"))
    loop.fit(loop.model(), checkpoint=tmp_path / "last.ckpt", watchers=watchers, max_steps=6)

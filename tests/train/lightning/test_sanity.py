"""Batches of validation and test tried before training: they show errors and change no state."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.kit import tiny
from wellfed.contract import LossOutput
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import BareBatches
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.sanity import SanityCheck
from wellfed.train.lightning.user_module.additions import make_user_trainer

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Draws(tiny.TinyModel):
    """A model that draws random numbers and counts its calls."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("asked", torch.zeros(()))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        self.asked += 1
        output = super().loss(batch)
        return LossOutput(output.loss * (1 + 0.1 * torch.rand(())), output.metrics)


@contextmanager
def few(number: int = 1) -> Iterator[Any]:
    yield islice(tiny.eval_loader(), number)


def trained(tmp_path: Path, callbacks: list[Any], module: Any = None) -> tuple[Any, list[Any]]:
    rows: list[Any] = []
    torch.manual_seed(3)
    module = module or tiny.module(model=Draws())
    figures = Figures(lambda split, values, **at: rows.append((split, dict(values), at)), every=5, stop_on_nan=True)
    trainer = lit.make_trainer(tiny.options(), [*callbacks, figures], tmp_path)
    lit.fit(trainer, module, tiny.loader(), tiny.eval_loader(), None)
    return module, rows


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    found: list[Any] = []
    tried = SanityCheck({"val": few, "test": few}, lambda split, metrics: found.append((split, set(metrics))))
    module, rows = trained(tmp_path, [tried])
    other, other_rows = trained(tmp_path, [])
    assert found == [("val", {"loss", "rmse"}), ("test", {"loss", "rmse"})]
    assert torch.equal(tiny.weights(module), tiny.weights(other))
    assert module.model.asked == other.model.asked
    assert rows == other_rows
    assert module.model.calls == other.model.calls + 2


def test_what_is_broken_shows_before_the_first_step(tmp_path: Path) -> None:
    def fails(size: int, calls: int) -> Exception | None:
        return KeyError("no such entry")

    with pytest.raises(KeyError, match="no such entry") as caught:
        trained(tmp_path, [SanityCheck({"test": few}, lambda *_: None)], tiny.module(fail=fails))
    assert caught.value.__notes__[-1] == "in the test batches that are tried before training"


def test_a_run_that_goes_on_has_been_through_it(tmp_path: Path) -> None:
    trainer = tiny.fit(tiny.module(), tmp_path, max_steps=4)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = tiny.module()
    tried = SanityCheck({"val": lambda: pytest.fail("tried again")}, lambda *_: None)
    tiny.fit(module, tmp_path, [tried], tmp_path / "a.ckpt", max_steps=6)


class Guest(pl.LightningModule):
    """A module that counts its calls."""

    def __init__(self, breaks_in: str = "") -> None:
        super().__init__()
        self.net, self.breaks_in = nn.Linear(tiny.WIDTH, 1), breaks_in
        self.register_buffer("asked", torch.zeros(()))
        self.calls: dict[str, int] = {}

    def _loss(self, batch: Any, split: str) -> Tensor:
        if split == self.breaks_in:
            raise KeyError("no such entry")
        self.calls[split] = self.calls.get(split, 0) + 1
        self.asked += 1
        return (self.net(batch["x"]) - batch["y"]).square().mean() * (1 + 0.1 * torch.rand(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch, "train")

    def on_validation_epoch_end(self) -> None:
        assert "val_loss" in self.trainer.callback_metrics

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, "val"))

    def test_step(self, batch: Any) -> None:
        self._loss(batch, "test")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def guest_trained(tmp_path: Path, sanity_batches: int, breaks_in: str = "") -> tuple[Guest, list[Any]]:
    torch.manual_seed(3)
    rows: list[Any] = []
    module = Guest(breaks_in)
    figures = Figures(lambda split, values, **at: rows.append((split, dict(values), at)), every=5, stop_on_nan=False)
    callbacks = [figures]
    if sanity_batches:
        callbacks = [SanityCheck({"val": few, "test": few}, lambda *_: None), figures]
    loggers = for_trainer([], figures.logged, tmp_path)
    trainer = make_user_trainer(
        tiny.options(max_steps=6), callbacks, tmp_path, loggers=loggers, sanity_batches=sanity_batches
    )
    lit.fit(trainer, module, BareBatches(tiny.loader()), BareBatches(tiny.eval_loader()), None)
    return module, rows


def test_a_guest_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    """Its validation is; its test, which may write results, is not."""
    module, rows = guest_trained(tmp_path, 1)
    other, other_rows = guest_trained(tmp_path, 0)
    assert torch.equal(tiny.weights(module), tiny.weights(other))
    assert module.asked == other.asked
    assert rows == other_rows
    assert module.calls == other.calls | {"val": other.calls["val"] + 1}

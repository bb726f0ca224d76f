from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch import Tensor

from tests.kit import tiny
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import BareBatches
from wellfed.train.lightning.callbacks.figures import Figures, name_in_metrics
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, CheckpointOptions, Checkpoints
from wellfed.train.lightning.user_module.additions import make_user_trainer

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Logs(pl.LightningModule):
    """A module that logs the number of the epoch in every hook."""

    def __init__(self, callbacks: list[pl.Callback] | None = None) -> None:
        super().__init__()
        self.net, self._own = torch.nn.Linear(tiny.WIDTH, 1), callbacks or []

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss_g", loss)
        self.log("my/loss", loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))
        self.log("score", 0.5)

    def on_train_epoch_end(self) -> None:
        self.log("train_at_end", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_end", float(self.current_epoch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def configure_callbacks(self) -> list[pl.Callback]:
        return self._own

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


Told = dict[str, dict[int, float]]


def trained(module: Logs, folder: Path, *, log_every: int = 2, **best: Any) -> tuple[pl.Trainer, Told, Checkpoints]:
    """Trains three epochs of three batches; returns ``{split/name: {step: value}}`` and the checkpoints."""
    told: Told = {}

    def take(split: str, values: Any, *, step: int, **_: Any) -> None:
        for name, value in values.items():
            at = told.setdefault(f"{split}/{name}", {})
            assert step not in at, (split, name, step)
            at[step] = value

    figures = Figures(take, every=log_every, stop_on_nan=False)
    best = {"best_metric": "loss", "best_mode": "min", **best}
    asked = CheckpointOptions(None, None, 9, **best)
    kept = Checkpoints(folder, asked, figures.latest, lambda error, step: None)
    kept.best_by_monitor = True
    options = tiny.options(max_steps=None, max_epochs=3)
    before = [figures, BeforeUsers(kept)]
    trainer = make_user_trainer(
        options, before, folder, last=[kept], loggers=for_trainer([], figures.logged, folder), log_every=log_every
    )
    torch.manual_seed(0)
    lit.fit(trainer, module, BareBatches(tiny.loader()), BareBatches(tiny.eval_loader()), None)
    return trainer, told, kept


def test_each_figure_of_a_lightning_module_is_told_where_it_is_new(tmp_path: Path) -> None:
    _, told, _ = trained(Logs(), tmp_path)
    assert told["val/at_end"] == {3: 0.0, 6: 1.0, 9: 2.0}
    assert told["train/at_end"] == {3: 0.0, 6: 1.0, 9: 2.0}
    assert set(told["val/loss"]) == set(told["val/score"]) == set(told["train/loss_epoch"]) == {3, 6, 9}
    assert set(told["train/loss"]) >= {2, 4, 6, 8}
    assert {"train/loss_g", "train/my/loss"} <= set(told)


def test_monitors_find_the_names_of_metrics_csv(tmp_path: Path) -> None:
    trainer, told, _ = trained(Logs([EarlyStopping("val/loss", patience=1, min_delta=100.0)]), tmp_path)
    assert trainer.global_step == 6
    assert float(trainer.callback_metrics["val/score"]) == 0.5
    assert told["val/loss"][6] == pytest.approx(float(trainer.callback_metrics["val_loss"]))


@pytest.mark.parametrize(
    ("callbacks", "best", "file"),
    [
        ([], ("loss", "min"), "loss"),
        ([EarlyStopping("val_at_end", mode="max")], ("at_end", "max"), "at_end"),
        ([EarlyStopping("loss_g"), EarlyStopping("score", mode="max")], ("score", "max"), "score"),
        ([EarlyStopping("loss_g")], ("loss", "min"), "loss"),
    ],
)
def test_best_is_by_the_figure_that_callbacks_go_by(tmp_path: Path, callbacks: Any, best: Any, file: str) -> None:
    _, told, kept = trained(Logs(callbacks), tmp_path)
    assert (kept.best_metric, kept.best_mode) == best
    pick = max if best[1] == "max" else min
    assert kept.best_value == pick(told[f"val/{file}"].values())
    assert (tmp_path / "best.ckpt").exists()


def test_a_module_that_logs_no_such_figure_has_no_best_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(Logs(), tmp_path, best_metric="accuracy", best_mode="max")
    assert not (tmp_path / "best.ckpt").exists()
    (line,) = [line for line in caplog.messages if "best.ckpt" in line]
    assert "val/accuracy" in line
    assert "val/at_end, val/loss, val/score" in line


def test_a_test_of_averaged_weights_is_of_the_average(tmp_path: Path) -> None:
    """Also if the module returns the same callback again, which refers to the others."""
    module = Logs([EMAWeightAveraging(decay=0.5)])
    trained(module, tmp_path)
    average = tiny.weights(module).clone()
    again = make_user_trainer(tiny.options(), [], tmp_path, loggers=[])
    batches = BareBatches(tiny.eval_loader())
    again.test(module, batches, verbose=False, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(average, tiny.weights(module))


def test_names_in_metrics() -> None:
    assert name_in_metrics("val_loss", "train") == name_in_metrics("val/loss", "train") == "val/loss"
    assert (name_in_metrics("loss_g", "train"), name_in_metrics("acc", "val")) == ("train/loss_g", "val/acc")

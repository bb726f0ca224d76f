"""Lightning's checkpoint files, and what the user's hooks write into them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from wellfed.errors import WellfedError
from wellfed.train.checkpoint_values import load
from wellfed.train.guest.checkpoint_io import CheckedHooks, PlainCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Thing:
    pass


def test_a_hidden_name_is_the_users_as_any(tmp_path: Path) -> None:
    for name in (".x.ckpt", ".x.ckpt.tmp"):
        PlainCheckpointIO().save_checkpoint({"step": 3}, str(tmp_path / name))
        assert torch.load(tmp_path / name, weights_only=True) == {"step": 3}


def test_one_line_names_left_out_hyperparameters_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = PlainCheckpointIO()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.save_checkpoint({"hyper_parameters": {"a": Thing(), "b": Thing}}, tmp_path / "a.ckpt")
    (line,) = caplog.messages
    assert "hyper_parameters.a, hyper_parameters.b" in line


class Keeps(pl.Callback):
    """Writes a value into each checkpoint, by one of Lightning's two hooks, and remembers what it is given back."""

    def __init__(self, make: Callable[[int], Any], *, by_state: bool) -> None:
        self.make, self.by_state, self.step, self.found = make, by_state, 0, None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.make(self.step)} if self.by_state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict["own"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if not self.by_state:
            np.random.random()
            checkpoint["own"] = self.make(self.step)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint.get("own", self.found)


class Module(pl.LightningModule):
    """A linear model of 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(16, 2), batch_size=1)


def fit(folder: Path, callback: Keeps, steps: int, *, trusted: bool = False, checkpoint: Path | None = None) -> None:
    """Trains under Lightning's Trainer, which writes ``last.ckpt`` after every second step."""
    saves = ModelCheckpoint(folder, "last", every_n_train_steps=2, enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[*([] if trusted else [CheckedHooks()]), callback, saves],
        plugins=[PlainCheckpointIO(trusted=trusted)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), ckpt_path=checkpoint)


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_hook_gets_back_what_it_wrote(tmp_path: Path, by_state: bool, trusted: bool) -> None:
    def make(step: int) -> Any:
        return [np.arange(step), {"words": Thing()}] if trusted else [np.arange(step), {"words": {"a": 0}}]

    fit(tmp_path, Keeps(make, by_state=by_state), 4, trusted=trusted)
    resumed = Keeps(make, by_state=by_state)
    fit(tmp_path, resumed, 6, trusted=trusted, checkpoint=tmp_path / "last.ckpt")
    assert resumed.found is not None
    assert resumed.found[0].tolist() == [0, 1, 2, 3]
    assert type(resumed.found[1]["words"]) is (Thing if trusted else dict)


@pytest.mark.parametrize("by_state", [False, True])
def test_an_object_of_a_hook_ends_the_run_before_the_first_step(tmp_path: Path, by_state: bool) -> None:
    callback = Keeps(lambda step: [Thing()], by_state=by_state)
    before = np.random.get_state()[1].tolist()
    with pytest.raises(WellfedError, match=rf"own: it is of {__name__}.Thing"):
        fit(tmp_path, callback, 4)
    assert callback.step == 0
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("fails", [False, True], ids=["plain at the start", "a hook that needs the training"])
def test_an_object_that_comes_later_ends_the_run_at_its_checkpoint(tmp_path: Path, fails: bool) -> None:
    def make(step: int) -> Any:
        if fails and step == 0:
            raise AttributeError("not made yet")
        return Thing() if step > 2 else step

    callback = Keeps(make, by_state=False)
    with pytest.raises(WellfedError, match="can't hold own"):
        fit(tmp_path, callback, 8)
    assert callback.step == 4
    assert load(tmp_path / "last.ckpt")["own"] == 2

"""Checkpoints, hyper-parameters and predictions of a module are those that it has under Lightning alone."""

import errno
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.kit.guests import guest, under_lightning
from tests.train.guest import brought
from wellfed.errors import LastSaveFailed
from wellfed.train.guest.checkpoint_io import PlainCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore::UserWarning")
DATA = "tests.train.guest.brought.Data"


class Described(brought.Module):
    """Saves a number and an object as hyper-parameters, and predicts."""

    def __init__(self, width: int = 4, kind: Any = brought.Fixed) -> None:
        super().__init__()
        self.save_hyperparameters()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[1])


def predicted(module: Any, folder: Path) -> torch.Tensor:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, **quiet)
    return torch.cat(trainer.predict(module, DataLoader(brought.Rows(6), 4)))  # type: ignore[arg-type]


def test_files_hyper_parameters_and_predictions_are_as_under_lightning(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    saves = ModelCheckpoint(theirs, "{epoch}-{step}", monitor="val_loss", save_top_k=2)
    alone = {"max_epochs": 3, "callbacks": [saves], "enable_checkpointing": True}
    own, _ = under_lightning(tmp_path, Described, brought.Data, **alone)
    ran = guest(
        tmp_path / "run",
        f"{__name__}.Described",
        DATA,
        "trainer.max_epochs=3",
        "+callbacks.own._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        f"+callbacks.own.dirpath={ours}",
        "+callbacks.own.filename='{epoch}-{step}'",
        "+callbacks.own.monitor=val_loss",
        "+callbacks.own.save_top_k=2",
    ).fit()
    assert torch.equal(predicted(ran.module, tmp_path), predicted(own, tmp_path))
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    best = ours / Path(saves.best_model_path).name
    assert Path(ran.planner.parts.callbacks["own"].best_model_path) == best
    here, there = (torch.load(path, weights_only=False) for path in (best, saves.best_model_path))
    for name, value in there["state_dict"].items():
        assert torch.equal(here["state_dict"][name], value), name
    assert there["hyper_parameters"] == {"width": 4, "kind": brought.Fixed}
    assert ran.content()["hyper_parameters"] == here["hyper_parameters"] == {"width": 4}


@pytest.mark.parametrize("name", ["best.ckpt", "last.ckpt"])
def test_a_file_that_could_not_be_written_ends_the_run_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = PlainCheckpointIO.save_checkpoint

    def fails(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if name in str(path) and checkpoint["global_step"] == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, checkpoint, path, storage_options)

    monkeypatch.setattr(PlainCheckpointIO, "save_checkpoint", fails)
    ran = guest(tmp_path, "tests.train.guest.brought.Module", DATA, "trainer.max_epochs=2").fit()
    said = rf"The weights of step 12 could not be written to .*{name}: .Errno 28. No space"
    with pytest.raises(LastSaveFailed, match=said):
        ran.passes.check_saved()

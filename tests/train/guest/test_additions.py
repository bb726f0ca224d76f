"""`trainer.on_nan=skip` with a LightningModule of the user."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from wellfed.train.guest.additions import SkipsNonFinite

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning", "ignore:.*:UserWarning")


class Guest(pl.LightningModule):
    """A module whose third batch has a finite loss and a NaN gradient, or a NaN input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.net, self.scale = nn.BatchNorm1d(3), nn.Linear(3, 1), nn.Parameter(torch.ones(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        root = (self.scale * batch[:, 0]).square().sum().sqrt() * 1e-3
        return self.net(self.norm(batch)).square().mean() + root

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(folder: Path, third: torch.Tensor | None, **more: Any) -> tuple[Guest, list[Any]]:
    torch.manual_seed(1)
    samples = [torch.randn(4, 3) for _ in range(6)]
    samples[2] = samples[2] if third is None else third
    module, events = Guest(), list[Any]()
    watching = SkipsNonFinite(lambda kind, **facts: events.append((kind, facts)))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watching],
        default_root_dir=folder,
        **more,
    )
    trainer.fit(module, DataLoader(samples, batch_size=None))
    return module, events


BAD = pytest.mark.parametrize(
    "bad", [torch.tensor([[0.0, 1.0, 2.0]] * 4), torch.full((4, 3), float("nan"))], ids=["gradient", "loss"]
)


@BAD
def test_a_step_that_is_left_out_leaves_buffers(tmp_path: Path, bad: torch.Tensor) -> None:
    _, none = trained(tmp_path, None)
    module, events = trained(tmp_path, bad)
    assert (none, events) == ([], [("nan", {"step": 3, "action": "skip"})])
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values())
    assert int(module.norm.num_batches_tracked) == 5


def test_a_step_that_a_scaler_leaves_out_leaves_buffers(tmp_path: Path) -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module, events = trained(tmp_path, torch.full((4, 3), float("nan")), plugins=[scaled])
    assert events == [("nan", {"step": 3, "action": "skip"})]
    assert all(bool(value.isfinite().all()) for value in module.state_dict().values())

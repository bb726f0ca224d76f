"""A finished LightningModule with its data, as a user brings it: copied beside a user's configuration by the tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import Tensor, nn

from wellfed.contract import Datasets

NUM_TRAIN, WIDTH = 100, 8


class Standardised:
    """An object among the hyper-parameters, as a fitted scaler is."""

    def __init__(self, mean: float) -> None:
        self.mean = mean


class Rows:
    """A linear target; ``poison`` makes one sample's target infinite."""

    def __init__(self, num_samples: int, poison: int | None = None) -> None:
        self.x = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(num_samples))
        self.y = self.x.sum(1, keepdim=True)
        if poison is not None:
            self.y[poison] = float("inf")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def data(num_train: int = NUM_TRAIN, poison: int | None = None) -> Datasets:
    return Datasets(Rows(num_train, poison), Rows(20), Rows(24))


class Guest(pl.LightningModule):
    """Everything that Lightning's documentation shows in a module; writes down which of its hooks ran, in ``hooks``."""

    def __init__(self, dropout: float = 0.5, where: str = "somewhere") -> None:
        super().__init__()
        self.save_hyperparameters(
            {
                "dropout": dropout,
                "where": Path(where),
                "activation": nn.GELU(),
                "scaler": Standardised(0.5),
                "nested": {"scaler": Standardised(0.1), "width": 3},
                "layers": [8, Standardised(0.2)],
            }
        )
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        self.log("residual", loss.sqrt())
        self.logger.log_metrics({"own/figure": 2.5}, step=self.global_step)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("val_loss", patience=50), LearningRateMonitor("epoch")]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def _counted(name: str) -> Any:
    def hook(self: pl.LightningModule, *arguments: Any) -> None:
        with Path("hooks").open("a") as file:
            file.write(f"{name}\n")

    return hook


for _name in ("on_fit_start", "on_train_start", "on_train_epoch_end", "on_train_end", "on_fit_end", "on_test_end"):
    setattr(Guest, _name, _counted(_name))


def hooks(folder: Path) -> Counter[str]:
    """How often each of them ran."""
    return Counter((folder / "hooks").read_text().split())


class TwoOptimizers(pl.LightningModule):
    """Manual optimization, as of a GAN: two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(WIDTH, 1), nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            loss = (net(batch["x"]) - batch["y"]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss_{'ab'[net is self.second]}", loss)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self.first(batch["x"]) - batch["y"]).square().mean())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.first, self.second)]


class Unclipped(Guest):
    """The same without clipping, which a sharded model would need done otherwise."""

    configure_gradient_clipping = pl.LightningModule.configure_gradient_clipping

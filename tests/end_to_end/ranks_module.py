"""A LightningModule on two ranks, as a user brings it; run as a script, Lightning alone trains it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Any]):
    """Adds noise from a generator of each rank's own."""

    def __init__(self, rank: int) -> None:
        self.x = torch.arange(66.0).view(22, 3)
        self.rng = np.random.default_rng(rank)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index] + float(self.rng.random())


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = Rows(self.trainer.global_rank)  # type: ignore[union-attr]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, 4, shuffle=True)


class Module(pl.LightningModule):
    """Writes down what each rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with (Path(os.environ["SEEN"]) / f"{self.global_rank}").open("a") as file:
            file.write(f"{batch.double().sum().item():.6f}\n")
        return self.net(batch / 66).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def alone() -> None:
    from wellfed.generators import seed_everything

    seed_everything(1)
    data, module = Data(), Module()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet)
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), Path(os.environ["SEEN"]) / "weights.pt")


if __name__ == "__main__":
    alone()

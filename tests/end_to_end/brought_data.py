"""DataLoaders and a LightningDataModule, as people bring them: copied beside a user's configuration by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

from wellfed.contract import LossOutput

NUM_TRAIN, WIDTH = 100, 4


class Told(Dataset):
    """A linear target; the first feature is the sample's number."""

    split = "train"

    def __init__(self, size: int = NUM_TRAIN) -> None:
        self.x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": self.x[index], "y": self.y[index]}


class OwnOrder(Sampler[int]):
    """With a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


class PairsOfBatches(Sampler[list[int]]):
    """Batches of 6 and 2 in turn."""

    def __iter__(self) -> Any:
        for low in range(0, NUM_TRAIN - 7, 8):
            yield list(range(low, low + 6))
            yield list(range(low + 6, low + 8))


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As torch's, and says that it was here."""
    return {**torch.utils.data.default_collate(samples), "mine": torch.ones(len(samples))}


def loaders(kind: str = "shuffled", batch_size: int = 16, num_workers: int = 0) -> dict[str, DataLoader[Any]]:
    """For training, validation and test."""
    more: dict[str, Any] = {"num_workers": num_workers, "collate_fn": collate}
    train = Told()
    if kind == "batches":
        first = DataLoader(train, batch_sampler=PairsOfBatches(), **more)
    elif kind == "whole":
        return {"train": WholeBatches(train, batch_size=batch_size, collate_fn=collate)}
    elif kind == "unbatched":
        return {"train": DataLoader(train, batch_size=None)}
    else:
        sampler = {"own": OwnOrder(NUM_TRAIN), "weighted": WeightedRandomSampler([1.0] * NUM_TRAIN, 50)}.get(kind)
        first = DataLoader(train, batch_size, shuffle=kind == "shuffled", sampler=sampler, **more)
    return {"train": first, "val": DataLoader(Told(20), 8, **more), "test": DataLoader(Told(24), 24, **more)}


class WholeBatches(DataLoader[Any]):
    """Can't be taken apart."""

    def __iter__(self) -> Any:
        return super().__iter__()


class Plain(nn.Module):
    """Writes down the samples of each step of training, in ``steps``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        assert "mine" in batch
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class Module(pl.LightningModule):
    """Writes down the samples of each step of training, in ``steps``; ``own_loaders`` brings data, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        write("steps", " ".join(map(str, batch["index"].tolist())))
        if self.trainer.datamodule is not None:
            assert len(self.trainer.datamodule.train_set) == NUM_TRAIN
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ModuleWithLoaders(Module):
    """A LightningModule with data of its own."""

    def prepare_data(self) -> None:
        write("hooks", "prepare_data")

    def setup(self, stage: str) -> None:
        write("hooks", f"setup {stage}")
        self.train_set = Told(40)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, 8 // self.trainer.world_size)


class Sets(pl.LightningDataModule):
    """As lightning-hydra-template has it; writes down which hooks ran, in ``hooks``."""

    def __init__(self, batch_size: int = 16, kind: str = "shuffled") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.train_set: Told | None = None
        self.seen = 0

    def prepare_data(self) -> None:
        write("hooks", "prepare_data")

    def setup(self, stage: str | None = None) -> None:
        write("hooks", f"setup {stage}")
        assert self.trainer is not None
        self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        if self.train_set is None:
            self.train_set, self.val_set, self.test_set = Told(), Told(20), Told(24)

    def train_dataloader(self) -> DataLoader[Any]:
        return loaders(self.hparams["kind"], self.batch_size_per_device)["train"]

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(self.val_set, 8)]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test_set, 24)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if self.trainer.training:
            self.seen += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]

    def teardown(self, stage: str | None = None) -> None:
        write("hooks", f"teardown {stage} after {self.seen}")


def write(name: str, text: str) -> None:
    """A line at the end of a file of the working directory."""
    with Path(name).open("a") as file:
        file.write(f"{text}\n")

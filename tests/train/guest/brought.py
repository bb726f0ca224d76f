"""LightningModules and their data as people bring them, for runs beside Lightning's own Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, random_split

from wellfed.contract import Datasets

WIDTH = 3


class Rows(Dataset[Any]):
    """Rows whose first number is their index; ``level`` is added, as a hook sets it."""

    level = 0

    def __init__(self, count: int = 22, *, draws: bool = False) -> None:
        self.x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
        self._draws = draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(WIDTH) if self._draws else torch.zeros(WIDTH)
        return torch.tensor(index), self.x[index] + noise + self.level


class Module(pl.LightningModule):
    """Keeps the indices of each step in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.seen: list[list[int]] = []

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].tolist())
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    """22 rows in batches of 4, shuffled; each sample draws."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: Any) -> None:
        self.calls.append(f"setup {stage.value}")  # Lightning's enumeration
        self.rows = Rows(draws=True)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(6), 4)

    def test_dataloader(self) -> Any:
        return DataLoader(Rows(7), 4)


class SplitInSetup(Data):
    def setup(self, stage: str) -> None:
        self.rows, self.other = random_split(Rows(), [18, 4])


class NeedsTrainer(Data):
    def setup(self, stage: str) -> None:
        assert isinstance(self.trainer, pl.Trainer)
        super().setup(stage)
        self.rows = Rows(20 + self.trainer.log_every_n_steps // 50)


class LateNeedsTrainer(Data):
    """Needs the trainer when it has drawn, from a generator of its own and from torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def setup(self, stage: str) -> None:
        self.rows, self.other = random_split(Rows(), [18, 4])
        self.order = self.rng.permutation(18).tolist()
        assert self.trainer is not None
        self.epochs = self.trainer.max_epochs

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, sampler=self.order)


class AsksForTrainer(Data):
    """Takes a default if it can't ask the trainer; makes its rows, and draws, once."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = None

    def setup(self, stage: Any) -> None:
        if self.rows is None:
            self.rows = Rows(20 if getattr(self.trainer, "max_epochs", None) is None else 24, draws=True)
            self.order = torch.randperm(len(self.rows)).tolist()

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, sampler=self.order)


class DrawsInHook(Data):
    """Draws the order from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, sampler=self.rng.permutation(22).tolist())


class Workers(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True, num_workers=1)


class Weighted(Data):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.rows, 4, sampler=WeightedRandomSampler([1.0] * 22, 13, generator=generator))


class Held(Data):
    """Its loader's order comes from a generator that it holds."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.order = torch.Generator().manual_seed(7)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True, generator=self.order)


class OtherLength(Data):
    """Has a loader of another length in each epoch (with reload_dataloaders_every_n_epochs)."""

    number = 0

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(Rows(8 + 4 * self.trainer.current_epoch), 4, shuffle=True)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield torch.tensor(index), torch.rand(WIDTH)


class Stream(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), 4)


class Fixed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield torch.tensor(index), torch.full((WIDTH,), float(index))


class StreamOfFixed(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Fixed(), 4)


class Growing:
    """Any iterable: one batch more in each epoch."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for _ in range(1 + self.epochs):
            yield torch.arange(4), torch.rand(4, WIDTH)


class Iterable(Data):
    def setup(self, stage: str) -> None:
        self.growing = Growing()

    def train_dataloader(self) -> Any:
        return self.growing


class Combined(Data):
    def train_dataloader(self) -> Any:
        loaders = {"a": DataLoader(self.rows, 4, shuffle=True), "b": DataLoader(Rows(9), 3, shuffle=True)}
        return CombinedLoader(loaders, "min_size")


class OfPairs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([*batch["a"][0].tolist(), *batch["b"][0].tolist()])
        return self.loss(batch["a"]) + self.loss(batch["b"])


class TwoVal(Data):
    def val_dataloader(self) -> Any:
        return [DataLoader(Rows(6), 4), DataLoader(Rows(5), 2)]


class OfTwoVal(Module):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log(f"val_{'ab'[dataloader_idx]}", self.loss(batch), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_b"}}


class SetsLevel(Module):
    """Changes the data set at the start of each epoch."""

    def on_train_epoch_start(self) -> None:
        self.trainer.datamodule.rows.level = self.current_epoch  # type: ignore[attr-defined]


class EndsEpochs(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class SkipsSteps(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class GrowsInSetup(Module):
    """Makes its layers once it has data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential()

    def setup(self, stage: str) -> None:
        if not len(self.net):
            self.net.append(nn.Linear(self.trainer.datamodule.rows[0][1].shape[0], 1))  # type: ignore[attr-defined]


class ReplacesOptimizer(Module):
    """Another optimizer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class EstimatesSteps(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Module):
    """Two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].tolist())
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[0].parameters(), 0.01), torch.optim.SGD(self.net[2].parameters(), 0.1)]


class Plateau(Module):
    """Halves the rate at the end of each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class HandlesNan(Module):
    """Leaves out a step itself whose loss is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("nan") if self.global_step == 3 else 1.0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not all(weight.grad is None or weight.grad.isfinite().all() for weight in self.parameters()):
            optimizer.zero_grad()


class StopsItself(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


class OwnLoaders(Module):
    """Has its loaders in itself, and a None among its batches."""

    def setup(self, stage: str) -> None:
        self.rows = Rows(draws=True)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True, collate_fn=none_for_some)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(6), 4)


def none_for_some(samples: list[Any]) -> Any:
    if any(int(sample[0]) == 7 for sample in samples):
        return None
    return torch.utils.data.default_collate(samples)


def datasets() -> Datasets:
    """Plain data sets, which the engine feeds."""
    return Datasets(Rows(draws=True), Rows(6), Rows(7))

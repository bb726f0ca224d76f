"""The training that `kills` kills, in variants: the planted one, with a file of the samples of each step.

The module is imported by name, as a user's code is.
"""

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import planted
import torch
from planted import SAMPLES, Watch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from wellfed.contract import Datasets, Features, FeatureSource, LossOutput

PROCESS = time.time_ns()
"""Distinguishes this process from those that were killed. Process numbers repeat in containers."""
LARGE_FROM = 10
"""First step that needs much memory."""


def note(step: int, indices: Tensor) -> None:
    """Adds a line to this rank's file of samples: process, step, samples."""
    line = " ".join(map(str, (PROCESS, step, *indices.tolist())))
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))  # Lightning sets no RANK
    with open(f"samples-{rank}", "a") as file:
        file.write(f"{line}\n")


class Points(planted.Points):
    """The planted points, each with its number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": index}


class Encoded(Points):
    """Points whose vectors are features: rows of one table of all splits."""

    def __init__(self, split: str, samples: int, first: int) -> None:
        super().__init__(split, samples)
        self.first = first

    def on_device(self, batch: dict[str, Tensor], rng: Any, features: FeatureSource) -> dict[str, Tensor]:
        return {**batch, "x": features.rows(self.first + batch["index"])}


class Shards(IterableDataset[Any]):
    """The training points as a stream, in another order each epoch; each worker of each rank reads its share of it. It
    saves its position."""

    def __init__(self) -> None:
        self.points, self.epoch, self.position = Points("train"), 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
        own = range(SAMPLES)[rank * workers + worker :: int(os.environ.get("WORLD_SIZE", "1")) * workers]
        order = random.Random(self.epoch).sample(own, len(own))
        while self.position < len(order):
            self.position += 1
            yield self.points[order[self.position - 1]]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def datasets() -> Datasets:
    """Returns data that are read by index."""
    return Datasets(Points("train"), Points("val", 16), Points("test", 16))


def stream() -> Datasets:
    """Returns training data that are read in order."""
    return Datasets(Shards(), Points("val", 16), Points("test", 16))


def encoded() -> Datasets:
    """Returns data with features."""
    splits = [Encoded("train", SAMPLES, 0), Encoded("val", 16, SAMPLES), Encoded("test", 16, SAMPLES + 16)]
    table = torch.cat([split.inputs for split in splits])
    return Datasets(*splits, features=Features(len(table), table.nbytes, partial(encode, table)))


def encode(table: Tensor, indices: Tensor) -> Tensor:
    """Returns rows of features."""
    return table[indices].sin()


class Classifier(planted.Classifier):
    """The planted model, which writes down its samples.

    Args:
        large_mib: device memory of a sample's forward pass from `LARGE_FROM` on.
        scale: factor of the loss. Gradients of 16 bits overflow with a large one, until their scaler is lower.
    """

    def __init__(self, *, batch_norm: bool = False, dropout: float = 0.1, large_mib: int = 0, scale: float = 1) -> None:
        super().__init__(64)
        if batch_norm:
            self.norm = nn.BatchNorm1d(64)
        self.drop.p, self.large_mib, self.scale = dropout, large_mib, scale

    def loss(self, batch: dict[str, Any]) -> LossOutput:
        large = None
        if self.training and Watch.step:  # not when the plan tries the model
            note(Watch.step, batch["index"])
            if self.large_mib and Watch.step >= LARGE_FROM:
                large = batch["x"].new_empty(len(batch["x"]), self.large_mib * 2**18)
        loss = super().loss(batch).loss * self.scale
        del large
        return LossOutput(loss)


class Module(pl.LightningModule):
    """A LightningModule as a user brings it, around the same model."""

    def __init__(self, large_mib: int = 0) -> None:
        super().__init__()
        self.net = Classifier(large_mib=large_mib)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.net.loss(batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.net.loss(batch).loss)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("test_loss", self.net.loss(batch).loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

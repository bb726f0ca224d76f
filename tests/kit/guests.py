"""Runs a LightningModule here, and beside it under Lightning's own Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.kit.composed import compose
from wellfed.generators import seed_everything
from wellfed.observe.hardware.detect import machine
from wellfed.process import StopRequest
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.passes.guest_passes import GuestPasses
from wellfed.run.planner import Planner
from wellfed.run.screen import Terminal

QUICK = ("logger=none", "trainer.accelerator=cpu", "telemetry.enabled=false", "workload.effective_batch_size=null")


@dataclass
class Ran:
    """A run of a guest in this process."""

    passes: GuestPasses
    plan: Any
    books: Bookkeeper
    planner: Planner

    @property
    def module(self) -> Any:
        return self.passes.module

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict())

    @property
    def last(self) -> Path:
        return self.books.folder / "checkpoints" / "last.ckpt"

    def fit(self, checkpoint: Path | None = None, stop: StopRequest | None = None) -> Ran:
        self.passes.fit(Terminal(quiet=True), stop or StopRequest(), checkpoint, lambda: None)
        return self

    def content(self, name: str = "last.ckpt") -> dict[str, Any]:
        return torch.load(self.last.with_name(name), weights_only=True)


def guest(folder: Path, model: str, data: str | None, *overrides: str, **workload: Any) -> Ran:
    """Returns a run that can be trained. ``model`` and ``data`` are dotted names."""
    made = compose([*QUICK, *overrides])
    given = {
        "model": {"_target_": model},
        "data": None if data is None else {"_target_": data},
        "optimizer": None,
        **workload,
    }
    config = replace(made.config, workload=replace(made.config.workload, name="guest", **given))
    planner = Planner.start(replace(made, config=config), machine())
    plan = planner.rough()
    folder.mkdir(exist_ok=True)
    books = Bookkeeper(RunRecord.start("guest"), folder, config)
    return Ran(GuestPasses(planner.config, planner.parts, plan, books, rank=0), plan, books, planner)


def under_lightning(
    folder: Path, model: Callable[[], Any], data: Callable[[], Any] | None, seed: int = 1, **arguments: Any
) -> tuple[Any, pl.Trainer]:
    """Returns the same module, trained by Lightning alone, and its Trainer."""
    seed_everything(seed)
    given = None if data is None else data()
    module = model()
    trainer = pl.Trainer(
        accelerator="cpu",
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **arguments,
        },
    )
    loaders = {"datamodule": given} if isinstance(given, pl.LightningDataModule) else {}
    if isinstance(given, dict):
        loaders = {f"{split}_dataloaders": loader for split, loader in given.items()}
    trainer.fit(module, **loaders)
    return module, trainer

"""A Lightning script with a planted fault; `benchmarks/peers_diagnosis.py` runs it.

wellfed watch benchmarks/peers/lightning_script.py --fault too_few_workers
traceml run benchmarks/peers/lightning_script.py --args --fault too_few_workers
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from parts import (
    AfterSteps,
    Loss,
    Net,
    Settings,
    SlowSchedule,
    loader_of,
    optimizer_of,
    rest,
    validation_loader,
    work,
)
from planted import ALL


class Planted(lightning.LightningModule):
    """The network of `parts`, with the faults of a module."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.net, self.loss_of = settings, Net(settings), Loss(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        work(self.settings.augment_ms)
        return self.loss_of(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        self(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        work(self.settings.gradient_ms)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.settings)
        if not self.settings.schedule_ms:
            return optimizer
        schedule = SlowSchedule(optimizer, self.settings.schedule_ms)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Beside(lightning.Callback):
    """What the script does after steps and epochs."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.after_step = settings, AfterSteps(settings)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.after_step(module, batch[0])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        rest(self.settings.epoch_end_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=ALL, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = Settings(**ALL[given.fault].settings)
    saves = [ModelCheckpoint(dirpath="planted", every_n_train_steps=settings.checkpoint_every)]
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=settings.steps,
        max_epochs=-1,
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.validate_every or None,
        check_val_every_n_epoch=None if settings.validate_every else 1,
        limit_val_batches=1.0 if settings.validate_every else 0,
        num_sanity_val_steps=0,
        callbacks=[Beside(settings), *(saves if settings.checkpoint_every else [])],
        enable_checkpointing=bool(settings.checkpoint_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    validation = validation_loader(settings) if settings.validate_every else None
    trainer.fit(Planted(settings), loader_of(settings), validation)


if __name__ == "__main__":
    main()

"""Training begins when the model is in its place on the device."""

from __future__ import annotations

import lightning.pytorch as pl
import torch


class Settled(pl.Callback):
    """Waits for the device once, before training.

    Lightning hands a model to DDP on a stream of its own (`DDPStrategy._setup_model`), which sends the weights of rank
    0 to the others there, and nothing orders the first step, on another stream, after that.
    """

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda" and trainer.world_size > 1:
            torch.cuda.synchronize(device)

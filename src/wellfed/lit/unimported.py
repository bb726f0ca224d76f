"""What can be said of Lightning without importing it, which takes seconds: planning needs no more."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch for this process, and by Lightning's variables the processes that it starts."""
    seed %= 2**32
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(seed), "0"
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def is_lightning_module(model: Any) -> bool:
    """Whether the user brings a finished LightningModule, which runs its own step."""
    lightning = sys.modules.get("lightning.pytorch")  # who has made one has imported it
    return lightning is not None and isinstance(model, lightning.LightningModule)

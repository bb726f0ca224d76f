"""``train.py`` on a card that turns out to be smaller when training begins: ROOM_MIB more than is held then."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from wellfed.train.loop.training import Training

fit = Training.fit


def fit_on_less(*arguments: Any) -> None:
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + int(float(os.environ["ROOM_MIB"]) * 2**20)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    fit(*arguments)


Training.fit = fit_on_less  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).parents[2] / "src" / "train.py"), run_name="__main__")
sys.exit("train.py exits by itself")

"""A workload whose learning curves are known: its score nears `Curve.top`, a tenth of what is left with each epoch."""

import os
import signal
import time
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput


class Points:
    """Numbers between 0 and 1."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([index / self.num])}


class Known:
    """Gives the figure that the model has come to."""

    best_metric = "score"

    def __init__(self, mode: Literal["max", "min"]) -> None:
        self.best_mode = mode
        self._score = torch.zeros(())

    def reset(self) -> None:
        self._score = torch.zeros(())

    def update(self, model: Any, batch: dict[str, Tensor], /) -> None:
        self._score = model.score()

    def compute(self) -> dict[str, float]:
        return {"score": float(self._score), "other": 1.0}

    def artifacts(self, folder: object) -> dict[str, Any]:
        return {}


def datasets(num: int = 64, val: bool = True, mode: Literal["max", "min"] = "max") -> Datasets:
    """``num`` points to train on, four to validate."""
    held_out = Points(4) if val else None
    return Datasets(train=Points(num), val=held_out, test=held_out, evaluation=Known(mode))


class Curve(nn.Module):
    """Comes a tenth nearer to its ``top`` with every 4 steps; ``fault`` is what it does instead after 8 steps."""

    def __init__(self, top: float = 1.0, dim: int = 1, fault: str = "none", pause_s: float = 0.0) -> None:
        super().__init__()
        if fault == "build" or dim > 100:
            raise ValueError(f"no such layer: {dim}")
        self.line = nn.Linear(1, 1)
        self.top, self.fault, self.pause_s = top, fault, pause_s
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def score(self) -> Tensor:
        """Returns the score so far."""
        epochs = int(self.calls) / 4
        return torch.tensor(float("nan") if self.fault == "not_finite" and epochs else self.top * (1 - 0.9**epochs))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        """Returns any loss; the metric is the score."""
        if self.training:
            self.calls += 1
            time.sleep(self.pause_s)
            if self.fault == "raise" and self.calls > 8:
                raise RuntimeError("planted: step went wrong")
            if self.fault == "kill" and self.calls > 8:
                os.kill(os.getpid(), signal.SIGKILL)
        return LossOutput(self.line(batch["x"]).square().mean())

"""A workload that spreads its secrets: it prints, logs, warns and raises them."""

import logging
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, LossOutput


class Numbers:
    """Random numbers; the last sample may raise a text."""

    def __init__(self, size: int, raises: str | None = None) -> None:
        self.x, self.raises = torch.randn(size, 4, generator=torch.Generator().manual_seed(0)), raises

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.raises is not None and index == len(self) - 1:
            raise OSError(self.raises)
        return {"x": self.x[index]}


def datasets(*, fails: bool = False, **secrets: Any) -> Datasets:
    """All secrets in one text, in every way that a text can take."""
    text = f"logged in with {secrets}"
    logging.getLogger("leaky").info("as text: %s", text)
    warnings.warn(text, stacklevel=1)
    print(text)
    print(text, file=sys.stderr)
    return Datasets(train=Numbers(64, text if fails else None), val=Numbers(16))


class Model(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(self(batch["x"]).square().mean())

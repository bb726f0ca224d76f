"""A workload small enough to train hundreds of times, and a way to run it without the command line."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.contract import LossOutput
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.sample_rng import SampleRng

NUM_SAMPLES, WIDTH = 70, 6


class TinyData:
    """A linear target with noise that belongs to the index."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, WIDTH, generator=generator)
        self.targets = self.inputs @ torch.linspace(-1, 1, WIDTH).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.inputs[index], "y": self.targets[index]}

    def fetch(self, indices: Tensor, rng: SampleRng) -> dict[str, Tensor]:
        noise = rng.uniform_at(indices).unsqueeze(1)
        return {"x": self.inputs.index_select(0, indices), "y": self.targets.index_select(0, indices) + 0.1 * noise}


class TinyModel(nn.Module):
    """An MLP with LayerNorm; ``fail`` may raise for a batch size and step."""

    def __init__(self, dropout: float = 0.0, fail: Callable[[int, int], BaseException | None] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1)
        )
        self.fail, self.calls, self.seen = fail, 0, []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"])

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        self.calls += 1
        size = len(batch["x"])
        self.seen.append(size)
        if self.fail is not None and (error := self.fail(size, self.calls)) is not None:
            raise error
        residual = (self(batch) - batch["y"]).square().mean()
        return LossOutput(residual, {"rmse": residual.sqrt()})


def loader(batch_size: int = 32, data: Any = None, **more: Any) -> Any:
    """Ragged: 70 samples in steps of 32."""
    return train_loader(data or TinyData(), batch_size=batch_size, seed=1, settings=LoaderSettings(), **more)


def eval_loader(batch_size: int = 32) -> EvalLoader:
    """The same samples in order."""
    return EvalLoader(TinyData(), batch_size, seed=1)

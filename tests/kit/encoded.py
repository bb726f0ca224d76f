"""A workload whose inputs come from an encoder that is frozen for an epoch or two and trained then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellfed.contract import Datasets, Features, FeatureSource, LossOutput
from wellfed.sample_rng import SampleRng
from wellfed.train.lightning.callbacks.stage_switch import FeatureStages
from wellfed.train.lightning.module import StepModule
from wellfed.train.memory.features import weights_behind
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.plain_training import PlainSetup, StepOptions
from wellfed.train.step.feature_table import FeatureStage

NUM_ROWS, NUM_SAMPLES, CODES = 40, 64, 8


class Encoded(nn.Module):
    """A small head on rows of an encoder, dropout included."""

    def __init__(self, width: int = 16, *, train_encoder: bool = True, num_rows: int = NUM_ROWS) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(CODES, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, width))
        self.head = nn.Linear(width, 1)
        codes = torch.randn(num_rows, CODES, generator=torch.Generator().manual_seed(1))
        self.register_buffer("codes", codes, persistent=False)
        self.train_encoder, self.width = train_encoder, width
        if not train_encoder:
            self.encoder.requires_grad_(False)

    def train(self, mode: bool = True) -> Encoded:
        super().train(mode)
        if not self.train_encoder:
            self.encoder.eval()
        return self

    def features(self) -> Features:
        def rows(indices: Tensor) -> Tensor:
            return self.encoder(self.codes.index_select(0, indices))

        return Features(len(self.codes), 4 * len(self.codes) * self.width, rows, trainable=self.train_encoder)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput((self.head(batch["x"]).squeeze(1) - batch["y"]).square().mean())


class Rows:
    """A row of the features and a target for each sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {name: value[0] for name, value in self.fetch(torch.tensor([index])).items()}

    def fetch(self, indices: Tensor, rng: SampleRng | None = None) -> dict[str, Tensor]:
        return {"row": indices % NUM_ROWS, "y": (indices % 7).float()}

    def on_device(self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource) -> dict[str, Tensor]:
        return {"x": features.rows(batch["row"]), "y": batch["y"]}


def datasets() -> Datasets:
    """Four steps of 16."""
    return Datasets(Rows(), Rows(), Rows())


def encoder_weights(model: Any) -> Tensor:
    """All of them in a row, a copy."""
    return torch.cat([weight.detach().flatten().clone() for weight in model.encoder.parameters()])


def staged(
    on_event: Callable[..., None],
    modes: Sequence[Any] = ("cache", "dynamic"),
    micro: Sequence[int] = (16, 8),
    **more: Any,
) -> tuple[StepModule, FeatureStages]:
    """A seeded module whose features change from mode to mode with each second epoch, and what makes them."""
    torch.manual_seed(3)
    model, data = Encoded(more.pop("width", 16), num_rows=more.pop("num_rows", NUM_ROWS)), datasets()
    features = model.features()
    encoder = weights_behind(features, model)
    for weight in encoder:
        weight.requires_grad_(False)
    module = StepModule(
        model,
        PlainSetup(
            train_data=data.train,
            eval_data={"val": data.val, "test": data.test},
            features=replace(features, trainable=False),
            encoder=encoder,
            micro=MicroBatches(micro[0]),
            options=StepOptions(seed=1, feature_mode=modes[0], **more),
            make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            lr_factor=lambda step: 1 / (1 + step),
            on_event=on_event,
        ),
    )
    stages = [
        FeatureStage(2 * number, mode, MicroBatches(size), checkpoints=False, trains_encoder=mode == "dynamic")
        for number, (mode, size) in enumerate(zip(modes, micro, strict=True))
    ]
    return module, FeatureStages(stages, lambda mode: data, on_event)

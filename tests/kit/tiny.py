"""A workload small enough to train hundreds of times, and a way to run it without the command line."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from wellfed import generators
from wellfed.batches import split
from wellfed.contract import LossOutput
from wellfed.data.eval_loader import EvalLoader
from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader
from wellfed.sample_rng import SampleRng
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.checkpoints.checkpoints import BeforeUsers, CheckpointOptions, Checkpoints
from wellfed.train.lightning.module import StepModule
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.plain_training import PlainSetup
from wellfed.train.plain_model.scheduling import Schedule
from wellfed.train.step.train_step import StepOptions

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


def options(**changes: Any) -> lit.TrainerOptions:
    """CPU, one device, 20 steps."""
    values = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "auto",
        "precision": "32-true",
        "max_epochs": None,
        "max_steps": 20,
        "max_time_s": None,
        "gradient_clip": None,
        "validate_every_steps": None,
        "deterministic": False,
    }
    return lit.TrainerOptions(**{**values, **changes})


def module(
    *,
    micro: int = 32,
    dropout: float = 0.0,
    fail: Any = None,
    on_event: Any = None,
    lr: float = 0.01,
    model: nn.Module | None = None,
    evaluation: Any = None,
    scheduling: Any = None,
    is_monitored: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **step: Any,
) -> StepModule:
    """A seeded module over `TinyData`."""
    torch.manual_seed(3)
    return StepModule(
        model or TinyModel(dropout, fail),
        PlainSetup(
            train_data=TinyData(),
            evaluation=evaluation,
            eval_data={"val": TinyData(), "test": TinyData()},
            micro=MicroBatches(micro),
            options=StepOptions(**{"seed": 1, "on_oom": "retry", **step}),
            make_optimizer=lambda model: optimizer(model.parameters(), lr=lr),  # type: ignore[call-arg]
            lr_factor=Schedule("cosine", 3, 0.1, 20),
            scheduling=scheduling,
            is_monitored=is_monitored,
            on_event=on_event or (lambda kind, **facts: None),
        ),
    )


def loader(batch_size: int = 32, data: Any = None, **more: Any) -> Any:
    """Ragged: 70 samples in steps of 32."""
    return train_loader(data or TinyData(), batch_size=batch_size, seed=1, settings=LoaderSettings(), **more)


def eval_loader(batch_size: int = 32) -> EvalLoader:
    """The same samples in order."""
    return EvalLoader(TinyData(), batch_size, seed=1)


def checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    """Saves when told."""
    given = {"metrics": {}, "on_disk_error": lambda error, step: None}
    options = {"every_steps": 1000, "minutes": None, "keep_last": 2, "best_metric": "loss", "best_mode": "min"}
    options["trusted"] = False
    for name, value in changes.items():
        (options if name in options else given)[name] = value
    return Checkpoints(folder, CheckpointOptions(**options), **given)  # type: ignore[arg-type]


def fit(
    module: StepModule,
    tmp_path: Path,
    callbacks: Sequence[pl.Callback] = (),
    checkpoint: Path | None = None,
    batches: Any = None,
    users: Sequence[pl.Callback] = (),
    **changes: Any,
) -> pl.Trainer:
    """Trains a module; returns its Trainer."""
    before = [BeforeUsers(one) for one in callbacks if isinstance(one, Checkpoints)]
    trainer = lit.make_trainer(options(**changes), [*before, *callbacks], tmp_path, users=users)
    lit.fit(trainer, module, batches or loader(), None, checkpoint)
    return trainer


class Steps(pl.Callback):
    """A callback that records the state of a step."""

    was_disturbed = False

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.was_disturbed = module.step.was_disturbed


class Lightnings(pl.LightningModule):
    """The same training by Lightning's automatic optimization, with its closure, precision plugin and clipping."""

    def __init__(self, ours: StepModule) -> None:
        super().__init__()
        self.model, self._ours = ours.model, [ours]

    def configure_optimizers(self) -> Any:
        return self._ours[0].configure_optimizers()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, delivery: Any, batch_idx: int) -> torch.Tensor:
        for weight in self.parameters():
            weight.grad = None
        sizes = self._ours[0].plain.micro.sizes(delivery.size)
        *parts, last = zip(split(delivery.batch, sizes), sizes, strict=True)
        for part, size in parts:
            loss = self.model.loss(part).loss * (size / delivery.size)
            with torch.autocast("cpu", enabled=False):
                self.trainer.strategy.backward(loss, None)
        loss = self.model.loss(last[0]).loss
        return loss * (last[1] / delivery.size) if parts else loss

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Gradients of earlier micro-batches stay."""

    def validation_step(self, delivery: Any, batch_idx: int) -> None:
        pass

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = generators.state()


def weights(module: pl.LightningModule) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

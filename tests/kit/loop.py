"""Trains the tiny workload by the loop for plain models, without the command line."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit import tiny
from wellfed.config.schema import TrainerConfig
from wellfed.observe.timing.step_clock import StepClock
from wellfed.train.loop.callbacks import Callback
from wellfed.train.loop.checkpoints import Checkpoints
from wellfed.train.loop.figures import Figures
from wellfed.train.loop.place import Place
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.training import Limits, Training
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.scheduling import Schedule
from wellfed.train.step.train_step import StepOptions

PLACE = ("accelerator", "devices", "strategy", "precision", "deterministic")
LIMITS = ("max_epochs", "max_steps", "max_time_s", "validate_every_steps")


def model(
    *,
    micro: int = 32,
    dropout: float = 0.0,
    fail: Any = None,
    on_event: Any = None,
    lr: float = 0.01,
    model: nn.Module | None = None,
    evaluation: Any = None,
    scheduling: Any = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **step: Any,
) -> PlacedModel:
    """A seeded model over `tiny.TinyData`."""
    torch.manual_seed(3)
    return PlacedModel(
        model or tiny.TinyModel(dropout, fail),
        Place(),
        StepOptions(**{"seed": 1, "on_oom": "retry", **step}),
        train_data=tiny.TinyData(),
        evaluation=evaluation,
        eval_data={"val": tiny.TinyData(), "test": tiny.TinyData()},
        micro=MicroBatches(micro),
        make_optimizer=lambda model: optimizer(model.parameters(), lr=lr),  # type: ignore[call-arg]
        lr_factor=Schedule("cosine", 3, 0.1, 20),
        scheduling=scheduling,
        on_event=on_event or (lambda kind, **facts: None),
    )


def training(placed: PlacedModel, batches: Any = None, *, gradient_clip: float | None = None, **more: Any) -> Training:
    """A training of 20 steps unless limits are given; place, limits and arguments of `Training` by name."""
    where = {name: more.pop(name) for name in PLACE if name in more}
    if where:
        placed.place = Place(**where)
    if gradient_clip is not None:
        placed.options = replace(placed.options, gradient_clip=gradient_clip)
    limits = {"max_steps": 20, **{name: more.pop(name) for name in LIMITS if name in more}}
    return Training(placed, batches or tiny.loader(), Limits(**limits), **{"clock": StepClock(), **more})


def fit(placed: PlacedModel, batches: Any = None, *, checkpoint: Path | None = None, **more: Any) -> Training:
    """Trains as `training` says."""
    made = training(placed, batches, **more)
    made.fit(checkpoint)
    return made


def validated(placed: PlacedModel, batches: Any = None) -> dict[str, float]:
    """Returns the metrics of a validation of the present weights."""
    placed.begin()
    return placed.evaluate("val", tiny.eval_loader() if batches is None else batches, 0)


def figures(into: list[Any] | None = None, *, every: int = 1, stops_on_nan: bool = True) -> Figures:
    """Figures whose rows of training go into a list."""
    rows = [] if into is None else into
    return Figures(lambda split, values, **_: rows.append(dict(values)), every=every, stops_on_nan=stops_on_nan)


def checkpoints(
    folder: Path,
    *,
    every_steps: int | None = 1000,
    minutes: float | None = None,
    keep_last: int = 2,
    best_metric: str = "loss",
    best_mode: Any = "min",
    trusted: bool = False,
    **more: Any,
) -> Checkpoints:
    """Saves at the end alone, unless told otherwise."""
    trainer = TrainerConfig(
        checkpoint_every_steps=every_steps,
        checkpoint_minutes=minutes,
        keep_last=keep_last,
        trusted_checkpoints=trusted,
    )
    return Checkpoints(folder, trainer, best_metric, best_mode, **{"on_disk_error": lambda error, step: None, **more})


class After(Callback):
    """Calls a function with the training's step after each step."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def stepped(self, step: int) -> None:
        self._call(step)


def weights(placed: PlacedModel) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in placed.model.parameters()])


def flat(state: Any, name: str = "") -> Mapping[str, Any]:
    """Returns the leaves of a checkpoint by their path."""
    if isinstance(state, Mapping):
        return {path: leaf for key, item in state.items() for path, leaf in flat(item, f"{name}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return flat(dict(enumerate(state)), name)
    return {name: state.tolist() if isinstance(state, torch.Tensor) else state}

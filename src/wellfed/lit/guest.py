"""What a user's own LightningModule gets around it: a logger, checkpoints to go on from, and the knobs that apply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from wellfed.lit.callbacks.guest_state import AtEpochStart, GuestCheckpoints, Last
from wellfed.lit.callbacks.non_finite import NonFinite
from wellfed.lit.callbacks.rank_shares import RankShares
from wellfed.lit.logger import FiguresLogger
from wellfed.lit.plain_checkpoint import PlainCheckpointIO
from wellfed.lit.trainer import TrainerOptions, make_trainer
from wellfed.step.compiled import Compiled


def make_guest_trainer(
    options: TrainerOptions,
    callbacks: Sequence[pl.Callback],
    folder: Path,
    *,
    last: Sequence[pl.Callback] = (),
    log: Callable[[Mapping[str, float]], None],
    log_every: int = 50,
) -> pl.Trainer:
    """As `make_trainer`, for a LightningModule that brings callbacks and logs by itself.

    Args:
        last: callbacks that stand behind those of the module.
        log: takes what is given to ``self.logger``.
        log_every: steps between two rows of what the module logs.
    """
    return make_trainer(
        options,
        [*callbacks, *([Last(last)] if last else [])],
        folder,
        logger=FiguresLogger(log, folder),
        log_every_n_steps=log_every,
        plugins=[PlainCheckpointIO()],
    )


def training_callbacks(
    checkpoints: GuestCheckpoints | None, world_size: int, non_finite: NonFinite
) -> list[pl.Callback]:
    """What a training of a guest needs beside the callbacks of every run; without ``checkpoints`` it keeps nothing."""
    shares = [RankShares()] if world_size > 1 else []
    kept = [] if checkpoints is None else [AtEpochStart(checkpoints)]
    return [*shares, *kept, non_finite]


def compile_step(module: Any, mode: str, on_failure: Callable[[str], None]) -> None:
    """Compile the module's ``training_step``; one that can't be compiled is given up for good, with a warning.

    For automatic optimization alone: a step that fails half way is done again, which must not have stepped.
    """
    compiled = Compiled(module.training_step, mode, on_failure)

    @functools.wraps(module.training_step)
    def training_step(*arguments: Any, **named: Any) -> Any:
        try:
            return compiled(*arguments, **named)
        finally:
            if compiled.has_compiled:
                compiled.has_compiled, module.was_disturbed = False, True

    module.training_step = training_step


def builds_itself_later(module: pl.LightningModule) -> bool:
    """Whether the module may make layers when a Trainer has it: its weights can't be compared or loaded before."""
    return any(
        getattr(type(module), hook) is not getattr(pl.LightningModule, hook) for hook in ("setup", "configure_model")
    )

"""Evaluates a few batches of validation and test before the first step, so that errors show at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import lightning.pytorch as pl
import torch

from wellfed.batches import Delivery
from wellfed.observe.loggers.log_media import logged_to
from wellfed.train.lightning.callbacks.figures import name_in_metrics
from wellfed.train.lightning.ceiling import put_back
from wellfed.train.lightning.module import StepModule

Few = Callable[[], AbstractContextManager[Iterable[Delivery]]]
"""Function that opens a few batches of a split."""
_OF_ALL_BATCHES = ("compute", "on_validation_epoch_end", "on_test_epoch_end")
"""Functions that need a whole split, and may fail on a few batches."""


class SanityCheck(pl.Callback):
    """Check of each split. It must be the first callback. It logs nothing and restores buffers, generators and metrics.

    A resumed run is not checked again. Lightning checks the validation of a user's LightningModule with all its hooks
    (``num_sanity_val_steps``), and not its test.
    """

    def __init__(
        self,
        splits: Mapping[str, Few],
        found: Callable[[str, Mapping[str, float]], None],
    ) -> None:
        """
        Args:
            found: called with the metrics of a few batches of each split of a `StepModule`, or of a user's validation.
        """
        self._splits, self._found = splits, found
        self._trying: str | None = None
        self._until_end = ExitStack()

    def on_sanity_check_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trying = "val"
        self._until_end.enter_context(self._put_back(module))

    def on_sanity_check_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        logged: dict[str, float] = {}
        with suppress(Exception):  # a metric may need more than a few batches
            logged = {name_in_metrics(name, "val"): float(value) for name, value in trainer.callback_metrics.items()}
        self._until_end.close()  # after metrics were computed, which may draw
        self._trying = None
        self._found("val", {name[4:]: value for name, value in logged.items() if name.startswith("val/")})

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step > 0 or not isinstance(module, StepModule):
            return
        for split, few in self._splits.items():
            self._trying = split
            with self._put_back(module), few() as deliveries, torch.no_grad():
                module.eval()
                metrics = _metrics(module, split, deliveries)
                self._trying = None
                self._found(split, metrics)
        self._trying = None

    @contextmanager
    def _put_back(self, module: pl.LightningModule) -> Iterator[None]:
        with put_back(module, only_buffers=True), logged_to(None):
            yield

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        if self._trying is None:
            return
        frames = traceback.walk_tb(exception.__traceback__)
        needs_more = any(frame.f_code.co_name in _OF_ALL_BATCHES for frame, _ in frames)
        way_out = "; trainer.sanity_batches=0 tries none" if needs_more else ""
        exception.add_note(f"in the {self._trying} batches that are tried before training{way_out}")


def _metrics(module: StepModule, split: str, deliveries: Iterable[Delivery]) -> dict[str, float]:
    evaluating, few = module.plain.evaluating, list(deliveries)
    try:
        evaluating.must_repeat = True
        while evaluating.must_repeat:
            module.evaluate_again(split, few)
        return module.plain.evaluation.compute()
    finally:
        evaluating.begin()

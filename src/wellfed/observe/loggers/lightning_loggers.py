"""Opens Lightning's loggers for a run. A user's module sees each as `self.logger`, and each gets the run's metrics.

Metrics that a LightningModule or a callback logs pass through the journal to every logger, under the names of
metrics.csv. Pictures, texts and tables go only to the logger that gets them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from wellfed.errors import text_of
from wellfed.masking import hidden, masked
from wellfed.observe.loggers.late_imports import defer_dynamo, defer_torchmetrics
from wellfed.observe.loggers.sink import PICTURES, GuardedSink

defer_torchmetrics()  # before Lightning is imported, which happens here first in a run
defer_dynamo()

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger, Logger  # noqa: E402

Forward = Callable[[Mapping[str, float]], None]
_FLUSH_S = 2
"""Maximum seconds that TensorBoard buffers values."""
_RETRIES, _TIMEOUT_S = "1", "10"
"""Retries and timeout of calls to an mlflow server. Its defaults (7 and 120 s) block a run for minutes."""


class _ForTrainer(Logger):
    """Mixin before a Lightning logger class. Sends a Trainer's numbers to the run instead of the logger."""

    forward: Forward | None = None
    """Receives numbers; None = another logger of the same Trainer forwards them."""
    _config: Mapping[str, Any] = MappingProxyType({})

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Sends numbers and one-element tensors to the run, anything else to this logger."""
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        if self.forward is not None:
            self.forward(numbers)
        if rest := {name: value for name, value in metrics.items() if name not in numbers}:
            self._try(super().log_metrics, rest, step)

    def log_hyperparams(self, params: Any, *arguments: Any, **named: Any) -> None:
        """Logs a user's hyper-parameters. Names that the configuration has, too, go under ``hparams``."""
        own = masked(dict(params if isinstance(params, Mapping) else vars(params)))
        if taken := {name: own.pop(name) for name in self._config if name in own}:
            own["hparams"] = taken
        self._try(super().log_hyperparams, own, *arguments, **named)

    def save(self) -> None:
        self._try(super().save)

    def finalize(self, status: str) -> None:
        """Does nothing: the run ends the logger after the Trainers of training and test."""

    def lose(self, reason: str) -> None:
        """Takes the reason of a failed call."""

    def _try(self, call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except Exception as error:  # noqa: BLE001  a failing logger must not end a run
            self.lose(text_of(error))


class Quiet(_ForTrainer, DummyLogger):
    """Logger of a run without loggers: numbers go to the files, and calls for anything else do nothing."""

    name = "lightning"
    """Folder for files of the user's callbacks, apart from the run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return str(self._folder)


class _Wandb(_ForTrainer, WandbLogger):
    pass


class LoggerSink(_ForTrainer, GuardedSink):
    """Mixin before a Lightning logger class, which is then a sink of the run, too.

    Its axis is the optimizer step, also for readings between two steps.
    """

    lose = GuardedSink.lose

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)  # Lightning's, which calls that of GuardedSink without arguments

    def begin(
        self,
        config: dict[str, Any],
        step: Callable[[], int],
        on_lost: Callable[[str], None] = lambda reason: None,
        *,
        is_new: bool = True,
    ) -> None:
        """Opens the logger with the run's configuration. ``is_new``: the run is not a resumed one."""
        self.label, self._on_lost = type(self).__name__.removeprefix("_").lower(), on_lost
        self._config, self._step = config, step
        if is_new or not isinstance(self, MLFlowLogger):  # mlflow's parameters can't be changed
            super(_ForTrainer, self).log_hyperparams(config)
            super(_ForTrainer, self).save()

    def _take(self, row: dict[str, float | int]) -> None:
        is_of_step = "step" in row
        super(_ForTrainer, self).log_metrics(row, int(row.pop("step")) if is_of_step else self._step())
        if is_of_step:  # saves earlier readings too, so a killed run loses no more than in metrics.csv
            super(_ForTrainer, self).save()

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        super(_ForTrainer, self).log_metrics(summary, self._step())
        super(_ForTrainer, self).finalize("success" if exit_code == 0 else "failed")


class _Csv(LoggerSink, CSVLogger):
    shows_media = False

    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> None:
        """Drops a table, which csv can't show."""

    def _take_file(self, name: str, path: Path, step: int | None) -> None:
        """Drops a file."""


class _TensorBoard(LoggerSink, TensorBoardLogger):
    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> None:
        self.experiment.add_text(name, _markdown(columns, rows), step or 0)

    def _take_file(self, name: str, path: Path, step: int | None) -> None:
        if path.suffix.lower() in PICTURES:
            from PIL import Image  # TensorBoard requires it

            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self.experiment.add_image(name, pixels, self._step() if step is None else step, dataformats="HWC")

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self.forward = None
        # Adds the run to TensorBoard's table of hyper-parameters.
        TensorBoardLogger.log_hyperparams(self, dict(self.hparams), dict(summary), self._step())
        super()._close(summary, exit_code)


class _Mlflow(LoggerSink, MLFlowLogger):
    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> None:
        file = f"{name}.md" if step is None else f"{name}_{step}.md"
        self.experiment.log_text(self.run_id, _markdown(columns, rows), file)

    def _take_file(self, name: str, path: Path, step: int | None) -> None:
        self.experiment.log_artifact(self.run_id, str(path))


def open_tensorboard(folder: Path, *, resumed_at: int | None) -> LoggerSink:
    """Returns a logger to ``tensorboard/`` of the run folder. Events beyond the resumed step are hidden."""
    purge_step = None if resumed_at is None else resumed_at + 1
    return _TensorBoard(folder, "tensorboard", "", default_hp_metric=False, purge_step=purge_step, flush_secs=_FLUSH_S)


def open_csv(folder: Path) -> LoggerSink:
    """Returns a logger to ``csv/version_<n>/`` of the run folder, a new one for each resume."""
    return _Csv(folder, "csv")


def open_mlflow(uri: str, *, experiment: str, name: str, run_id: str | None, tags: Sequence[str] = ()) -> LoggerSink:
    """Returns a logger to a new run in the store at ``uri``, or to the run with this id."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _TIMEOUT_S)
    if uri.startswith("file:"):  # mlflow 3 prefers a database, which its small package can't write
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return _Mlflow(experiment, name, uri, run_id=run_id, tags={"tags": ",".join(map(hidden, tags))} if tags else None)


def of_wandb(run: Any, config: Mapping[str, Any], folder: Path) -> Any:
    """Returns a logger to an open wandb run, which has its own sink."""
    logger = _Wandb(experiment=run, save_dir=folder, project=Quiet.name)
    logger._config = config
    return logger


def for_trainer(loggers: list[Any], forward: Forward, folder: Path) -> list[Any]:
    """Returns the loggers of a Trainer, at least a `Quiet` one. The first forwards what is logged."""
    found = loggers or [Quiet(folder)]
    found[0].forward = forward
    return found


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ((str(cell).replace("|", "/").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float, np.number))

"""The logger that a user's LightningModule and its callbacks find: what they log goes where our own figures go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

_LOG = logging.getLogger(__name__)


class FiguresLogger(Logger):
    """Hands numbers on; keeps no hyper-parameters (the record has the configuration), no pictures, no text."""

    def __init__(self, take: Callable[[Mapping[str, float]], None], folder: Path) -> None:
        """
        Args:
            folder: the run's; Lightning puts files of the user's callbacks below it.
        """
        super().__init__()
        self._take, self._folder = take, folder
        self._experiment = _Nothing()

    @property
    def name(self) -> str:
        """The folder of what the user's callbacks write: their checkpoints don't lie among the run's."""
        return "lightning"

    @property
    def version(self) -> str:
        """None: a run folder is one run's."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._folder)

    @property
    def experiment(self) -> Any:
        """Takes every call and keeps nothing."""
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Numbers and tensors of one number; ``step`` is ours, optimizer steps so far."""
        self._take({name: float(value) for name, value in metrics.items() if _is_number(value)})

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Nothing."""


class _Nothing:
    """Any method may be called; the first warns."""

    _has_warned = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "self.logger.experiment.%s keeps nothing here: pictures and texts are dropped. Numbers given to "
                "self.log and self.logger.log_metrics are kept.",
                name,
            )
        return lambda *arguments, **named: None


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float, np.number))

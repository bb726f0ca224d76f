"""Opens the loggers of a run: wandb, and Lightning's loggers for TensorBoard, mlflow and csv."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from wellfed.config.schema import LoggerConfig, RunConfig
from wellfed.errors import first_line
from wellfed.masking import SECRET_SHOWN
from wellfed.observe.loggers import lightning_loggers, wandb_sink
from wellfed.observe.loggers.sink import Sink
from wellfed.record.entries import OnEvent, RunRecord

_LOG = logging.getLogger(__name__)


def chosen_loggers(logger: LoggerConfig) -> list[str]:
    """Returns the names of the chosen loggers."""
    names = ["wandb"] if wandb_sink.decide_mode(logger.mode.value) != "disabled" else []
    return [*names, *(name for name in ("tensorboard", "mlflow", "csv") if getattr(logger, name))]


@dataclass
class LoggerOpener:
    """Opener of a run's loggers, which writes their ids and folders to its record."""

    config: RunConfig
    record: RunRecord
    folder: Path
    on_event: OnEvent
    resumed_at: int | None = None
    """Step from which the run goes on in its folder."""
    _loggers: list[Any] = field(default_factory=list)

    def open(self, config: dict[str, Any]) -> tuple[list[Sink], list[Any]]:
        """Returns the sinks of the chosen loggers, and the loggers for Trainers. A failed one is an event."""
        sinks: list[Sink] = []
        for name in chosen_loggers(self.config.logger):
            on_lost = partial(self._lost, name)
            try:
                opened = self._open_wandb(config, on_lost) if name == "wandb" else self._open(name, config, on_lost)
                sinks.append(opened)
            except Exception as error:  # noqa: BLE001  a failed logger must not end a run
                text = first_line(error)
                message = text if text.startswith(name) else f"{name} can't be started: {text}"
                _LOG.warning("%s; the files have every figure.", message)
                on_lost(message)
        return sinks, self._loggers

    def _lost(self, name: str, message: str) -> None:
        self.on_event("logger_lost", logger=name, message=message)

    def _open(self, name: str, config: dict[str, Any], on_lost: Callable[[str], None]) -> Sink:
        record, is_new = self.record, self.resumed_at is None
        if name == "tensorboard":
            logger = lightning_loggers.open_tensorboard(self.folder, resumed_at=self.resumed_at)
        elif name == "csv":
            logger = lightning_loggers.open_csv(self.folder)
        else:
            store = Path(self.config.paths.log_dir).resolve() / "mlruns"
            asked = self.config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{store}"
            uri, run_id = (record.mlflow["uri"], record.mlflow["run_id"]) if record.mlflow else (asked, None)
            if SECRET_SHOWN in uri:  # the record has no password
                uri = asked
            project, tags = self.config.logger.project, self.config.logger.tags
            name = self.config.logger.name or record.run_id
            logger = lightning_loggers.open_mlflow(uri, experiment=project, name=name, run_id=run_id, tags=tags)
            is_new, record.mlflow = run_id is None, {"run_id": logger.run_id, "uri": uri}
        logger.begin(config, lambda: record.steps, on_lost, is_new=is_new)
        self._loggers.append(logger)
        return logger

    def _open_wandb(self, config: dict[str, Any], on_lost: Callable[[str], None]) -> Sink:
        logger, earlier = self.config.logger, self.record.wandb
        sink = wandb_sink.open_run(
            self.folder,
            mode=wandb_sink.decide_mode(logger.mode.value),
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            name=logger.name or self.record.run_id,
            tags=logger.tags,
            run_id=earlier["id"] if earlier else None,
            config=config,
            on_lost=on_lost,
        )
        parts = [*(earlier["parts"] if earlier else []), str(sink.folder)]
        self.record.wandb = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": parts}
        self._loggers.append(lightning_loggers.of_wandb(sink.run, config, self.folder))
        return sink

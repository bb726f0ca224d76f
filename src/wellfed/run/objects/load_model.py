"""Builds the model of a finished run, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wellfed.config.build import build
from wellfed.config.schema import PathsConfig
from wellfed.errors import ConfigError, DataError
from wellfed.record import folder_lookup
from wellfed.record.entries import RunRecord
from wellfed.run.folder.checkpoint_file import WAY_OUT, is_readable, load_checkpoint, run_folder_of


def load_model(run: str | Path, model_args: Mapping[str, Any] | None = None) -> nn.Module:
    """Returns the model on the CPU, in evaluation mode.

    Calls the classes that ``run.json`` names, so load only runs that you trust. Objects in the file are read only
    if the run was trained with `trainer.trusted_checkpoints`.

    Args:
        run: a checkpoint file; or a run's folder, its name or the beginning of it, or ``last`` for the newest (in
            ``logs/*/runs``). Of a run, ``best.ckpt`` is loaded, else ``last.ckpt``.
        model_args: the value of `Datasets.model_args`; {} for a model that needs nothing from the data. None = read the
            data to get it, as in the run.

    Raises:
        ConfigError, DataError: there is no such run or checkpoint, it is damaged, or its weights don't fit its model.
    """
    checkpoint = folder_lookup.checkpoint(str(run), Path(PathsConfig.log_dir), flag="a checkpoint file")
    if not is_readable(checkpoint):
        raise ConfigError.of(str(checkpoint), "is not a checkpoint that can be read.", WAY_OUT)
    try:
        config = RunRecord.read(run_folder_of(checkpoint)).filled_config()
        workload = config["workload"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{checkpoint} has no run record beside it ({error}). Keep it in its run folder.") from error
    trusted = config.get("trainer", {}).get("trusted_checkpoints", False)
    weights = load_checkpoint(checkpoint, ("state_dict",), trusted=trusted)["state_dict"]
    if model_args is None:
        data = None if workload["data"] is None else build(workload["data"], "workload.data")
        model_args = getattr(data, "model_args", {})
    model: nn.Module = build(workload["model"], "workload.model", **model_args)
    if not hasattr(model, "training_step"):  # a plain model was trained inside a module of the engine
        weights = {name.removeprefix("model."): value for name, value in weights.items()}
    try:
        model.load_state_dict(weights, strict=getattr(model, "strict_loading", True))
    except RuntimeError as error:
        raise DataError(f"{checkpoint} does not fit the model that run.json names: {error}") from error
    return model.eval()

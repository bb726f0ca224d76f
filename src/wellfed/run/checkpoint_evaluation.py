"""Evaluates a checkpoint on the test split, with the configuration of the run that wrote it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from wellfed.config.compose import Composed, compose_as
from wellfed.config.quoting import quoted
from wellfed.config.schema import EvaluateConfig, RunConfig
from wellfed.errors import ConfigError
from wellfed.process import without_collections
from wellfed.record.entries import RunRecord
from wellfed.run.folder.checkpoint_file import WAY_OUT, is_readable, load_checkpoint, run_folder_of
from wellfed.run.folder.resume import check_unchanged, derived_overrides

_OF_TRAINING = (
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
    "gpu.memory_gib",
    "gpu.enforce",
    "gpu.precision=16-mixed",
)
"""Overrides about the training machine, which an evaluation ignores. A CPU has no 16-mixed."""


def evaluate_checkpoint(checkpoint: Path, asked: EvaluateConfig, flags: Sequence[str] = ()) -> dict[str, float]:
    """Returns the metrics of a checkpoint; writes nothing.

    Args:
        flags: typed arguments that say where configurations are, as in `Composed.flags`; they replace the run's.

    Raises:
        ConfigError, DataError: there is no such checkpoint, or it can't be evaluated here.
    """
    run, checkpoint = _run_of(checkpoint, asked, flags), checkpoint.absolute()
    with run.as_job():
        return _evaluated(run, checkpoint)


def _evaluated(run: Composed[RunConfig], checkpoint: Path) -> dict[str, float]:
    with without_collections():  # imports torch only for a checkpoint that exists
        from wellfed.observe.hardware.detect import machine
        from wellfed.observe.hardware.torch_cuda import torch_cuda
        from wellfed.run.bookkeeper import Bookkeeper
        from wellfed.run.passes.choice import passes_class
        from wellfed.run.planner import Planner

    state = load_checkpoint(checkpoint, trusted=run.config.trainer.trusted_checkpoints)  # before model and data
    facts = machine(torch_cuda())
    planner = Planner.start(run, facts)
    for warning in planner.device.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    plan = planner.for_evaluation()
    with tempfile.TemporaryDirectory() as folder:
        books = Bookkeeper(RunRecord.start("evaluate"), Path(folder), run.config)
        passes = passes_class(planner.parts)(planner.config, planner.parts, plan, books, rank=0)
        passes.check_fits(f"checkpoint={checkpoint}", state)
        return passes.evaluate(checkpoint)


def _run_of(checkpoint: Path, asked: EvaluateConfig, flags: Sequence[str]) -> Composed[RunConfig]:
    """Returns the configuration of the run that wrote a checkpoint, from the record beside it.

    Raises:
        ConfigError: no readable checkpoint or record, or ``configs/`` now gives other data, model or metrics.
    """
    where, folder = f"checkpoint={checkpoint}", run_folder_of(checkpoint)
    if not checkpoint.is_file():
        raise ConfigError.of(where, "there is no such file.", "Name a file in a run folder.")
    if not is_readable(checkpoint):
        raise ConfigError.of(where, "is not a checkpoint that can be read.", WAY_OUT)
    try:
        earlier = RunRecord.read(folder)
    except (OSError, ValueError) as error:
        way_out = "Put it into its run folder: run.json there says what was trained."
        raise ConfigError.of(where, f"has no run record beside it ({error}).", way_out) from error
    overrides = [
        *(quoted(text) for text in earlier.overrides if not text.startswith(_OF_TRAINING)),
        *derived_overrides(earlier),
        "trainer.devices=1",
        "trainer.num_nodes=1",
        "trainer.strategy=auto",
        f"trainer.accelerator={asked.accelerator.value}",
    ]
    typed = [flag.partition("=")[0] for flag in flags]
    kept = [flag for flag in earlier.flags if flag.partition("=")[0] not in typed]
    composed: Composed[RunConfig] = compose_as([*kept, *flags], overrides).in_folder(folder)
    for line in check_unchanged(composed, earlier, evaluates=True):
        print(f"evaluate: {line}", file=sys.stderr)
    return composed

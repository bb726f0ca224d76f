"""Runs the entry scripts of a project: ``wellfed train``, ``tune`` and ``evaluate``, or ``python src/train.py`` etc."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wellfed.cli.exit_code import report_error
from wellfed.command_line import announce, set_arguments
from wellfed.config import entry
from wellfed.config.compose import Composed
from wellfed.config.quoting import key_value, quoted
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig
from wellfed.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from wellfed.ranks import is_one_of_many

RESULT = "evaluation.json"


def train(argv: Sequence[str]) -> int:
    """Composes and checks the configuration before torch is imported, then trains; with ``-m`` many runs."""

    def start(job: Callable[[Composed[RunConfig]], int]) -> int:
        return entry.main("train", job, [*argv], expand=_expand)

    if not is_one_of_many():
        return start(_train)
    from wellfed.run.train import on_all_ranks

    return on_all_ranks(start)


def _train(composed: Composed[RunConfig]) -> int:
    from wellfed.run.train import train  # --help, --cfg job and a typo need none of it

    return train(composed)


def _expand(overrides: Sequence[str], compose: Callable[[Sequence[str]], Composed[Any]]) -> list[str]:
    """Returns the command line with the recorded overrides of the run that it resumes or starts again."""
    if {key_value(text)[0] for text in overrides}.isdisjoint(("resume", "rerun")):
        return [quoted(text) for text in overrides]
    from wellfed.run.folder.resume import expand

    return expand(overrides, compose)


def tune(argv: Sequence[str]) -> int:
    """Composes and checks the start before torch is imported, then finds faster settings."""
    if "--force" in argv:
        argv = ["tune.replace=true" if word == "--force" else word for word in argv]
        set_arguments(argv)
    from wellfed.study.tune import start  # `train` starts without it

    return entry.main("tune", _tune, [*argv], expand=start.expand, not_many=start.NOT_MANY)


def _tune(composed: Composed[TuneRunConfig]) -> int:
    from wellfed.study.tune import tuning

    return tuning.tune(composed)


def evaluate(argv: Sequence[str]) -> int:
    """Composes and checks before torch is imported, then evaluates a checkpoint."""

    def own(overrides: Sequence[str], _: object) -> list[str]:
        return [quoted(text) for text in overrides]  # paths that Hydra's grammar can't read

    return entry.main("evaluate", evaluate_composed, [*argv], expand=own)


def evaluate_composed(composed: Composed[EvaluateConfig]) -> int:
    """Prints the metrics, writes them to ``evaluation.json`` in the run folder, and returns the exit code."""
    from wellfed.record import folder_lookup  # --help and --cfg job need none of it

    try:
        asked, log_dir = composed.config.checkpoint, Path(composed.config.paths.log_dir)
        checkpoint = folder_lookup.checkpoint(asked, log_dir, flag="paths.log_dir=<folder>")
        announce(f"Evaluating {checkpoint}: importing PyTorch, reading data, building the model")
        from wellfed.run.checkpoint_evaluation import evaluate_checkpoint
        from wellfed.run.folder.checkpoint_file import run_folder_of

        metrics = evaluate_checkpoint(checkpoint, composed.config, composed.flags)
    except Exception as error:  # noqa: BLE001  raised again where a traceback helps
        return report_error(error, way_on="accelerator=cpu evaluates without the card.")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    found = {f"test/{name}": value for name, value in metrics.items()}
    for name, value in found.items():
        print(f"{name} {value:.6g}")
    path = run_folder_of(checkpoint) / RESULT
    from wellfed.record.files import write_atomically

    try:
        write_atomically(path, json.dumps({"checkpoint": str(checkpoint), "metrics": found}, indent=1) + "\n")
    except OSError as error:
        print(f"{path} can't be written ({error.strerror}); the figures above are all there is.", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK

"""Prints the metrics of a checkpoint on the test split, and leaves them beside it (``wellfed evaluate``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from wellfed.cli.ended import tell
from wellfed.config import entry
from wellfed.config.compose import Composed
from wellfed.config.files import folder_lookup
from wellfed.config.quoting import quoted
from wellfed.config.schema import EvaluateConfig
from wellfed.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from wellfed.record import write_atomically
from wellfed.run.ranks.announce import announce

RESULT = "evaluation.json"


def main(argv: Sequence[str]) -> int:
    """Composes and checks before torch is imported, then evaluates; returns the exit code."""
    # Paths that Hydra's grammar would stumble over are put in quotes.
    return entry.main("evaluate", evaluate, [*argv], expand=lambda overrides, _: [quoted(text) for text in overrides])


def evaluate(composed: Composed[EvaluateConfig]) -> int:
    """Print the metrics, and leave them as ``evaluation.json`` in the run's folder; the exit code."""
    try:
        asked, log_dir = composed.config.checkpoint, Path(composed.config.paths.log_dir)
        checkpoint = folder_lookup.checkpoint(asked, log_dir, flag="paths.log_dir=<folder>")
        announce(f"Evaluating {checkpoint}: importing PyTorch, reading data, building the model")
        from wellfed.run.checkpoint_evaluation import evaluate_checkpoint

        metrics = evaluate_checkpoint(checkpoint, composed.config)
    except Exception as error:  # noqa: BLE001  raised again where a traceback helps
        return tell(error, way_on="accelerator=cpu evaluates without the card.")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    for name, value in metrics.items():
        print(f"test/{name} {value:.6g}")
    path = checkpoint.parent.parent / RESULT
    result = {"checkpoint": str(checkpoint), "metrics": {f"test/{name}": value for name, value in metrics.items()}}
    try:
        write_atomically(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        print(f"{path} can't be written ({error.strerror}); the figures above are all there is.", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK

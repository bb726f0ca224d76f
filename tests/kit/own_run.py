"""Trains a workload of a test's own in this process, as the command does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wellfed.config.compose import compose
from wellfed.run.train import train


def run_own(folder: Path, *overrides: str, **workload: Any) -> tuple[int, Path]:
    """Returns the exit code and the run folder, which a resumed run shares with an earlier one.

    Args:
        workload: fields of the configuration's ``workload``.
    """
    made = compose(
        [
            *("logger=none", "loader=baseline", "trainer.accelerator=cpu", "telemetry.enabled=false"),
            *(f"paths.log_dir={folder}", f"paths.cache_dir={folder / 'cache'}", *overrides),
        ]
    )
    runs = folder / "w" / "runs"
    before = set(runs.glob("*"))
    config = replace(made.config, workload=replace(made.config.workload, name="w", effective_batch_size=8, **workload))
    code = train(replace(made, config=config))
    return code, max(set(runs.glob("*")) - before or before, default=runs)

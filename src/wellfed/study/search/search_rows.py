"""Makes the row of the ledger from what a trial of a search has left: what it learned, whether it was ended early."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from wellfed.record import RunRecord
from wellfed.study.executors.executor import TrialEnd, row_of_end
from wellfed.study.search.curves import best_point, read_curve
from wellfed.study.search.search_file import SearchFile
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.rows import recorded_row

Outcome = Literal["complete", "pruned", "failed"]
"""complete: trained to its end, with a figure that ranks; pruned: ended early, since others were better by then."""


@dataclass(frozen=True)
class SearchRow(Row):
    """What became of one trial."""

    trial: int = 0
    """Its number, from 0; of a sampler that of the sampler's study."""
    outcome: Outcome = "failed"
    """What it is to the search. ``status`` is what it is to itself, as in run.json: a pruned trial ends ``ok``."""
    value: float | None = None
    """The best that the metric was at a validation: that of ``checkpoints/best.ckpt``."""
    value_step: int | None = None
    """Optimizer steps until then."""
    last_value: float | None = None
    """That of its last validation."""
    validations: int = 0
    """That gave the metric."""
    trained_steps: int = 0


def row_of_training(row: SearchRow, end: TrialEnd, folder: Path, *, file: SearchFile) -> SearchRow:
    """Returns the finished row of a training; ``folder`` is the search's."""
    ended = row_of_end(row, end, folder, group="search")
    return _with_curve(ended, folder, file) if ended.folder else ended


def adopted_row(row: SearchRow, folder: Path, file: SearchFile) -> SearchRow | None:
    """The row of a trial that has ended and is not in the ledger; None if it left no complete record."""
    found = recorded_row(row, folder)
    return None if found is None else _with_curve(found, folder, file)


def _with_curve(row: SearchRow, folder: Path, file: SearchFile) -> SearchRow:
    try:
        record = RunRecord.read(folder / row.folder)
    except (OSError, ValueError):
        return row
    curve = read_curve(folder / row.folder, file.metric)
    best = best_point(curve, higher_is_better=file.higher_is_better)
    is_pruned = any(event["kind"] == "pruned" for event in record.events)
    outcome: Outcome = "failed" if row.status != "ok" or best is None else "pruned" if is_pruned else "complete"
    last = curve[-1].value if curve else math.nan
    return replace(
        row,
        outcome=outcome,
        value=None if best is None else best.value,
        value_step=None if best is None else best.step,
        last_value=last if math.isfinite(last) else None,
        validations=len(curve),
        trained_steps=record.steps,
    )

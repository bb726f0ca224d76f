"""Common base of the classes that watch a user's own training loop: options, summary, file of the curves."""

from __future__ import annotations

import logging
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellfed.watch.error_guard import Harmless
from wellfed.watch.script_process import Script

if TYPE_CHECKING:  # imports torch
    from wellfed.watch.script_record import ScriptRecord

_LOG = logging.getLogger(__name__)
INTERVAL_S, SHORTEST_S = 0.5, 0.1
"""Seconds between readings of GPUs and host: by default, and at least."""
_FIRST_COLUMNS = "time_s,step,phase,gpu"


class LoopWatch(Harmless):
    """Base of GPUWatch and GPUCurves."""

    _record: ScriptRecord | None = None
    """Record of the latest watch."""

    def __init__(
        self,
        csv: str | Path | None = None,
        *,
        interval_s: float = INTERVAL_S,
        quiet: bool = False,
        log_dir: str | Path = "logs",
    ) -> None:
        """
        Args:
            csv: file that gets the curves at the end, one row per reading. An older file of this kind is replaced, any
                other is kept.
            interval_s: seconds between two readings, at least 0.1.
            quiet: print nothing at the end. `summary` has the figures.
            log_dir: folder in which ``watch/runs/`` has the run folders.

        Raises:
            TypeError: the interval is not a number.
            ValueError: the interval is too short.
        """
        super().__init__()
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)):
            raise TypeError(f"interval_s={interval_s!r}: must be a number of seconds, as {INTERVAL_S}.")
        if not SHORTEST_S <= interval_s < math.inf:
            raise ValueError(f"interval_s={interval_s}: readings are at least {SHORTEST_S} s apart.")
        self._csv, self._interval_s, self._quiet, self._log_dir = csv, float(interval_s), quiet, Path(log_dir)
        self._script = Script(Path(sys.argv[0]).name or "training")

    @property
    def summary(self) -> dict[str, Any]:
        """The figures so far, as plain data; empty if nothing was watched. Shares are of the time of a step, 0 to 1."""
        return self._record.figures() if self._record is not None and self._record.is_open else {}

    def _copy_curves(self) -> None:
        """Copies the curves of the run folder to the user's file, unless that holds something else."""
        if self._csv is None or self._record is None or self._record.folder is None:
            return
        path = Path(self._csv).expanduser()
        try:
            if path.exists() and not path.read_text("utf-8", errors="replace").startswith(_FIRST_COLUMNS):
                _LOG.warning("%s holds something else and is left as it is: no curves are written.", path)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._record.folder / "telemetry.csv", path)
        except OSError as error:
            _LOG.warning("%s can't be written (%s): no curves are written.", path, error.strerror or error)

"""Writes the monitor's readings to a CSV file: one row per reading and GPU, on disk at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from wellfed.errors import ConfigError
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import Sample

COLUMNS = ("timestamp", "time_s", "gpu", *METRICS)


class CurveFile:
    """The CSV file of ``monitor --csv``. A failed write is reported once and tried again."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """
        Raises:
            ConfigError: the file exists, or can't be created.
        """
        _create(path)
        self._path, self._report = path, report
        self._num_failures = 0
        self._table = CsvTable(path, COLUMNS, self._failed, flush_s=0)

    def add(self, samples: Sequence[Sample]) -> None:
        """Writes a round of readings."""
        self._table.append(*rows_of(samples))

    def close(self) -> None:
        """Writes the rows held back while the disk was full."""
        before = self._num_failures
        self._table.flush()
        if self._num_failures > before:
            self._report(f"{self._path} lacks the last readings: it could not be written to the end.")

    def _failed(self, error: OSError) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            self._report(
                f"{self._path} can't be written ({error.strerror}): it is tried again, and the watching goes on."
            )


def rows_of(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Returns rows for a `CsvTable` with ``timestamp`` and any columns of telemetry.csv."""
    facts = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds")}
    return [
        {**facts, "time_s": one.time_s, "step": one.step, "phase": one.phase, "gpu": one.gpu, **one.values}
        for one in samples
    ]


def _create(path: Path) -> None:
    """Creates an empty file; never replaces one."""
    where = f"--csv {path}"
    if not path.parent.is_dir():
        raise ConfigError.of(where, f"there is no folder {path.parent}.", f"Run: mkdir -p {path.parent}")
    if path.is_dir():
        raise ConfigError.of(where, "is a folder.", f"Name a file: {path / 'monitor.csv'}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError as error:
        way_out = f"Name another file: {_free_name(path)} is free."
        raise ConfigError.of(where, "is there already, and is not overwritten.", way_out) from error
    except OSError as error:
        problem = f"can't be written ({error.strerror})."
        raise ConfigError.of(where, problem, "Name a file in another folder.") from error


def _free_name(path: Path) -> Path:
    number = 2
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free

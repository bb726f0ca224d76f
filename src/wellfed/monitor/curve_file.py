"""Writes the monitor's readings to a CSV file: one row per reading and GPU, on disk at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from wellfed.errors import ConfigError
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import Sample

COLUMNS = ("timestamp", "time_s", "gpu", *METRICS)


class CurveFile:
    """The CSV file of ``monitor --csv``. The first failed write is reported."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        """
        Raises:
            ConfigError: the file exists, or can't be created.
        """
        try:
            path.open("x").close()
        except FileExistsError as error:
            problem = "is there already, and is not overwritten."
            raise ConfigError.of(f"--csv {path}", problem, "Name another file.") from error
        except OSError as error:
            problem = f"can't be written ({error.strerror})."
            raise ConfigError.of(f"--csv {path}", problem, "Name a file in a folder that exists.") from error
        self._path, self._report, self._has_failed = path, report, False
        self._table = CsvTable(path, COLUMNS, self._failed, flush_s=0)

    def add(self, samples: Sequence[Sample]) -> None:
        """Writes a round of readings."""
        self._table.append(*rows_of(samples))

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._report(f"{self._path} lacks readings ({error.strerror}); the watching goes on.")


def rows_of(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Returns rows for a `CsvTable` with ``timestamp`` and any columns of telemetry.csv."""
    facts = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds")}
    return [
        {**facts, "time_s": one.time_s, "step": one.step, "phase": one.phase, "gpu": one.gpu, **one.values}
        for one in samples
    ]

"""Writes readings of GPUs and host to a new CSV file (``monitor --csv``): one row per reading and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from wellfed.errors import ConfigError
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import Sample

MONITOR_COLUMNS = ("timestamp", "time_s", "gpu", *METRICS)


def new_file(path: Path, report: Callable[[str], None]) -> CsvTable:
    """Returns a new table, which is on disk at once. The first failed write is reported.

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
    failures: list[OSError] = []

    def failed(error: OSError) -> None:
        if not failures:
            report(f"{path} lacks readings ({error.strerror}); the watching goes on.")
        failures.append(error)

    return CsvTable(path, MONITOR_COLUMNS, failed, flush_s=0)


def rows_of(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Returns the rows of a table of `new_file`."""
    timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    return [{"timestamp": timestamp, "time_s": one.time_s, "gpu": one.gpu, **one.values} for one in samples]

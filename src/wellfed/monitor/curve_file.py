"""Writes readings of GPUs and host to CSV files: one row per reading and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from wellfed.errors import ConfigError
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.telemetry.metrics import COLUMNS, METRICS
from wellfed.observe.telemetry.series import Sample

MONITOR_COLUMNS = ("timestamp", "time_s", "gpu", *METRICS)
LOOP_COLUMNS = ("timestamp", *COLUMNS)


def new_file(path: Path, report: Callable[[str], None]) -> CsvTable:
    """Returns a new table for ``monitor --csv``, which is on disk at once. The first failed write is reported.

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


def open_csv_for(
    path: str | Path | None, node: int, on_error: Callable[[str], None], *, is_new: bool = True
) -> CsvTable | None:
    """Returns a table at this path, which replaces an older one. None without a path, or if the file can't be written.
    Nodes other than the first write their own file: ``telemetry.node1.csv``."""
    if path is None:
        return None
    path = Path(path).expanduser()
    if node:
        path = path.with_name(f"{path.stem}.node{node}{path.suffix}")
    try:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as stream:
                if not (first := stream.readline()).startswith(",".join(LOOP_COLUMNS[:5])) and first:
                    on_error(f"{path} holds something else and is left as it is: no curves are written.")
                    return None
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_new:
            path.write_text("", encoding="utf-8")
    except OSError as error:
        on_error(f"{path} can't be written ({error.strerror or error}): no curves are written.")
        return None
    return CsvTable(path, LOOP_COLUMNS, lambda error: on_error(f"{path} can't be written: {error.strerror or error}."))


def rows_of(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Returns rows for a `CsvTable` with ``timestamp`` and any columns of telemetry.csv."""
    facts = {"timestamp": datetime.now(UTC).isoformat(timespec="milliseconds")}
    return [
        {**facts, "time_s": one.time_s, "step": one.step, "phase": one.phase, "gpu": one.gpu, **one.values}
        for one in samples
    ]
